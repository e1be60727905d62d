"""Detections in COCO's results format, and their scores: pycocotools does the arithmetic, on what the file says."""

import contextlib
import importlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dssl.coco.annotations import CocoData, CocoImage
from dssl.coco.masks import encode
from dssl.errors import DsslError

COLUMNS = ("AP", "AP50", "AP75")
MASK_THRESHOLD = 0.5
Result = dict[str, Any]
"""One detection: image_id, category_id, score, bbox (x, y, width, height) and segmentation (run lengths)."""


def require_pycocotools() -> None:
    """pycocotools draws the masks and computes the scores; say how to get it before anything else happens."""
    try:
        importlib.import_module("pycocotools.cocoeval")
    except ImportError:
        raise DsslError("COCO needs pycocotools: pip install 'dssl[coco]'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScore:
    name: str
    objects: int
    box: float | None
    mask: float | None
    """AP in percent; None where the split has no such object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The six columns of the paper's table, in percent, and the AP of every category."""

    box: dict[str, float]
    mask: dict[str, float]
    classes: tuple[ClassScore, ...]
    images: int
    detections: int

    def plain(self) -> dict[str, Any]:
        return {
            "box": self.box,
            "mask": self.mask,
            "images": self.images,
            "detections": self.detections,
            "classes": [
                {"name": one.name, "objects": one.objects, "box AP": one.box, "mask AP": one.mask}
                for one in self.classes
            ],
        }


def to_results(image: CocoImage, detections: dict[str, Tensor], category_ids: Sequence[int]) -> list[Result]:
    """A detector's output for one image (boxes as corners, labels from 1, soft masks) as COCO's results."""
    boxes = detections["boxes"].double().cpu().numpy()
    results = []
    for row, (left, top, right, bottom) in enumerate(boxes):
        pixels = (detections["masks"][row, 0] > MASK_THRESHOLD).byte().cpu().numpy()
        results.append(
            {
                "image_id": image.id,
                "category_id": category_ids[int(detections["labels"][row]) - 1],
                "score": float(detections["scores"][row]),
                "bbox": [float(left), float(top), float(right - left), float(bottom - top)],
                "segmentation": encode(pixels),
            }
        )
    return results


def ground_truth(data: CocoData) -> dict[str, Any]:
    """The split as a COCO data set; ids start at 1, since pycocotools takes a match with id 0 for none."""
    annotations = [
        {
            "image_id": image.id,
            "category_id": data.category_ids[one.label - 1],
            "bbox": list(one.box),
            "area": one.area,
            "iscrowd": int(one.crowd),
            "segmentation": one.segmentation,
        }
        for image in data.images
        for one in image.instances
    ]
    return {
        "info": {},
        "images": [{"id": image.id, "width": image.width, "height": image.height} for image in data.images],
        "categories": [
            {"id": number, "name": name} for number, name in zip(data.category_ids, data.category_names, strict=True)
        ],
        "annotations": [{"id": number, **one} for number, one in enumerate(annotations, 1)],
    }


def score(data: CocoData, results: Iterable[Result]) -> Scores:
    """Box and mask AP, AP50 and AP75 of detections on every image of the split, with at most 100 detections an image."""
    found = list(results)
    truth = ground_truth(data)
    box, box_classes = _evaluate(truth, [_without(one, "segmentation") for one in found], "bbox")
    mask, mask_classes = _evaluate(truth, [_without(one, "bbox") for one in found], "segm")
    objects = np.zeros(len(data.category_ids), dtype=np.int64)
    for image in data.images:
        for one in image.objects:
            objects[one.label - 1] += 1
    return Scores(
        box=box,
        mask=mask,
        classes=tuple(
            ClassScore(name=name, objects=int(objects[place]), box=box_classes[place], mask=mask_classes[place])
            for place, name in enumerate(data.category_names)
        ),
        images=len(data.images),
        detections=len(found),
    )


def _evaluate(truth: dict[str, Any], results: list[Result], kind: str) -> tuple[dict[str, float], list[float | None]]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        expected = _dataset(COCO(), truth)
        # loadRes cannot read an empty list
        given = expected.loadRes(results) if results else _dataset(COCO(), {**truth, "annotations": []})
        evaluation = COCOeval(expected, given, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    columns = {name: 100 * float(value) for name, value in zip(COLUMNS, evaluation.stats[:3], strict=True)}
    # IoU thresholds x recalls x categories x areas x detections an image: all areas, at most 100; -1 is "no object"
    precision = evaluation.eval["precision"][:, :, :, 0, 2]
    per_class: list[float | None] = []
    for place in range(precision.shape[2]):
        values = precision[:, :, place]
        per_class.append(100 * float(values.mean()) if (values > -1).all() else None)
    return columns, per_class


def _dataset(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def _without(one: Result, name: str) -> Result:
    """loadRes believes the box where there is one, also for masks."""
    return {key: value for key, value in one.items() if key != name}
