"""The page of a fine-tuning run on COCO: six columns, every category, the loss, and detections next to annotations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageColor, ImageDraw

from dssl import rng
from dssl.files import write_text
from dssl.report import page
from dssl.report.page import SERIES, Plot, styled, to_svg
from dssl.report.pictures import Picture, embedded
from dssl.run import EVALUATION_PAGE
from dssl.text import columns
from dssl_coco.annotations import CocoData, CocoImage, Segmentation
from dssl_coco.batches import draw_mask, read_scaled, scaled_size
from dssl_coco.finetune import CocoResult
from dssl_coco.results import COLUMNS, ClassScore, Detection, Scores

Losses = Sequence[tuple[int, float, Mapping[str, float]]]
SHOWN = 0.5
"""Detections with a lower score are not drawn."""
_SIDE = 520
_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#0aa5b5", "#d021b8", "#7d8f00", "#00806a", "#9a6324")

_MEANINGS = (
    (
        "AP",
        "Average precision, averaged over the required overlaps 0.50, 0.55, ..., 0.95 and over categories.",
    ),
    ("AP50, AP75", "The same where an overlap (intersection over union) of 0.50, or of 0.75, is enough."),
    ("box, mask", "The overlap of rectangles, or of pixels."),
    (
        "objects",
        "Annotated objects of the category in the scored images, without crowds; a category without objects has no AP.",
    ),
)


def score_table(scores: Scores) -> str:
    """The six columns for a terminal, in percent."""
    head = [f"{kind} {column}" for kind in ("box", "mask") for column in COLUMNS]
    values = [f"{measured[column]:.1f}" for measured in (scores.box, scores.mask) for column in COLUMNS]
    return "\n".join(columns([head, values], align=">" * len(head)))


def write_page(result: CocoResult, folder: Path, *, pictures: int, command: str) -> Path:
    """Write the page of a scored run to its folder."""
    path = folder / EVALUATION_PAGE
    write_text(path, html(result, pictures=pictures, command=command))
    return path


def html(result: CocoResult, *, pictures: int, command: str) -> str:
    """The whole page."""
    found, scores = result.findings, result.scores
    assert found is not None
    assert scores is not None
    data, protocol = found.test, found.protocol
    seed = protocol["config"]["seed"]
    facts = [
        ("encoder", protocol["weights"]["encoder"]),
        ("weights", (protocol["weights"]["sha256"] or "from scratch")[:16]),
        ("backbone tensors verified", str(protocol["weights"]["verified_tensors"])),
        ("steps", f"{protocol['steps']:,}"),
        ("images per step", str(protocol["config"]["batch_size"])),
        ("BatchNorm", protocol["batchnorm"]),
        ("train images", f"{protocol['train']['images']:,}"),
        ("scored images", f"{scores.images:,}"),
        ("seed", str(seed)),
    ]
    context = {
        "name": data.name,
        "facts": facts,
        "weights": protocol["weights"]["text"],
        "notes": [protocol["note"], *dict.fromkeys(protocol["left out"])],
        "columns": COLUMNS,
        "rows": [
            (kind, [f"{measured[column]:.1f}" for column in COLUMNS])
            for kind, measured in (("box", scores.box), ("mask", scores.mask))
        ],
        "classes": [_class_row(one) for one in sorted(scores.classes, key=lambda one: -one.objects) if one.objects],
        "absent": sum(one.objects == 0 for one in scores.classes),
        "losses": loss_plot(found.losses) if found.losses else None,
        "sheets": [_sheet(data, image, found.results) for image in _chosen(data, pictures, seed)],
        "shown": f"{SHOWN:g}",
        "meanings": _MEANINGS,
        "protocol": json.dumps(protocol, indent=1, sort_keys=True),
        "command": command,
    }
    return page.render("coco.html", title=f"Detection and segmentation on {data.name}", context=context)


def _class_row(one: ClassScore) -> dict[str, object]:
    return {
        "name": one.name,
        "objects": f"{one.objects:,}",
        "box": "-" if one.box is None else f"{one.box:.1f}",
        "mask": "-" if one.mask is None else f"{one.mask:.1f}",
    }


def loss_plot(losses: Losses) -> Plot:
    """The loss and its five parts over the steps."""
    from matplotlib.figure import Figure

    steps = [step for step, _, _ in losses]
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
        description = f"Loss from {losses[0][1]:.2f} at step {steps[0]} to {losses[-1][1]:.2f} at step {steps[-1]}"
        return Plot(
            svg=to_svg(figure, name="loss", description=description), description=description, caption=f"{description}."
        )


def _chosen(data: CocoData, count: int, seed: int) -> list[CocoImage]:
    """Images with objects, the same for every run with this seed, so that two pages can be compared."""
    images = data.trainable()
    places = rng.sample(rng.key(seed, "coco pictures"), len(images), count)
    return [images[place] for place in places]


def _sheet(data: CocoData, image: CocoImage, results: Sequence[Detection]) -> Picture:
    """The annotations on the left, the detections on the right."""
    size = height, width = scaled_size(image.size, shorter=_SIDE, longest=_SIDE)
    truth = [_Drawn(one.box, one.segmentation, one.label, data.category_names[one.label - 1]) for one in image.objects]
    labels = {number: label for label, number in enumerate(data.category_ids, 1)}
    shown = [one for one in results if one["image_id"] == image.id and one["score"] >= SHOWN]
    found = [
        _Drawn(one["bbox"], one["segmentation"], label, f"{data.category_names[label - 1]} {one['score']:.2f}")
        for one in sorted(shown, key=lambda one: float(one["score"]))
        for label in (labels[one["category_id"]],)
    ]
    pixels = read_scaled(image, size).permute(1, 2, 0).numpy()
    joined = Pillow.new("RGB", (2 * width + 8, height), "white")
    joined.paste(_painted(pixels, truth, before=image.size), (0, 0))
    joined.paste(_painted(pixels, found, before=image.size), (width + 8, 0))
    description = f"{image.path.name}: {len(truth)} objects annotated, {len(found)} found"
    return embedded(joined, description=description, photo=True)


class _Drawn(NamedTuple):
    """An object on a picture."""

    box: Sequence[float]
    segmentation: Segmentation
    label: int
    name: str


def _painted(pixels: NDArray[np.uint8], objects: Sequence[_Drawn], *, before: tuple[int, int]) -> Pillow.Image:
    """Tint each object's pixels, then frame and name it, in the colour of its category."""
    after = (pixels.shape[0], pixels.shape[1])
    painted = pixels.astype(np.float32)
    for one in objects:
        inside = draw_mask(one.segmentation, before=before, after=after).numpy().astype(bool)
        painted[inside] = 0.55 * painted[inside] + 0.45 * np.array(ImageColor.getrgb(_color(one.label)))
    picture = Pillow.fromarray(painted.round().astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    down, across = after[0] / before[0], after[1] / before[1]
    for (left, top, width, height), _, label, name in objects:
        corner = (left * across, top * down)
        pen.rectangle((*corner, (left + width) * across, (top + height) * down), outline=_color(label), width=2)
        place = (corner[0] + 2, max(0.0, corner[1] - 12))
        pen.rectangle(pen.textbbox(place, name), fill=_color(label))
        pen.text(place, name, fill="white")
    return picture


def _color(label: int) -> str:
    return _COLORS[label % len(_COLORS)]
