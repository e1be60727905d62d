"""A COCO data set that tests draw: rectangles and triangles, ids with gaps, a crowd, and an image with nothing in it."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from dssl import config_io
from dssl.config import RunConfig
from dssl.methods import BYOLConfig
from dssl.training.prepare import build_method
from dssl.weights import checkpoint
from dssl_coco import CocoConfig

CATEGORIES = [{"id": 90, "name": "triangle"}, {"id": 3, "name": "square"}, {"id": 41, "name": "never there"}]
"""Neither in order nor without gaps, as in COCO."""


def square(left: float, top: float, side: float) -> dict[str, Any]:
    right, bottom = left + side, top + side
    return {
        "category_id": 3,
        "bbox": [left, top, side, side],
        "area": side * side,
        "iscrowd": 0,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
    }


def triangle(left: float, top: float, side: float) -> dict[str, Any]:
    return {
        "category_id": 90,
        "bbox": [left, top, side, side],
        "area": side * side / 2,
        "iscrowd": 0,
        "segmentation": [[left, top, left + side, top + side, left, top + side]],
    }


def crowd(width: int, height: int, *, rows: int) -> dict[str, Any]:
    """The right-most columns of an image, as run lengths (which go down the columns)."""
    inside = rows * height
    return {
        "category_id": 3,
        "bbox": [width - rows, 0, rows, height],
        "area": inside,
        "iscrowd": 1,
        "segmentation": {"size": [height, width], "counts": [width * height - inside, inside]},
    }


def write(folder: Path, split: str, images: list[tuple[int, int, list[dict[str, Any]]]], **changes: Any) -> Path:
    """Draw images (width, height, objects), numbered 10, 20, ..., in COCO's layout; ``changes`` replace parts of the file."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir(exist_ok=True)
    listed, annotations = [], []
    for number, (width, height, objects) in enumerate(images, 1):
        pixels = np.random.Generator(np.random.Philox(number)).integers(90, 140, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        pen = ImageDraw.Draw(picture)
        for one in objects:
            if not one["iscrowd"]:
                for polygon in one["segmentation"]:
                    pen.polygon(polygon, fill="red" if one["category_id"] == 3 else "blue")
            annotations.append({"id": len(annotations), "image_id": 10 * number, **one})
        picture.save(folder / split / f"{number}.png")
        listed.append({"id": 10 * number, "file_name": f"{number}.png", "width": width, "height": height})
    content = {"images": listed, "annotations": annotations, "categories": CATEGORIES} | changes
    file = folder / "annotations" / f"instances_{split}.json"
    file.write_text(json.dumps(content))
    return file


def draw(folder: Path) -> Path:
    """Five small images with objects, one without, one with a crowd: the split "all"."""
    write(
        folder,
        "all",
        [
            (64, 48, [square(8, 8, 24)]),
            (64, 64, [triangle(20, 10, 40)]),
            (48, 64, [square(4, 30, 28), triangle(10, 2, 24)]),
            (64, 64, []),
            (64, 64, [square(2, 20, 36), crowd(64, 64, rows=12)]),
            (56, 64, [triangle(8, 8, 44)]),
        ],
    )
    return folder


def tiny(folder: Path, **changes: Any) -> CocoConfig:
    """The smallest run that has every part of a real one."""
    settings: dict[str, Any] = {
        "weights": "scratch", "encoder": "resnet18", "data": folder, "train": "all", "test": "all", "steps": 4,
        "batch_size": 2, "rate": 0.02, "sizes": (48, 64), "test_size": 64, "max_size": 96, "anchors": (8, 16, 32, 64, 96),
        "proposals": 16, "samples": 8, "threads": 1, "health_every": 1, "round": 2, "pictures": 2,
    }  # fmt: skip
    return CocoConfig(**(settings | changes))


def command(folder: Path, out: Path, *extra: str) -> list[str]:
    """The same run as a process."""
    return [
        sys.executable, "-m", "dssl", "evaluate-coco", "scratch", str(folder), "--encoder", "resnet18", "--train", "all",
        "--test", "all", "--steps", "4", "--batch-size", "2", "--rate", "0.02", "--sizes", "48", "64", "--test-size", "64",
        "--max-size", "96", "--anchors", "8", "16", "32", "64", "96", "--proposals", "16", "--samples", "8", "--threads", "1",
        "--look-every", "1", "--round", "2", "--pictures", "2", "--out", str(out), *extra,
    ]  # fmt: skip


def pretrained(path: Path, **changes: Any) -> Path:
    """A checkpoint of BYOL with a ResNet-18: online and target encoder differ, and no BatchNorm is as it was born."""
    config = replace(RunConfig(encoder="resnet18", method=BYOLConfig(hidden=8, output=8)), **changes)
    method = build_method(config)
    assert isinstance(method, nn.Module)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"method.{name}": value + 0.02 * torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else value
        for name, value in method.state_dict().items()
    }
    header = {
        "step": 7,
        "config": config_io.to_dict(config),
        "normalization": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]},
        "health": {},
    }
    checkpoint.write(path, header, tensors)
    return path


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
