"""The page of an evaluation: numbers with their protocols, maps of the embedding, and nearest neighbours."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dssl.evaluation import Result
from dssl.evaluation.protocols import Benchmark, Evaluation
from dssl.report import page
from dssl.report.pictures import Picture, embedded, layout, map_picture, picture, retrieve
from dssl.run import EVALUATION_FILE
from dssl.text import columns

QUERIES, NEAREST = 10, 8


def html(evaluation: Evaluation, benchmark: Benchmark, *, command: str) -> str:
    """The whole page."""
    features = benchmark.store.of(benchmark.test, allow_unreadable=False)
    retrievals = retrieve(features.values, features.rows, queries=QUERIES, count=NEAREST, seed=benchmark.seed)
    kind, rows, points = layout(features.values, seed=benchmark.seed)
    drawn = map_picture(points, lambda place: benchmark.test.image(int(features.rows[rows[place]])))
    context = {
        "benchmark": benchmark,
        "evaluation": evaluation,
        "numbers": _numbers,
        "quality": [*_quality(evaluation), ("views", evaluation.quality.policy)],
        "map": embedded(drawn, description=f"Map of the embedding by {kind}"),
        "kind": kind,
        "mapped": len(rows),
        "sheets": [_sheet(query, nearest, benchmark) for query, nearest in retrievals.items()],
        "command": command,
    }
    return page.render("evaluation.html", title=f"Evaluation on {benchmark.test.name}", context=context)


def summary(evaluation: Evaluation) -> str:
    """The numbers for a terminal."""
    rows = [("protocol", "top-1 %", "95% interval", "correct", "backbone")]
    rows += [(result.name, *_numbers(result), str(result.protocol["backbone"])) for result in evaluation.results]
    if evaluation.reference_rows:
        rows += [("for reference", "", "", "", "")]
        rows += [(row.name, *_numbers(row), str(row.protocol["backbone"])) for row in evaluation.reference_rows]
    measured = ", ".join(f"{name} {value}" for name, value in _quality(evaluation))
    lines = [*columns(rows), "", f"without labels: {measured}"]
    lines += [f"note: {note}" for note in evaluation.notes]
    return "\n".join(lines)


def written_numbers(folder: Path) -> list[tuple[str, str, str]]:
    """What `dssl evaluate` left in a run's folder, in brief: what was measured, the number and its 95% interval.

    A file that is missing, damaged or of another kind has no rows.
    """
    rows: list[tuple[str, str, str]] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        evaluation: dict[str, Any] = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
        epoch = evaluation["checkpoint"].get("epoch")
        at = "" if epoch is None else f", epoch {epoch:g}"
        rows += [
            (f"{result['name']}{at}", f"{result['accuracy']:.2f}%", "{:.2f} - {:.2f}".format(*result["interval_95"]))
            for result in (*evaluation["results"], *evaluation.get("reference_rows", ()))
        ]
    with suppress(OSError, ValueError, KeyError, TypeError):
        for other in json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["against"]:
            rows += [
                (f"{row['name']} against {other['against']}: {row['verdict']}", f"{row['difference']:+.2f} points",
                 "{:+.2f} to {:+.2f}".format(*row["interval"]))
                for row in other["protocols"]
            ]  # fmt: skip
    with suppress(OSError, ValueError, KeyError, TypeError):
        for name, result in json.loads((folder / "robustness.json").read_text(encoding="utf-8"))["results"].items():
            for key in ("clean", "corrupted"):
                measure = result["measures"][key]
                interval = "{:.2f} - {:.2f}".format(*measure["interval"])
                rows.append((f"{name}, {key} (robustness)", f"{measure['accuracy']:.2f}%", interval))
    return rows


def _numbers(result: Result) -> tuple[str, str, str]:
    """Accuracy, its interval, and the counts."""
    low, high = result.interval
    return f"{result.accuracy:.2f}", f"{low:.2f} - {high:.2f}", f"{result.correct:,} of {result.total:,}"


def _quality(evaluation: Evaluation) -> list[tuple[str, str]]:
    measured = evaluation.quality
    alignment, uniformity = (
        "not measured" if value is None else f"{value:.3f}" for value in (measured.alignment, measured.uniformity)
    )
    return [
        ("effective rank", f"{measured.effective_rank:.1f} of {measured.dimensions}"),
        ("alignment", alignment),
        ("uniformity", uniformity),
        ("spread", f"{measured.spread:.2f}"),
    ]


def _sheet(query: int, nearest: list[tuple[int, float]], benchmark: Benchmark) -> tuple[Picture, list[Picture]]:
    """The query and its neighbours, these with their similarity, and a flag where they are of another class."""

    def thumbnail(index: int, similarity: str = "") -> Picture:
        label, same = benchmark.test_labels[index], benchmark.test_labels[query]
        caption, flag = f"{benchmark.classes[int(label)]}{similarity}", "" if label == same else "another class"
        name = benchmark.test.label_of(index)
        return picture(benchmark.test.image(index), description=name, caption=caption, flag=flag)

    return thumbnail(query), [thumbnail(index, f" {value:.2f}") for index, value in nearest]
