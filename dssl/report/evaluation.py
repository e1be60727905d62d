"""The page of an evaluation: numbers with their protocols, the map of the embedding, and retrieval sheets."""

import base64
import json
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image as Pillow

from dssl import rng
from dssl.evaluate.protocols import Task
from dssl.evaluate.runner import Evaluation
from dssl.report import page
from dssl.report.map import Layout, Retrieval, layouts, map_picture, map_thumbnail, readable, retrieve
from dssl.report.pictures import Picture, picture, png

MAPPED, QUERIES, NEAREST = 1_500, 10, 8

_MEANINGS = (
    (
        "95 % interval",
        "Wilson's score interval: what chance in the choice of the test images allows. It says nothing about another seed.",
    ),
    ("kNN", "Each test image takes the class of the nearest training images, weighted by exp(cosine / temperature)."),
    (
        "linear probe",
        "Logistic regression on features of unaugmented images, solved to its optimum; "
        "its regularisation is chosen on a part of the training set, never on the test set.",
    ),
    ("backbone frozen: verified", "All weights and running statistics had the same SHA-256 before and after."),
    ("effective rank", "RankMe: how many directions the features really use; 1 is a collapsed encoder."),
    (
        "alignment",
        "Mean squared distance of two views of an image: lower is more invariant. A collapsed encoder has 0.",
    ),
    ("uniformity", "How evenly the features fill the sphere: lower is more even. A collapsed encoder has 0."),
    ("spread", "Deviation of the normalised features: 1 is healthy, 0 is collapsed."),
)


def html(evaluation: Evaluation, task: Task, *, command: str) -> str:
    """The whole page."""
    features = task.store.of(task.test, allow_unreadable=False)
    chosen = np.sort(rng.permutation(rng.key(task.seed, "map"), len(features.rows))[:MAPPED])
    thumbnails = [map_thumbnail(task.test.image(int(features.rows[one]))) for one in chosen]
    maps = [
        _map(layout, map_picture(layout, thumbnails), len(thumbnails))
        for layout in layouts(features.values[torch.from_numpy(chosen)], seed=task.seed)
    ]
    sheets = retrieve(features.values, features.rows, queries=QUERIES, count=NEAREST, seed=task.seed)
    checkpoint, measured = evaluation.checkpoint, evaluation.quality
    facts = [
        ("encoder", f"{checkpoint['encoder']}, {checkpoint['image_size']} px"),
        ("epoch", _number(checkpoint.get("epoch"))),
        ("checkpoint", str(checkpoint["sha256"])[:16]),
        ("train images", f"{len(task.train):,}"),
        ("test images", f"{len(task.test):,}"),
        ("seed", str(task.seed)),
    ]
    context = {
        "name": task.test.name,
        "facts": facts,
        "weights": checkpoint["weights"],
        "notes": evaluation.notes,
        "results": [
            {
                "name": result.name,
                "accuracy": f"{result.accuracy:.2f} %",
                "interval": "{:.2f} to {:.2f}".format(*result.interval),
                "correct": f"{result.correct:,} of {result.total:,}",
                "backbone": result.protocol["backbone"],
                "protocol": json.dumps(result.protocol, indent=1, sort_keys=True),
            }
            for result in evaluation.results
        ],
        "references": evaluation.references,
        "quality": [
            ("effective rank", f"{measured.effective_rank:.1f} of {measured.dimensions}"),
            ("alignment", _measured(measured.alignment)),
            ("uniformity", _measured(measured.uniformity)),
            ("spread", f"{measured.spread:.2f}"),
            ("views", measured.policy),
        ],
        "maps": maps,
        "sheets": [sheet for one in sheets if (sheet := _sheet(one, task)) is not None],
        "meanings": _MEANINGS,
        "command": command,
    }
    return page.render("evaluation.html", title=f"Evaluation on {task.test.name}", context=context)


def table(evaluation: Evaluation) -> str:
    """The numbers for a terminal, with published ones below."""
    rows = [("protocol", "top-1 %", "95 % interval", "right", "backbone")]
    for result in evaluation.results:
        rows.append(
            (
                result.name,
                f"{result.accuracy:.2f}",
                "{:.2f} - {:.2f}".format(*result.interval),
                f"{result.correct:,} of {result.total:,}",
                str(result.protocol["backbone"]),
            )
        )
    lines = _columns(rows)
    measured = evaluation.quality
    lines += [
        "",
        f"without labels: effective rank {measured.effective_rank:.1f} of {measured.dimensions}, "
        f"alignment {_measured(measured.alignment)}, uniformity {_measured(measured.uniformity)}, spread {measured.spread:.2f}",
    ]
    if evaluation.references:
        lines += [
            "",
            "published for the same data and kind of protocol (other epochs, seeds and code: read the protocol)",
        ]
        published = [
            (
                one.kind,
                ", ".join(f"{method} {accuracy:g}" for method, accuracy in one.accuracies),
                one.where,
                one.protocol,
            )
            for one in evaluation.references
        ]
        lines += [f"  {line}" for line in _columns(published)]
    lines += [f"note: {note}" for note in evaluation.notes]
    return "\n".join(lines)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _map(layout: Layout, drawn: Pillow.Image, count: int) -> dict[str, object]:
    encoded = base64.b64encode(png(drawn)).decode("ascii")
    shown = Picture(
        source=f"data:image/png;base64,{encoded}",
        width=drawn.width,
        height=drawn.height,
        description=f"Map of the embedding by {layout.name}",
        enlarge=False,
    )
    return {"name": layout.name, "picture": shown, "images": f"{count:,}"}


def _sheet(one: Retrieval, task: Task) -> dict[str, object] | None:
    query = readable(task.test, one.query)
    if query is None:
        return None
    label = int(task.test_labels[one.query])
    cells = []
    for index, similarity in one.found:
        image = readable(task.test, index)
        if image is not None:
            name = task.classes[int(task.test_labels[index])]
            wrong = int(task.test_labels[index]) != label
            cells.append(
                {
                    "picture": picture(image, description=task.test.label_of(index)),
                    "caption": f"{name} {similarity:.2f}",
                    "flag": "another class" if wrong else "",
                }
            )
    return {
        "query": picture(query, description=task.test.label_of(one.query)),
        "label": task.classes[label],
        "cells": cells,
    }


def _measured(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "unknown"
