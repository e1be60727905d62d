"""The page of ``dssl evaluate --against``: differences with intervals, classes that won and lost, images that changed sides."""

import json
from collections.abc import Sequence

from dssl.data import UnreadableImage
from dssl.evaluation.comparison import WORDS, Against, Row
from dssl.evaluation.protocols import Benchmark
from dssl.report import page
from dssl.report.page import Colour
from dssl.report.pictures import Picture, picture
from dssl.text import columns

SHOWN = 12
"""Images that changed sides, of each kind."""
COLOURS: dict[str, Colour] = {"better": "good", "worse": "bad", "no difference shown": "neutral"}


def summary(comparisons: Sequence[Against]) -> str:
    """The numbers for a terminal."""
    lines = []
    for against in comparisons:
        rows = [("protocol", "other", "this", "difference", "95 % interval", "p", "draws", "")]
        for row in against.rows:
            about = row.comparison
            cells = (f"{about.before:.2f}", f"{about.after:.2f}", _difference(row), _interval(row), _p_value(row))
            rows.append((row.name, *cells, str(about.draws), about.verdict))
        lines += ["", f"against {called(against.name)}", *columns(rows, align="<>>>>>>")]
    return "\n".join(lines[1:])


def html(comparisons: Sequence[Against], benchmark: Benchmark, *, command: str) -> str:
    """The whole page."""
    about = benchmark.encoder.protocol()
    context = {
        "name": benchmark.test.name,
        "facts": [
            ("encoder", f"{about['encoder']}, {about['image_size']} px"),
            ("train images", f"{len(benchmark.train):,}"),
            ("test images", f"{len(benchmark.test):,}"),
            ("seed", str(benchmark.seed)),
        ],
        "weights": about["weights"],
        "sections": [_section(against, benchmark) for against in comparisons],
        "command": command,
    }
    return page.render("comparison.html", title=f"Comparison on {benchmark.test.name}", context=context)


def _section(against: Against, benchmark: Benchmark) -> dict[str, object]:
    return {
        "name": against.name,
        "called": called(against.name),
        "weights": against.weights,
        "rows": [
            {
                "name": row.name,
                "before": f"{row.comparison.before:.2f}",
                "after": f"{row.comparison.after:.2f}",
                "difference": _difference(row),
                "interval": _interval(row),
                "p": _p_value(row),
                "sides": f"{row.comparison.won:,} / {row.comparison.lost:,}",
                "verdict": row.comparison.verdict,
                "colour": COLOURS[row.comparison.verdict],
                "protocol": json.dumps(row.protocol, indent=1, sort_keys=True, default=str),
            }
            for row in against.rows
        ],
        "protocols": [row.name for row in against.rows],
        "classes": [
            {
                "name": change.name,
                "images": f"{change.images:,}",
                "cells": [
                    {
                        "text": f"{now.after - now.before:+.1f}",
                        "sides": f"{now.won} / {now.lost}",
                        "bad": now.after < now.before,
                    }
                    for now in (row.comparison.classes[number] for row in against.rows)
                ],
            }
            for number, change in enumerate(against.rows[0].comparison.classes)
        ],
        "changed": [
            {
                "name": row.name,
                "sides": [
                    (side, pictures)
                    for side, rows in (("won", row.comparison.won_rows), ("lost", row.comparison.lost_rows))
                    if (pictures := _pictures(row, rows, benchmark, bad=side == "lost"))
                ],
            }
            for row in against.rows
            if row.comparison.won_rows or row.comparison.lost_rows
        ],
    }


def called(name: str) -> str:
    """A name for an encoder to compare with, and what it means if it is a word."""
    return f"{name}: {WORDS[name]}" if name in WORDS else name


def _difference(row: Row) -> str:
    return f"{row.comparison.difference:+.2f}"


def _interval(row: Row) -> str:
    return "{:+.2f} to {:+.2f}".format(*row.comparison.interval)


def _p_value(row: Row) -> str:
    value = row.comparison.p_value
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _pictures(row: Row, images: Sequence[int], benchmark: Benchmark, *, bad: bool) -> list[Picture]:
    """The images whose answers changed most, with both answers of the first draw that changed."""
    pictures = []
    for index in images[:SHOWN]:
        label = int(benchmark.test_labels[index])
        right = row.before if bad else row.after
        draw = next(
            number for number in range(len(right))
            if right[number, index] == label and row.before[number, index] != row.after[number, index]
        )  # fmt: skip
        before, after = (benchmark.classes[int(answers[draw, index])] for answers in (row.before, row.after))
        try:
            image = benchmark.test.image(index)
        except UnreadableImage:
            continue
        caption = f"{before} → {after}"
        flag = f"is {benchmark.classes[label]}" if bad else ""
        pictures.append(picture(image, description=benchmark.test.label_of(index), caption=caption, flag=flag))
    return pictures
