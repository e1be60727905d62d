"""COCO's annotations, checked completely, and training images with boxes and masks, each a function of (seed, epoch, image)."""

import hashlib
import json
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from dssl import rng
from dssl.data.decode import read_image
from dssl.data.pipeline import Pipeline, default_threads
from dssl.errors import DsslError, require
from dssl.files import printable
from dssl_coco import CocoConfig

THINNEST = 0.01
"""Pixels of a box's side inside its image: scaled and in float32 a thinner one may have none, which torchvision rejects."""
_AHEAD = 2
Size = tuple[int, int]
"""Height and width in pixels, as torchvision and pycocotools order them."""
Shown = tuple[int, int, bool]
"""An image's index, its shorter side, and whether it is mirrored."""
Annotation = dict[str, Any]
"""An annotated object as in the file, with its ``label``: 1 .. number of categories, without the gaps that ids may have."""
Segmentation = list[list[float]] | dict[str, Any]
"""Polygons (x, y, x, y, ... in pixels), or a run-length encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoImage:
    id: int
    path: Path
    size: Size
    annotations: tuple[Annotation, ...]

    @property
    def objects(self) -> tuple[Annotation, ...]:
        """What a detector is trained on: everything but crowds."""
        return tuple(one for one in self.annotations if not one["iscrowd"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoData:
    """One split: its images in the order of their ids, and the categories."""

    name: str
    images: tuple[CocoImage, ...]
    category_ids: tuple[int, ...]
    """The file's id of label 1, 2, ..."""
    category_names: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]
    """What was left out, for people."""

    def trainable(self) -> tuple[CocoImage, ...]:
        """The images with at least one object: an empty one would teach the proposals nothing but background."""
        return tuple(image for image in self.images if image.objects)


def read_split(folder: Path, split: str, *, limit: int | None = None) -> CocoData:
    """Read ``folder/annotations/instances_SPLIT.json`` and find its images in ``folder/SPLIT``; ``limit`` keeps the first
    images with an object. A fault that would change what is trained or scored is an error with the file and the id."""
    file = folder / "annotations" / f"instances_{split}.json"
    if not file.is_file():
        names = ", ".join(sorted(entry.name for entry in file.parent.glob("instances_*.json")))
        raise DsslError(
            f"{file} does not exist (the folder has {names or 'no such files'}): "
            "expected COCO's layout, annotations/instances_SPLIT.json and the images in SPLIT"
        )
    content = file.read_bytes()
    try:
        plain = json.loads(content)
    except ValueError as error:  # of JSON or of UTF-8
        raise DsslError(f"{file} is not valid JSON: {error}") from None
    for key, noun in (("images", "image"), ("annotations", "annotation"), ("categories", "category")):
        if not isinstance(plain, dict) or not isinstance(plain.get(key), list):
            raise DsslError(f"{file} has no list {key!r}: expected COCO's instances format")
        _check_ids(plain[key], file, noun)
    categories = sorted((one["id"], str(one.get("name", one["id"]))) for one in plain["categories"])
    if not categories:
        raise DsslError(f"{file} has no categories: there is nothing to detect")
    labels = {number: label for label, (number, _) in enumerate(categories, 1)}
    sizes = {one["id"]: _size(one, f"{file}: image {one['id']}") for one in plain["images"]}
    annotations: dict[int, list[Annotation]] = {number: [] for number in sizes}
    left_out: Counter[str] = Counter()
    for one in plain["annotations"]:
        checked = _checked(one, sizes, labels, f"{file}: annotation {one['id']}")
        if isinstance(checked, str):
            left_out[checked] += 1
        else:
            annotations[one["image_id"]].append(checked)
    files = sorted((one["id"], folder / split / one["file_name"]) for one in plain["images"])
    images = [CocoImage(id=id_, path=path, size=sizes[id_], annotations=tuple(annotations[id_])) for id_, path in files]
    if limit is not None:
        images = [image for image in images if image.objects][:limit]
    if not images:
        raise DsslError(f"{file} has no images: there is nothing to train on or to score")
    digest, missing = hashlib.sha256(content), []
    for image in images:
        try:
            digest.update(f"\n{image.id} {image.path.stat().st_size}".encode())
        except OSError:
            missing.append(printable(image.path.name))
    if missing:
        names = ", ".join([*missing[:3], *(["..."] if len(missing) > 3 else [])])
        raise DsslError(f"{folder / split} lacks {len(missing)} of the {len(images)} annotated images: {names}")
    return CocoData(
        name=f"{folder.name} {split}", images=tuple(images), category_ids=tuple(number for number, _ in categories),
        category_names=tuple(name for _, name in categories), fingerprint=digest.hexdigest(),
        notes=_notes(images, left_out),
    )  # fmt: skip


def _checked(one: Annotation, sizes: Mapping[int, Size], labels: Mapping[int, int], where: str) -> Annotation | str:
    """The annotation with its label, or why it is left out."""
    for key, listed in (("image_id", sizes), ("category_id", labels)):
        require(one.get(key) in listed, f"{where}: {key}", one.get(key), "one that the file lists")
    box, area, crowd = ({"bbox": None, "area": None, "iscrowd": 0, **one}[key] for key in ("bbox", "area", "iscrowd"))
    four = isinstance(box, list) and len(box) == 4 and all(map(_is_number, box))
    require(four, f"{where}: bbox", box, "four numbers x, y, width, height")
    require(_is_number(area), f"{where}: area", area, "a number of pixels")
    require(crowd in (0, 1), f"{where}: iscrowd", crowd, "0 or 1")
    size = height, width = sizes[one["image_id"]]
    left, top, wide, high = box = list(map(float, box))
    if min(min(left + wide, width) - max(left, 0), min(top + high, height) - max(top, 0)) < THINNEST:
        return f"whose box is thinner than {THINNEST:g} pixels inside its image"
    segmentation = _segmentation(one.get("segmentation"), size, where)
    if not segmentation:
        return "whose mask has no polygon with three corners"
    about = {"image_id": one["image_id"], "category_id": one["category_id"], "label": labels[one["category_id"]]}
    return {**about, "bbox": box, "area": float(area), "iscrowd": int(crowd), "segmentation": segmentation}


def _segmentation(given: Any, size: Size, where: str) -> Segmentation:
    """The polygons that enclose an area (pycocotools takes one with two corners for a box), or the run lengths."""
    if isinstance(given, dict):
        expected, runs, pixels = list(size), given.get("counts"), math.prod(size)
        require(
            given.get("size") == expected, f"{where}: size of the mask", given.get("size"), f"its image's {expected}"
        )
        # pycocotools fills pixels beyond the last run with whatever is in memory; compressed text is its own writing
        whole = (
            isinstance(runs, list) and all(isinstance(run, int) and run >= 0 for run in runs) and sum(runs) == pixels
        )
        fits = whole or isinstance(runs, str)
        require(fits, f"{where}: counts", reprlib.repr(runs), f"run lengths that add up to {pixels} pixels")
        return given
    require(isinstance(given, list), f"{where}: segmentation", given, "polygons or run lengths")
    for polygon in given:
        pairs = isinstance(polygon, list) and len(polygon) % 2 == 0 and all(map(_is_number, polygon))
        require(pairs, f"{where}: polygon", reprlib.repr(polygon), "a list of numbers x, y, x, y, ...")
        # pycocotools' memory grows with the coordinates, and it does not notice when there is none
        near = all(-max(size) <= value <= 2 * max(size) for value in polygon)
        require(
            near, f"{where}: polygon", reprlib.repr(polygon), f"corners in pixels of its image of {size[1]} x {size[0]}"
        )
    return [polygon for polygon in given if len(polygon) >= 6]


def _size(one: dict[str, Any], where: str) -> Size:
    height, width, name = one.get("height"), one.get("width"), one.get("file_name")
    whole = isinstance(height, int) and isinstance(width, int) and min(height, width) >= 1
    require(whole, f"{where}: width, height", f"{width}, {height}", "whole numbers of pixels")
    require(isinstance(name, str), f"{where}: file_name", name, "the name of a file")
    return one["height"], one["width"]


def _notes(images: list[CocoImage], left_out: Counter[str]) -> tuple[str, ...]:
    empty = sum(not image.objects for image in images)
    crowds = sum(len(image.annotations) - len(image.objects) for image in images)
    notes = [f"{count} annotations {why} are left out" for why, count in left_out.items()]
    if empty:
        notes.append(f"{empty} images without an object are not trained on; when scored, detections in them are false")
    if crowds:
        notes.append(f"{crowds} crowd regions are not trained on; scoring ignores them and the detections in them")
    return tuple(notes)


def _check_ids(entries: list[Any], file: Path, noun: str) -> None:
    ids = [one.get("id") if isinstance(one, dict) else None for one in entries]
    for number in ids:
        require(type(number) is int, f"{file}: id of {noun}", number, "a whole number")
    repeated = [number for number, count in Counter(ids).items() if count > 1]
    require(not repeated, f"{file}: {noun} id", ", ".join(map(str, repeated[:3])), "once only")


def _is_number(value: Any) -> bool:
    # JSON's integers have no limit: one that overflows a float is an error, too
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Sample(NamedTuple):
    """One training image as the detector receives it."""

    pixels: Tensor
    """3 x height x width, uint8."""
    boxes: Tensor
    """left, top, right, bottom."""
    labels: Tensor
    masks: Tensor
    """Objects x height x width, 0 or 1."""

    def to(self, device: torch.device) -> "Sample":
        return Sample(*(value.to(device, non_blocking=True) for value in self))

    def pinned(self) -> "Sample":
        """In memory that a GPU reads by itself; torch keeps it until the GPU has done so."""
        return Sample(*map(Tensor.pin_memory, self))


def scaled_size(size: Size, *, shorter: int, longest: int) -> Size:
    """The size with its shorter side scaled to ``shorter``, or less where the longer side would exceed ``longest``."""
    # torchvision's own rule truncates the longer side; Detectron's, which this follows, rounds it
    scale = min(shorter / min(size), longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def read_scaled(image: CocoImage, size: Size) -> Tensor:
    """Decode and resize (bilinear, antialiased) to 3 x height x width, uint8; a picture that is not as annotated is an error."""
    pixels = read_image(str(image.path))
    if pixels.shape[:2] != image.size:
        raise DsslError(
            f"{image.path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, its annotations are for "
            f"{image.size[1]} x {image.size[0]}: boxes and masks would not fit"
        )
    scaled: Tensor = functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), list(size))
    return scaled


def draw_mask(segmentation: Segmentation, *, before: Size, after: Size) -> Tensor:
    """An object's pixels (height x width, 0 or 1) in an image that was scaled.

    Polygons are scaled as coordinates and drawn at the new size; run lengths are drawn and then scaled.
    """
    from pycocotools import mask

    drawn: Tensor
    if isinstance(segmentation, dict):
        plain = isinstance(segmentation["counts"], list)
        runs = mask.frPyObjects(segmentation, *before) if plain else segmentation
        drawn = functional.resize(tv_tensors.Mask(mask.decode(runs)), list(after))
    else:
        scale = [after[1] / before[1], after[0] / before[0]]
        polygons = [(np.reshape(polygon, (-1, 2)) * scale).ravel().tolist() for polygon in segmentation]
        drawn = tv_tensors.Mask(mask.decode(mask.merge(mask.frPyObjects(polygons, *after))))
    return drawn


def make_sample(image: CocoImage, *, shorter: int, longest: int, mirror: bool) -> Sample:
    """Read an image with at least one object, scale it with its boxes and masks, and mirror all of it or nothing."""
    size = scaled_size(image.size, shorter=shorter, longest=longest)
    boxes = tv_tensors.BoundingBoxes(
        [one["bbox"] for one in image.objects], format="XYWH", canvas_size=image.size, dtype=torch.float32
    )
    corners = functional.convert_bounding_box_format(boxes, new_format="XYXY")
    masks = [draw_mask(one["segmentation"], before=image.size, after=size) for one in image.objects]
    parts = (
        tv_tensors.Image(read_scaled(image, size)),
        functional.clamp_bounding_boxes(functional.resize(corners, list(size))),
        tv_tensors.Mask(torch.stack(masks)),
    )
    if mirror:
        parts = tuple(functional.horizontal_flip(part) for part in parts)
    pixels, corners, drawn = (part.as_subclass(Tensor) for part in parts)
    labels = torch.tensor([one["label"] for one in image.objects], dtype=torch.int64)
    return Sample(pixels=pixels, boxes=corners, labels=labels, masks=drawn)


class Choices:
    """Which image comes when, and how it is shown."""

    def __init__(self, count: int, config: CocoConfig) -> None:
        self.count, self.config = count, config
        # the order of the current epoch is computed once: this is for one thread at a time
        self._order = lru_cache(maxsize=1)(
            lambda epoch: rng.permutation(rng.key(config.seed, "coco order", epoch), count)
        )

    def at(self, step: int, rows: range) -> list[Shown]:
        """What rows of a global batch show; epochs follow each other without a cut."""
        return [self._one(*divmod(step * self.config.batch_size + row, self.count)) for row in rows]

    def _one(self, epoch: int, place: int) -> Shown:
        config, index = self.config, int(self._order(epoch)[place])
        draws = rng.uniforms(rng.key(config.seed, "coco view", epoch), np.array([index]), 2)[0]
        return index, config.sizes[int(draws[0] * len(config.sizes))], config.flip and bool(draws[1] < 0.5)


Content = tuple[list[Shown], list[Sample | None]]


class CocoBatches(Pipeline[Content]):
    """The batches of a run from any step on, made by threads ahead of it."""

    def __init__(
        self, images: Sequence[CocoImage], config: CocoConfig, *, start: int, rank: int = 0, world_size: int = 1,
        pinned: bool = False,
    ) -> None:  # fmt: skip
        count = config.batch_size // world_size
        choices = Choices(len(images), config)

        def begin(step: int) -> tuple[Content, int]:
            return (choices.at(step, range(rank * count, (rank + 1) * count)), [None] * count), count

        def fill(content: Content, rows: range, is_stopped: Callable[[], bool]) -> None:
            shown, samples = content
            for row in rows:
                if is_stopped():
                    return
                index, shorter, mirror = shown[row]
                sample = make_sample(images[index], shorter=shorter, longest=config.max_size, mirror=mirror)
                samples[row] = sample.pinned() if pinned else sample

        threads = config.threads or default_threads()
        super().__init__(begin, fill, first=start, steps=config.total, threads=threads, ahead=_AHEAD, chunk=1)

    def at(self, step: int) -> tuple[Sample, ...]:
        """One rank's part of a global batch."""
        _, samples = self.take(step)
        return tuple(sample for sample in samples if sample is not None)
