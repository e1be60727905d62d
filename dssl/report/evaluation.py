"""The page of an evaluation: numbers with their protocols, maps of the embedding, and nearest neighbours."""

import json

import torch

from dssl import rng
from dssl.data import UnreadableImage
from dssl.evaluation.protocols import Benchmark, Evaluation
from dssl.report import page
from dssl.report.pictures import Picture, Retrieval, embedded, layouts, map_picture, map_thumbnail, picture, retrieve
from dssl.text import columns

MAPPED, QUERIES, NEAREST = 1_500, 10, 8


def html(evaluation: Evaluation, benchmark: Benchmark, *, command: str) -> str:
    """The whole page."""
    features = benchmark.store.of(benchmark.test, allow_unreadable=False)
    sheets = retrieve(features.values, features.rows, queries=QUERIES, count=NEAREST, seed=benchmark.seed)
    checkpoint, measured = evaluation.checkpoint, evaluation.quality
    epoch = checkpoint.get("epoch")
    context = {
        "name": benchmark.test.name,
        "facts": [
            ("encoder", f"{checkpoint['encoder']}, {checkpoint['image_size']} px"),
            ("epoch", f"{epoch:g}" if isinstance(epoch, int | float) else "unknown"),
            ("checkpoint", str(checkpoint["sha256"])[:16]),
            ("train images", f"{len(benchmark.train):,}"),
            ("test images", f"{len(benchmark.test):,}"),
            ("seed", str(benchmark.seed)),
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
        "maps": _maps(benchmark),
        "sheets": [(sheet[0], sheet[1:]) for retrieval in sheets if (sheet := _sheet(retrieval, benchmark))],
        "command": command,
    }
    return page.render("evaluation.html", title=f"Evaluation on {benchmark.test.name}", context=context)


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
        for reference in evaluation.references:
            accuracies = ", ".join(f"{method} {accuracy:g}" for method, accuracy in reference.accuracies)
            published.append((reference.kind, accuracies, reference.where, reference.protocol))
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


def _maps(benchmark: Benchmark) -> list[Picture]:
    features = benchmark.store.of(benchmark.test, allow_unreadable=False)
    chosen = rng.sample(rng.key(benchmark.seed, "map"), len(features.rows), MAPPED)
    thumbnails = [map_thumbnail(benchmark.test.image(int(row))) for row in features.rows[chosen]]
    return [
        embedded(
            map_picture(layout, thumbnails),
            description=f"Map of the embedding by {layout.name}",
            caption=f"{layout.name} of {len(thumbnails):,} test images: images with similar features are close together. "
            "Where several share a place, the first is shown.",
        )
        for layout in layouts(features.values[torch.from_numpy(chosen)], seed=benchmark.seed)
    ]


def _sheet(retrieval: Retrieval, benchmark: Benchmark) -> list[Picture]:
    """The query and its neighbours as far as they can be read; nothing if the query cannot."""
    query = _thumbnail(benchmark, retrieval.query)
    if query is None:
        return []
    thumbnails = (
        _thumbnail(benchmark, index, query=retrieval.query, similarity=similarity)
        for index, similarity in retrieval.nearest
    )
    return [query, *(thumbnail for thumbnail in thumbnails if thumbnail is not None)]


def _thumbnail(
    benchmark: Benchmark, index: int, *, query: int | None = None, similarity: float = 0.0
) -> Picture | None:
    """A test image with its class; a neighbour also with its similarity, and with a flag where it is of another class."""
    try:
        image = benchmark.test.image(index)
    except UnreadableImage:
        return None
    name, flag = benchmark.classes[int(benchmark.test_labels[index])], ""
    if query is not None:
        name += f" {similarity:.2f}"
        flag = "" if benchmark.test_labels[index] == benchmark.test_labels[query] else "another class"
    return picture(image, description=benchmark.test.label_of(index), caption=name, flag=flag)
