"""Detections in COCO's results format, their scores, which pycocotools computes, and the page that shows them."""

import contextlib
import importlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from dssl import rng
from dssl.errors import DsslError
from dssl.files import write_text
from dssl.loop import Ending
from dssl.report import page
from dssl.report.page import SERIES, Plot, styled
from dssl.report.pictures import Picture, embedded
from dssl.run import EVALUATION_PAGE
from dssl.text import columns
from dssl_coco.data import CocoData, CocoImage, Size, draw_mask, read_scaled, scaled_size

COLUMNS = ("AP", "AP50", "AP75")
MASK_THRESHOLD = 0.5
Detection = dict[str, Any]
"""image_id, category_id, score, bbox (x, y, width, height) and segmentation (run lengths)."""
Losses = Sequence[tuple[int, float, Mapping[str, float]]]
"""Step, loss and its parts."""
SHOWN = 0.5
"""Detections with a lower score are not drawn."""
_SIDE = 520
_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#0aa5b5", "#d021b8", "#7d8f00", "#00806a", "#9a6324")


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
        classes = [
            {"name": one.name, "objects": one.objects, "box AP": one.box, "mask AP": one.mask} for one in self.classes
        ]
        counts = {"images": self.images, "detections": self.detections}
        return {"box": self.box, "mask": self.mask, **counts, "classes": classes}

    def table(self) -> str:
        """The six columns for a terminal."""
        head = [f"{kind} {column}" for kind in ("box", "mask") for column in COLUMNS]
        values = [f"{measured[column]:.1f}" for measured in (self.box, self.mask) for column in COLUMNS]
        return "\n".join(columns([head, values], align=">" * len(head)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoResult:
    """How fine-tuning ended; there are scores, and what their page shows, only after the last step, on the first process."""

    ending: Ending
    scores: Scores | None = None
    test: CocoData | None = None
    detections: Sequence[Detection] = ()
    protocol: Mapping[str, Any] | None = None
    losses: Losses = ()


def to_results(image: CocoImage, found: dict[str, Tensor], category_ids: Sequence[int]) -> list[Detection]:
    """A detector's output for one image (boxes as corners, labels from 1, soft masks) as COCO's results."""
    boxes, labels, scores, masks = (found[name].cpu() for name in ("boxes", "labels", "scores", "masks"))
    return [
        {
            "image_id": image.id,
            "category_id": category_ids[label - 1],
            "score": score,
            "bbox": [left, top, right - left, bottom - top],
            "segmentation": encode_mask((soft[0] > MASK_THRESHOLD).byte().numpy()),
        }
        for (left, top, right, bottom), label, score, soft in zip(
            boxes.tolist(), labels.tolist(), scores.tolist(), masks, strict=True
        )
    ]


def encode_mask(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """Run lengths of a mask of 0 and 1, as JSON can hold them."""
    from pycocotools import mask

    runs = mask.encode(np.asfortranarray(pixels))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def ground_truth(data: CocoData) -> dict[str, Any]:
    """The split as a COCO data set; ids start at 1, since pycocotools takes a match with id 0 for a miss."""
    annotations = [one for image in data.images for one in image.annotations]
    categories = zip(data.category_ids, data.category_names, strict=True)
    return {
        "info": {},
        "images": [{"id": image.id, "height": image.size[0], "width": image.size[1]} for image in data.images],
        "categories": [{"id": number, "name": name} for number, name in categories],
        "annotations": [{"id": number, **one} for number, one in enumerate(annotations, 1)],
    }


def score(data: CocoData, results: Iterable[Detection]) -> Scores:
    """Box and mask AP, AP50 and AP75 over every image of the split, with at most 100 detections per image."""
    from pycocotools.coco import COCO

    detections = list(results)
    truth = ground_truth(data)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints as it goes
        expected = _dataset(COCO(), truth)
        # loadRes cannot read an empty list
        given = expected.loadRes(detections) if detections else _dataset(COCO(), {**truth, "annotations": []})
        box, box_classes = _evaluate(expected, given, "bbox")
        mask, mask_classes = _evaluate(expected, given, "segm")
    objects = Counter(one["label"] for image in data.images for one in image.objects)
    classes = tuple(
        ClassScore(name=name, objects=objects[label], box=box_classes[label - 1], mask=mask_classes[label - 1])
        for label, name in enumerate(data.category_names, 1)
    )
    return Scores(box=box, mask=mask, classes=classes, images=len(data.images), detections=len(detections))


def _evaluate(expected: Any, given: Any, kind: str) -> tuple[dict[str, float], list[float | None]]:
    from pycocotools.cocoeval import COCOeval

    evaluation = COCOeval(expected, given, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    percent = {name: 100 * float(value) for name, value in zip(COLUMNS, evaluation.stats[:3], strict=True)}
    # IoU thresholds x recalls x categories x areas x detections per image: all areas, at most 100; -1 means "no object"
    precision = np.moveaxis(evaluation.eval["precision"][:, :, :, 0, 2], 2, 0)
    return percent, [100 * float(values.mean()) if (values > -1).all() else None for values in precision]


def _dataset(coco: Any, content: dict[str, Any]) -> Any:
    coco.dataset = content
    coco.createIndex()
    return coco


def write_page(result: CocoResult, folder: Path, *, pictures: int, command: str) -> Path:
    """Write the page of a scored run to its folder: six columns, every category, the loss, detections next to annotations."""
    scores, data, protocol = result.scores, result.test, result.protocol
    assert scores is not None
    assert data is not None
    assert protocol is not None
    # the same images for every run with this seed, so that two pages can be compared
    images = data.trainable()
    key = rng.key(protocol["config"]["seed"], "coco pictures")
    context = {
        "name": data.name,
        "scores": scores,
        "columns": COLUMNS,
        "losses": loss_plot(result.losses) if result.losses else None,
        "sheets": [_sheet(data, images[place], result.detections) for place in rng.sample(key, len(images), pictures)],
        "shown": f"{SHOWN:g}",
        "protocol": protocol,
        "protocol_text": json.dumps(protocol, indent=1, sort_keys=True),
        "command": command,
    }
    path = folder / EVALUATION_PAGE
    write_text(path, page.render("coco.html", title=f"Detection and segmentation on {data.name}", context=context))
    return path


def loss_plot(losses: Losses) -> Plot:
    """The loss and its five parts over the steps."""
    from matplotlib.figure import Figure

    steps = [step for step, _, _ in losses]
    description = f"Loss from {losses[0][1]:.2f} at step {steps[0]} to {losses[-1][1]:.2f} at step {steps[-1]}"
    with styled():
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, [total for _, total, _ in losses], color=SERIES[0], linewidth=2, label="total")
        for color, name in zip(SERIES[1:], losses[0][2], strict=False):
            axes.plot(steps, [parts[name] for _, _, parts in losses], color=color, linewidth=1, label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend(ncols=3, fontsize=11)
        return page.plot(figure, name="loss", description=description)


def _sheet(data: CocoData, image: CocoImage, results: Sequence[Detection]) -> Picture:
    """The annotations on the left, the detections on the right."""
    size = scaled_size(image.size, shorter=_SIDE, longest=_SIDE)
    sure = [one for one in results if one["image_id"] == image.id and one["score"] >= SHOWN]
    sure.sort(key=lambda one: float(one["score"]))
    pixels = read_scaled(image, size)
    left, right = (_painted(pixels, objects, data, before=image.size) for objects in (image.objects, sure))
    joined = torch.cat([left, pixels.new_full((3, size[0], 8), 255), right], dim=2)
    description = f"{image.path.name}: {len(image.objects)} objects annotated, {len(sure)} found"
    return embedded(Pillow.fromarray(joined.permute(1, 2, 0).numpy()), description=description, photo=True)


def _painted(pixels: Tensor, objects: Sequence[Mapping[str, Any]], data: CocoData, *, before: Size) -> Tensor:
    """Tint the pixels of each annotation or detection, then frame and name it, in the colour of its category."""
    if not objects:
        return pixels
    after = height, width = (pixels.shape[1], pixels.shape[2])
    places = [data.category_ids.index(one["category_id"]) for one in objects]
    names = [
        data.category_names[place] + (f" {one['score']:.2f}" if "score" in one else "")
        for place, one in zip(places, objects, strict=True)
    ]
    colors = [_COLORS[place % len(_COLORS)] for place in places]
    masks = [draw_mask(one["segmentation"], before=before, after=after).bool() for one in objects]
    tinted = draw_segmentation_masks(pixels, torch.stack(masks), alpha=0.45, colors=colors)
    scale = torch.tensor([width / before[1], height / before[0]]).repeat(2)
    boxes = box_convert(torch.tensor([one["bbox"] for one in objects]), "xywh", "xyxy") * scale
    painted: Tensor = draw_bounding_boxes(tinted, boxes, labels=names, colors=colors, width=2)
    return painted
