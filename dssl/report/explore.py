"""The page and the CSV files of ``dssl explore``: what to label first, a map, neighbours, near-duplicates and outliers."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.data import Source
from dssl.evaluation.embed import harmless
from dssl.evaluation.explore import Exploration
from dssl.files import write_text
from dssl.report import page
from dssl.report.page import percent
from dssl.report.pictures import Picture, Positions, embedded, layout, map_picture, picture
from dssl.text import columns
from dssl.types import Image
from dssl.weights.encoder import Features

COLUMNS, MEDOIDS, CLUSTERS, QUERIES, GROUPS, OUTLIERS = 8, 200, 16, 20, 24, 24
"""How many are on the page at most, which is so bounded to a few megabytes; the CSV files have all."""


@dataclass(frozen=True, slots=True)
class Query:
    """An image and the rows of those nearest to it, with their cosines; ``source`` is where it is read from."""

    source: Source
    index: int
    nearest: Sequence[tuple[int, float]]

    @property
    def name(self) -> str:
        return self.source.label_of(self.index)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found about the features of a source."""

    source: Source
    features: Features
    exploration: Exploration
    queries: Sequence[Query]
    seed: int

    def name(self, row: int) -> str:
        """Of the image that a row of the features is of."""
        return self.source.label_of(int(self.features.rows[row]))

    def image(self, row: int) -> Image:
        return self.source.image(int(self.features.rows[row]))

    @cached_property
    def outliers(self) -> NDArray[np.int64]:
        """All rows, the farthest from their neighbours first."""
        return np.argsort(-self.exploration.isolation, kind="stable")

    @cached_property
    def map(self) -> tuple[str, NDArray[np.int64], Positions]:
        """How rows were laid out, which rows, and where each is."""
        return layout(self.features.values, seed=self.seed)

    @property
    def redundant(self) -> int:
        """Images that would go if one of each group of near-duplicates stayed."""
        return sum(len(group) - 1 for group in self.exploration.duplicates)


def write(report: Report, folder: Path, *, command: str) -> list[Path]:
    """Write explore.html and the CSV files; returns their paths."""
    found, name = report.exploration, report.name
    isolation, total = found.isolation, len(found.cluster)
    _, rows, points = report.map
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[str | float]]]] = {
        "label_first.csv": (
            ("order", "name", "represents", "share"),
            (
                (number, name(members[0]), len(members), len(members) / total)
                for number, members in enumerate(found.members, 1)
            ),
        ),
        "clusters.csv": (
            ("cluster", "rank", "name"),
            (
                (number, rank, name(row))
                for number, members in enumerate(found.members, 1)
                for rank, row in enumerate(members, 1)
            ),
        ),
        "neighbours.csv": (
            ("query", "rank", "name", "similarity"),
            (
                (query.name, rank, name(row), value)
                for query in report.queries
                for rank, (row, value) in enumerate(query.nearest, 1)
            ),
        ),
        "duplicates.csv": (
            ("group", "name", "nearest", "similarity"),
            (
                (number, name(row), name(found.nearest[row, 0]), found.similarity[row, 0])
                for number, group in enumerate(found.duplicates, 1)
                for row in group
            ),
        ),
        "outliers.csv": (
            ("name", "distance", "cluster"),
            ((name(row), isolation[row], found.cluster[row] + 1) for row in report.outliers),
        ),
        "map.csv": (
            ("name", "x", "y", "cluster"),
            ((name(row), x, y, found.cluster[row] + 1) for row, (x, y) in zip(rows, points, strict=True)),
        ),
    }
    for file, (heading, lines) in tables.items():
        write_text(folder / file, _csv(heading, lines))
    write_text(folder / "explore.html", html(report, command=command))
    return [folder / "explore.html", *(folder / file for file in tables)]


def html(report: Report, *, command: str) -> str:
    """The whole page."""
    found, isolation = report.exploration, report.exploration.isolation

    def thumbnail(row: int, caption: str = "") -> Picture:
        return picture(report.image(row), description=report.name(row), caption=caption, photo=True)

    def query(asked: Query) -> tuple[Picture, list[Picture]]:
        image = asked.source.image(asked.index)
        pictures = [thumbnail(row, f"{value:.3f}") for row, value in asked.nearest[:COLUMNS]]
        return picture(image, description=asked.name, caption="query", photo=True), pictures

    def cluster(members: NDArray[np.int64]) -> tuple[Picture, int, list[Picture]]:
        others = members[1:]
        # from the centre to the rim, so that a cluster that is not one shows it
        shown = others[np.linspace(0, len(others) - 1, min(COLUMNS, len(others))).round().astype(np.int64)]
        return thumbnail(members[0]), len(members), [thumbnail(row) for row in shown]

    def lines(rows: Sequence[int], captions: Sequence[str]) -> list[tuple[int, list[Picture]]]:
        """Pictures one after the other, each line with the number of its first."""
        pictures = [thumbnail(row, caption) for row, caption in zip(rows, captions, strict=True)]
        return [(begin + 1, pictures[begin : begin + COLUMNS]) for begin in range(0, len(pictures), COLUMNS)]

    def group(rows: NDArray[np.int64]) -> tuple[int, list[Picture]]:
        return len(rows), [thumbnail(row, f"{found.similarity[row, 0]:.3f}") for row in rows[:COLUMNS]]

    kind, rows, points = report.map
    drawn = map_picture(points, lambda place: report.image(rows[place]))
    shown = report.outliers[:OUTLIERS].tolist()
    context = {
        "report": report,
        "found": found,
        "median": f"{np.median(found.similarity[:, 0]):.3f}",
        "threshold": f"{found.threshold:.4f}",
        "map": embedded(drawn, description=f"Map of the images by {kind}", photo=True),
        "kind": kind,
        "mapped": len(rows),
        "medoids": lines(found.medoids[:MEDOIDS].tolist(), [f"for {len(rows):,}" for rows in found.members[:MEDOIDS]]),
        "clusters": [cluster(members) for members in found.members[:CLUSTERS]],
        "queries": [query(asked) for asked in report.queries[:QUERIES]],
        "groups": [group(rows) for rows in found.duplicates[:GROUPS]],
        "outliers": lines(shown, [f"{isolation[row]:.3f}" for row in shown]),
        "command": command,
    }
    return page.render("explore.html", title=f"Exploring {report.source.name}", context=context)


def summary(report: Report) -> str:
    """What to label first, and the counts, for a terminal."""
    found, total = report.exploration, len(report.exploration.cluster)
    rows = [("label first", "stands for", "share")]
    for members in found.members:
        rows.append((report.name(members[0]), f"{len(members):,}", percent(len(members) / total)))
    copies = f"{report.redundant:,} images could go; groups: {len(found.duplicates):,}"
    farthest = report.outliers[0]
    return "\n".join([
        *columns(rows, align="<>>"),
        "",
        f"near-duplicates (cosine {found.threshold:.4f} or more): {copies}",
        f"farthest from its neighbours: {report.name(farthest)} (distance {found.isolation[farthest]:.3f})",
    ])  # fmt: skip


def _csv(heading: Sequence[str], lines: Iterable[Sequence[str | float]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    for line in lines:
        writer.writerow([harmless(cell) if isinstance(cell, str) else f"{cell:.6g}" for cell in line])
    return text.getvalue()
