"""The page of an evaluation: numbers with their protocols, maps of the embedding, and nearest neighbours."""

import json

import torch

from dssl import rng
from dssl.data import UnreadableImage
from dssl.evaluation.protocols import Task
from dssl.evaluation.runner import Evaluation
from dssl.report import page
from dssl.report.map import Retrieval, layouts, map_picture, map_thumbnail, retrieve
from dssl.report.pictures import Picture, embedded, picture
from dssl.text import columns

MAPPED, QUERIES, NEAREST = 1_500, 10, 8


def html(evaluation: Evaluation, task: Task, *, command: str) -> str:
    """The whole page."""
    features = task.store.of(task.test, allow_unreadable=False)
    sheets = retrieve(features.values, features.rows, queries=QUERIES, count=NEAREST, seed=task.seed)
    checkpoint, measured = evaluation.checkpoint, evaluation.quality
    epoch = checkpoint.get("epoch")
    context = {
        "name": task.test.name,
        "facts": [
            ("encoder", f"{checkpoint['encoder']}, {checkpoint['image_size']} px"),
            ("epoch", f"{epoch:g}" if isinstance(epoch, int | float) else "unknown"),
            ("checkpoint", str(checkpoint["sha256"])[:16]),
            ("train images", f"{len(task.train):,}"),
            ("test images", f"{len(task.test):,}"),
            ("seed", str(task.seed)),
        ],
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
        "quality": [*_quality(evaluation), ("views", measured.policy)],
        "maps": _maps(task),
        "sheets": [(sheet[0], sheet[1:]) for one in sheets if (sheet := _sheet(one, task))],
        "command": command,
    }
    return page.render("evaluation.html", title=f"Evaluation on {task.test.name}", context=context)


def summary(evaluation: Evaluation) -> str:
    """The numbers for a terminal, followed by published ones."""
    rows = [("protocol", "top-1 %", "95 % interval", "correct", "backbone")]
    for result in evaluation.results:
        interval = "{:.2f} - {:.2f}".format(*result.interval)
        correct = f"{result.correct:,} of {result.total:,}"
        rows.append((result.name, f"{result.accuracy:.2f}", interval, correct, str(result.protocol["backbone"])))
    measured = ", ".join(f"{name} {value}" for name, value in _quality(evaluation))
    lines = [*columns(rows), "", f"without labels: {measured}"]
    if evaluation.references:
        lines += [
            "",
            "published for the same data and kind of protocol (other epochs, seeds and code: read the protocol)",
        ]
        published = []
        for one in evaluation.references:
            accuracies = ", ".join(f"{method} {accuracy:g}" for method, accuracy in one.accuracies)
            published.append((one.kind, accuracies, one.where, one.protocol))
        lines += [f"  {line}" for line in columns(published)]
    lines += [f"note: {note}" for note in evaluation.notes]
    return "\n".join(lines)


def _quality(evaluation: Evaluation) -> list[tuple[str, str]]:
    measured = evaluation.quality
    return [
        ("effective rank", f"{measured.effective_rank:.1f} of {measured.dimensions}"),
        ("alignment", _measured(measured.alignment)),
        ("uniformity", _measured(measured.uniformity)),
        ("spread", f"{measured.spread:.2f}"),
    ]


def _measured(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _maps(task: Task) -> list[Picture]:
    features = task.store.of(task.test, allow_unreadable=False)
    chosen = rng.sample(rng.key(task.seed, "map"), len(features.rows), MAPPED)
    thumbnails = [map_thumbnail(task.test.image(int(features.rows[one]))) for one in chosen]
    return [
        embedded(
            map_picture(layout, thumbnails),
            description=f"Map of the embedding by {layout.name}",
            caption=f"{layout.name} of {len(thumbnails):,} test images: images with similar features are close together. "
            "Where several share a place, the first is shown.",
        )
        for layout in layouts(features.values[torch.from_numpy(chosen)], seed=task.seed)
    ]


def _sheet(one: Retrieval, task: Task) -> list[Picture]:
    """The query and its neighbours as far as they can be read; nothing where the query cannot."""
    query = _thumbnail(task, one.query)
    if query is None:
        return []
    found = (_thumbnail(task, index, query=one.query, similarity=similarity) for index, similarity in one.found)
    return [query, *(cell for cell in found if cell is not None)]


def _thumbnail(task: Task, index: int, *, query: int | None = None, similarity: float = 0.0) -> Picture | None:
    """A test image with its class; a neighbour also with its similarity, and with a flag where it is of another class."""
    try:
        image = task.test.image(index)
    except UnreadableImage:
        return None
    name, flag = task.classes[int(task.test_labels[index])], ""
    if query is not None:
        name += f" {similarity:.2f}"
        flag = "" if task.test_labels[index] == task.test_labels[query] else "another class"
    return picture(image, description=task.test.label_of(index), caption=name, flag=flag)
