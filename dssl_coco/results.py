"""Detections in COCO's results format, and their scores, which pycocotools computes."""

import contextlib
import importlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dssl.errors import DsslError
from dssl_coco.annotations import CocoData, CocoImage

COLUMNS = ("AP", "AP50", "AP75")
MASK_THRESHOLD = 0.5
Detection = dict[str, Any]
"""image_id, category_id, score, bbox (x, y, width, height) and segmentation (run lengths)."""


def require_pycocotools() -> None:
    """pycocotools draws the masks and computes the scores; without it, say how to get it before anything else happens."""
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
    """AP in percent; None where the split has no object of the category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The six columns of the paper's table and the AP of every category, in percent."""

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


def to_results(image: CocoImage, found: dict[str, Tensor], category_ids: Sequence[int]) -> list[Detection]:
    """A detector's output for one image (boxes as corners, labels from 1, soft masks) as COCO's results."""
    found = {name: value.cpu() for name, value in found.items()}
    return [
        {
            "image_id": image.id,
            "category_id": category_ids[label - 1],
            "score": score,
            "bbox": [left, top, right - left, bottom - top],
            "segmentation": encode_mask((soft[0] > MASK_THRESHOLD).byte().numpy()),
        }
        for (left, top, right, bottom), label, score, soft in zip(
            found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist(), found["masks"], strict=True
        )
    ]


def encode_mask(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """Run lengths of a mask of 0 and 1, as JSON can hold them."""
    from pycocotools import mask

    runs = mask.encode(np.asfortranarray(pixels))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def ground_truth(data: CocoData) -> dict[str, Any]:
    """The split as a COCO data set; ids start at 1, since pycocotools takes a match with id 0 for a miss."""
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
        "images": [{"id": one.id, "height": one.size[0], "width": one.size[1]} for one in data.images],
        "categories": [
            {"id": number, "name": name} for number, name in zip(data.category_ids, data.category_names, strict=True)
        ],
        "annotations": [{"id": number, **one} for number, one in enumerate(annotations, 1)],
    }


def score(data: CocoData, results: Iterable[Detection]) -> Scores:
    """Box and mask AP, AP50 and AP75 over every image of the split, with at most 100 detections per image."""
    from pycocotools.coco import COCO

    found = list(results)
    truth = ground_truth(data)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        expected = _dataset(COCO(), truth)
        # loadRes cannot read an empty list
        given = expected.loadRes(found) if found else _dataset(COCO(), {**truth, "annotations": []})
        box, box_classes = _evaluate(expected, given, "bbox")
        mask, mask_classes = _evaluate(expected, given, "segm")
    objects = Counter(one.label for image in data.images for one in image.objects)
    return Scores(
        box=box,
        mask=mask,
        classes=tuple(
            ClassScore(name=name, objects=objects[label], box=box_classes[label - 1], mask=mask_classes[label - 1])
            for label, name in enumerate(data.category_names, 1)
        ),
        images=len(data.images),
        detections=len(found),
    )


def _evaluate(expected: Any, given: Any, kind: str) -> tuple[dict[str, float], list[float | None]]:
    from pycocotools.cocoeval import COCOeval

    evaluation = COCOeval(expected, given, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    columns = {name: 100 * float(value) for name, value in zip(COLUMNS, evaluation.stats[:3], strict=True)}
    # IoU thresholds x recalls x categories x areas x detections per image: all areas, at most 100; -1 means "no object"
    precision = np.moveaxis(evaluation.eval["precision"][:, :, :, 0, 2], 2, 0)
    return columns, [100 * float(values.mean()) if (values > -1).all() else None for values in precision]


def _dataset(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco
