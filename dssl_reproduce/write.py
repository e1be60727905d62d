"""A table as Markdown for the repository, as columns for a terminal, as plain data, and its runs as curves."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import numpy as np

from dssl import text
from dssl.report import page
from dssl.report.page import COLORS
from dssl.report.run_report import series
from dssl.training.health import COLLAPSED, PARTIAL
from dssl_reproduce.outcome import Outcome
from dssl_reproduce.paper import Target
from dssl_reproduce.table import ResultTable, TableCell

_PANELS = {"knn": "kNN accuracy, %", "spread": "spread of the worst view"}


def document(
    table: ResultTable, *, command: str, outcomes: Sequence[Outcome], drawn: Literal["curves", "gains"] | None = None
) -> str:
    """The page for docs/results; ``outcomes`` are the runs of the table, ``drawn`` says which picture it has."""
    seeds = f"{'seed' if len(table.seeds) == 1 else 'seeds'} {', '.join(map(str, table.seeds))}"
    about = f"{table.measure}, scale `{table.scale}`, {seeds}."
    if table.label:
        about = f"`{table.name}` of the paper (`{table.label}`), {about} An entry is *the paper's number* → ours."
    else:
        about = f"`{table.name}`, not in the paper: {about}"
    lines = [f"# {table.title}", "", about, "", *_grid(table, _both if table.label else _ours)]
    if any(cell.knn is not None for cell in table.cells.values()):
        neighbours = {str(one.accuracies["knn"].protocol.get("k")) for one in outcomes if "knn" in one.accuracies}
        about = f"k = {' or '.join(sorted(neighbours))}, temperature 0.1"
        lines += ["", f"kNN accuracy ({about}), % of the same runs:", ""]
        lines += _grid(table, lambda cell: "" if cell.knn is None else f"{cell.knn:.1f}")
    if drawn == "gains":
        lines += ["", f"![gain against steps, with 95 % intervals]({table.name}.png)"]
    if drawn == "curves":
        lines += [
            "",
            f"![kNN accuracy and spread of each run by epoch]({table.name}.png)",
            "",
            "Spread is that of the worst view: 1 is healthy, 0 is a single point. Below the upper dashed line a run has "
            "partially collapsed, below the lower one fully.",
        ]
    if table.comparisons:
        lines += ["", f"## {'What agrees with the paper, and what does not' if table.label else 'Differences'}", ""]
        measured = [one for one in table.comparisons if one.verdict != "not measured"]
        rows = [(one.where, *((one.paper,) if table.label else ()), one.ours, one.verdict) for one in measured]
        head = ("difference", *(("paper",) if table.label else ()), "ours", "")
        lines += text.markdown(head, [tuple(map(_escape, row)) for row in rows])
        if missing := len(table.comparisons) - len(measured):
            lines += ["", f"{missing} other differences of this table are not measured yet."]
    notes = [f"Not run: {'; '.join(columns)}."] if (columns := _open_columns(table)) else []
    lines += ["", "## What to know", "", *(f"- {note}" for note in (*notes, *table.notes))]
    lines += ["", "## Run it again", "", "```", command, "```", ""]
    if outcomes:
        minutes = sum(one.seconds for one in outcomes) / 60
        commits = sorted({one.versions["commit"][:12] for one in outcomes if "commit" in one.versions})
        code = f" (code: commit {', '.join(commits)})" if commits else ""
        lines += [f"{len(outcomes)} runs, {minutes:.0f} minutes of training in all{code}:", ""]
        rows = [(one.name, f"{one.steps:,}", f"{one.seconds / 60:.1f}", one.verdict) for one in outcomes]
        lines += text.markdown(("run", "steps", "minutes", "verdict"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _grid(table: ResultTable, show: Callable[[TableCell], str]) -> list[str]:
    """Rows by columns, without the rows that have nothing to show and the columns in which nothing was run."""
    open_columns = _open_columns(table)
    columns = [column for column in table.columns if column not in open_columns]
    rows = []
    for row in table.rows:
        cells = (table.cells.get((row, column)) for column in columns)
        texts = ["" if cell is None else show(cell) for cell in cells]
        if any(texts):
            rows.append((_escape(row), *texts))
    return text.markdown(("", *map(_escape, columns)), rows)


def _open_columns(table: ResultTable) -> list[str]:
    """Columns in which nothing was run, unless that is all of them."""
    states = {
        column: {cell.state for (_, other), cell in table.cells.items() if other == column} for column in table.columns
    }
    found = [column for column, seen in states.items() if "open" in seen and seen <= {"open", "none"}]
    return found if len(found) < len(table.columns) else []


def _both(cell: TableCell) -> str:
    return f"*{cell.paper}* → {cell.ours if cell.state == 'none' else f'**{_escape(cell.ours)}**'}"


def _ours(cell: TableCell) -> str:
    return _escape(cell.ours)


def _escape(words: str) -> str:
    return words.replace("^", "\\^")


def terminal(table: ResultTable) -> str:
    """Rows and columns for a terminal; one line per entry where a row does not fit on a line."""
    grid = [["", *table.columns]]
    for row in table.rows:
        found = (table.cells.get((row, column)) for column in table.columns)
        grid.append([row, *("" if cell is None else f"{cell.paper} -> {cell.ours}" for cell in found)])
    body = text.columns(grid)
    if max(map(len, body)) > 118:
        cells = table.cells.items()
        body = text.columns([(f"{row}, {column}", f"{one.paper:>9} -> {one.ours}") for (row, column), one in cells])
    told = [
        f"  {one.verdict}: {one.where}: paper {one.paper}, ours {one.ours}"
        for one in table.comparisons
        if one.verdict != "not measured"
    ]
    head = f"{table.title} ({table.name}, {table.measure}, scale {table.scale}): the paper's -> ours"
    return "\n".join([head, *body, *(["compared:", *told] if told else [])])


def plain(table: ResultTable) -> dict[str, object]:
    """As JSON holds it."""
    return {
        "name": table.name,
        "label": table.label,
        "scale": table.scale,
        "seeds": list(table.seeds),
        "cells": [{"row": row, "column": column, **asdict(cell)} for (row, column), cell in table.cells.items()],
        "comparisons": [asdict(one) for one in table.comparisons],
    }


def curves(table: ResultTable, runs: Mapping[tuple[str, str], Sequence[Outcome]]) -> bytes | None:
    """A PNG of kNN accuracy and spread by epoch, as in the paper's first figure; None where no run has a curve.

    There is a column of panels for each column of the table, and a line for each of its rows.
    """
    from matplotlib.figure import Figure

    drawn = {place: found for place, found in runs.items() if any(one.curves.get("knn") for one in found)}
    columns = [column for column in table.columns if any(place[1] == column for place in drawn)]
    rows = [row for row in table.rows if any(place[0] == row for place in drawn)]
    if not columns:
        return None
    with page.styled():
        size = (max(7.0, 1.0 + 4.6 * len(columns)), 6.4 + 0.3 * -(-len(rows) // 4))
        figure = Figure(figsize=size, layout="constrained", facecolor=COLORS["surface"])
        grid = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
        grid[1, 0].set_ylim(0, 1.1)
        for number, column in enumerate(columns):
            grid[0, number].set_title(page.label(column), loc="left", fontsize=14, color=COLORS["ink"])
            grid[1, number].set_xlabel("epoch")
            for level in (PARTIAL, COLLAPSED):
                grid[1, number].axhline(level, color=COLORS["bad"], linewidth=1, linestyle=(0, (5, 4)), zorder=1)
            for axes, (name, title) in zip(grid[:, number], _PANELS.items(), strict=True):
                axes.grid(axis="y", linewidth=0.8)
                axes.set_axisbelow(True)
                axes.margins(x=0.02)
                if number == 0:
                    axes.set_ylabel(title)
                for place, row in enumerate(rows):
                    for points in (one.curves.get(name) for one in drawn.get((row, column), ())):
                        if points:
                            color, style = series(place)
                            marker = "o" if name == "knn" else ""
                            line = {"color": color, "linestyle": style, "marker": marker}
                            axes.plot(*np.array(points).T, linewidth=2, markersize=4, **line)
        looks = [series(place) for place in range(len(rows))]
        handles = [grid[0, 0].plot([], [], color=color, linestyle=style, linewidth=2.2)[0] for color, style in looks]
        labels = [page.label(row) for row in rows]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(rows)), handlelength=2.2)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()


def gains(target: Target, table: ResultTable, runs: Mapping[tuple[str, str], Sequence[Outcome]]) -> bytes | None:
    """A PNG of the difference between two columns against steps, with its 95 % interval; None without two points."""
    from matplotlib.figure import Figure

    error_of = {one.where: one.error for one in table.comparisons}
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for first, second in target.compare_columns:
        for row in table.rows:
            ours, theirs = table.cells[row, first].mean, table.cells[row, second].mean
            error = error_of.get(f"{row}: {first} over {second}")
            if ours is not None and theirs is not None and error is not None:  # run, and not diverged
                lines.setdefault(first, []).append((runs[row, first][0].steps, ours - theirs, error))
    if max(map(len, lines.values()), default=0) < 2:
        return None
    with page.styled():
        figure = Figure(figsize=(7.6, 4.4), layout="constrained", facecolor=COLORS["surface"])
        axes = figure.subplots()
        axes.axhline(0, color=COLORS["muted"], linewidth=1, zorder=1)
        for place, (name, points) in enumerate(lines.items()):
            color, style = series(place)
            steps, values, errors = zip(*sorted(points), strict=True)
            axes.errorbar(
                steps, values, yerr=errors, color=color, linestyle=style, marker="o", markersize=5, linewidth=2, capsize=3,
                label=page.label(f"{name} over {dict(target.compare_columns)[name].rpartition(', ')[2]}"),
            )  # fmt: skip
        axes.set_xscale("log")
        ticks = sorted({step for points in lines.values() for step, _, _ in points})
        axes.set_xticks(ticks, [f"{step:,}" for step in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("steps")
        axes.set_ylabel(f"difference in {table.measure.partition(',')[0]}, points")
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=1)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()
