"""The runs of a table as curves, in the manner of the paper's first figure: kNN accuracy and spread by epoch."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dssl.report import figures
from dssl.report.figures import COLORS
from dssl.report.run_report import series
from dssl.reproduce.outcome import Outcome
from dssl.reproduce.table import ResultTable
from dssl.train.health import COLLAPSED, PARTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (("knn", "kNN accuracy, %"), ("spread", "spread of the worst view"))


def curves(table: ResultTable, runs: Mapping[tuple[str, str], Sequence[Outcome]]) -> bytes | None:
    """A PNG: a column of panels for each column of the table and a line for each of its rows; None without any curve."""
    from matplotlib.figure import Figure

    drawn = {place: found for place, found in runs.items() if any(one.curves.get("knn") for one in found)}
    columns = [column for column in table.columns if any(place[1] == column for place in drawn)]
    rows = [row for row in table.rows if any(place[0] == row for place in drawn)]
    if not columns:
        return None
    with figures.styled():
        size = (max(7.0, 1.0 + 4.6 * len(columns)), 6.4 + 0.3 * -(-len(rows) // 4))
        figure = Figure(figsize=size, layout="constrained", facecolor=COLORS["surface"])
        grid = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
        for axes, (name, title) in zip(grid[:, 0], _PANELS, strict=True):
            axes.set_ylabel(title)
            if name == "spread":
                axes.set_ylim(0, 1.1)
        for number, column in enumerate(columns):
            grid[0, number].set_title(figures.label(column), loc="left", fontsize=14, color=COLORS["ink"])
            grid[1, number].set_xlabel("epoch")
            for level in (PARTIAL, COLLAPSED):
                grid[1, number].axhline(level, color=COLORS["bad"], linewidth=1, linestyle=(0, (5, 4)), zorder=1)
            for axes, (name, _) in zip(grid[:, number], _PANELS, strict=True):
                axes.grid(axis="y", linewidth=0.8)
                axes.set_axisbelow(True)
                axes.margins(x=0.02)
                for place, row in enumerate(rows):
                    for one in drawn.get((row, column), ()):
                        _line(axes, one.curves.get(name, []), place, dots=name == "knn")
        looks = [series(place) for place in range(len(rows))]
        handles = [grid[0, 0].plot([], [], color=color, linestyle=style, linewidth=2.2)[0] for color, style in looks]
        labels = [figures.label(row) for row in rows]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(rows)), handlelength=2.2)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()


def _line(axes: "Axes", points: Sequence[tuple[float, float]], number: int, *, dots: bool) -> None:
    if points:
        epochs, values = np.array(points).T
        color, style = series(number)
        axes.plot(epochs, values, color=color, linestyle=style, linewidth=2, marker="o" if dots else "", markersize=4)
