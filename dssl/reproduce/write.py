"""A table as text: Markdown for the repository, columns for a terminal, and plain data."""

from collections.abc import Mapping, Sequence

from dssl.reproduce.outcome import Outcome
from dssl.reproduce.table import ResultTable, TableCell


def markdown(table: ResultTable, *, command: str, outcomes: Sequence[Outcome], drawn: bool = False) -> str:
    """The page that goes into docs/results; ``outcomes`` are the runs that the table is made of, ``drawn`` if it has curves."""
    lines = [
        f"# {table.title}",
        "",
        f"`{table.name}` of the paper (`{table.label}`), {table.measure}, scale `{table.scale}`, {_seeds(table)}. "
        "A cell is *the paper's number* → ours.",
        "",
        f"| | {' | '.join(_escape(column) for column in table.columns)} |",
        f"|---|{'---|' * len(table.columns)}",
    ]
    for row in table.rows:
        places = [table.cells.get((row, column)) for column in table.columns]
        lines.append(f"| {_escape(row)} | {' | '.join('' if cell is None else _both(cell) for cell in places)} |")
    if any(cell.knn is not None for cell in table.cells.values()):
        lines += ["", "kNN accuracy (k = 200, temperature 0.1), % of the same runs:", ""]
        lines += [
            f"| | {' | '.join(_escape(column) for column in table.columns)} |",
            f"|---|{'---|' * len(table.columns)}",
        ]
        for row in table.rows:
            places = [table.cells.get((row, column)) for column in table.columns]
            if any(cell is not None and cell.knn is not None for cell in places):
                texts = ("" if cell is None or cell.knn is None else f"{cell.knn:.1f}" for cell in places)
                lines.append(f"| {_escape(row)} | {' | '.join(texts)} |")
    if drawn:
        lines += [
            "",
            f"![kNN accuracy and spread of each run by epoch]({table.name}.png)",
            "",
            "Spread is that of the worst view: 1 is healthy, 0 is one point. Below the dashed lines a run is partly and wholly "
            "collapsed.",
        ]
    if table.comparisons:
        lines += [
            "",
            "## What agrees with the paper, and what does not",
            "",
            "| difference | paper | ours | |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {_escape(one.where)} | {_escape(one.paper)} | {_escape(one.ours)} | {one.verdict} |"
            for one in table.comparisons
        ]
    lines += ["", "## What to know", "", *(f"- {note}" for note in table.notes)]
    lines += ["", "## The same again", "", "```", command, "```", ""]
    if outcomes:
        minutes = sum(one.seconds for one in outcomes) / 60
        lines += [
            f"{len(outcomes)} runs, {minutes:.0f} minutes of training in all:",
            "",
            "| run | steps | minutes | verdict |",
        ]
        lines += ["|---|---|---|---|"]
        lines += [f"| {one.name} | {one.steps:,} | {one.seconds / 60:.1f} | {one.verdict} |" for one in outcomes]
    return "\n".join(lines).rstrip() + "\n"


def terminal(table: ResultTable) -> str:
    """Rows and columns for a terminal; a table that is too wide for one line a row gets one line a cell."""
    grid = [["", *table.columns]]
    for row in table.rows:
        cells = (table.cells.get((row, column)) for column in table.columns)
        grid.append([row, *("" if cell is None else f"{cell.paper} -> {cell.ours}" for cell in cells)])
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    if sum(widths) + 2 * len(widths) > 118:
        flat = [(f"{row}, {column}", cell) for (row, column), cell in table.cells.items()]
        wide = max(len(name) for name, _ in flat)
        body = [f"{name:<{wide}}  {cell.paper:>9} -> {cell.ours}" for name, cell in flat]
    else:
        body = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in grid
        ]
    head = f"{table.title} ({table.name}, {table.measure}, scale {table.scale}): the paper's -> ours"
    told = [
        f"  {one.verdict}: {one.where}: paper {one.paper}, ours {one.ours}"
        for one in table.comparisons
        if one.verdict != "not measured"
    ]
    return "\n".join([head, *body, *(["compared:", *told] if told else [])])


def plain(table: ResultTable) -> Mapping[str, object]:
    """As JSON holds it."""
    return {
        "name": table.name,
        "label": table.label,
        "scale": table.scale,
        "seeds": list(table.seeds),
        "cells": [
            {
                "row": row,
                "column": column,
                "paper": cell.paper,
                "state": cell.state,
                "ours": cell.ours,
                "mean": cell.mean,
                "error": cell.error,
                "knn": cell.knn,
                "seeds": cell.seeds,
            }
            for (row, column), cell in table.cells.items()
        ],
        "comparisons": [
            {"where": one.where, "paper": one.paper, "ours": one.ours, "verdict": one.verdict}
            for one in table.comparisons
        ],
    }


def _both(cell: TableCell) -> str:
    paper = f"*{cell.paper}*"
    ours = cell.ours if cell.state == "none" else f"**{_escape(cell.ours)}**"
    return f"{paper} → {ours}"


def _seeds(table: ResultTable) -> str:
    numbers = ", ".join(map(str, table.seeds))
    return f"{'seed' if len(table.seeds) == 1 else 'seeds'} {numbers}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("^", "\\^")
