"""The paper's table with our numbers beside its own, and the same as Markdown, JSON and a picture."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev, variance
from typing import Literal

import numpy as np

from dssl import text
from dssl.graph import named_graph
from dssl.report import page
from dssl.report.page import COLORS
from dssl.report.run_report import series
from dssl.training.health import COLLAPSED, PARTIAL
from dssl_reproduce import BASELINES, OURS, PaperCell, Target
from dssl_reproduce.outcome import Outcome, Score, mean_error
from dssl_reproduce.scales import Scale, job_of, with_our_rows

Agreement = Literal["agrees", "disagrees", "higher", "lower", "inconclusive", "not measured"]
Place = tuple[str, str]
"""A row and a column."""
_BROKEN = ("collapse", "diverges")
_SPREAD = (
    "Spread is that of the worst view: 1 is healthy, 0 is a single point. Below the upper dashed line a run has "
    "partially collapsed, below the lower one fully."
)
_PANELS = {"knn": "kNN accuracy, %", "spread": "spread of the worst view"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One entry of a table: what the paper says, and what came out here."""

    paper: str
    state: Literal["measured", "collapse", "diverged", "open", "none"]
    """open: not run yet; none: cannot be run."""
    ours: str
    """For people."""
    mean: float | None = None
    error: float | None = None
    """Half of the 95% interval of the mean: from the test images, and from the seeds where the table has several.

    None where a seed diverged: the mean of those that remain has no interval.
    """
    knn: float | None = None
    seeds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperDifference:
    """One difference that the table is about, in the paper and here."""

    where: str
    paper: str
    ours: str
    verdict: Agreement
    """higher and lower: significantly so, where the paper has no such row."""
    error: float | None = None
    """Half of the 95% interval of our difference; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """A target's table; equal results give equal tables."""

    target: Target
    """With the rows that our tables add."""
    scale: str
    seeds: tuple[int, ...]
    runs: dict[Place, list[Outcome]]
    cells: dict[Place, TableCell]
    comparisons: tuple[PaperDifference, ...]
    notes: tuple[str, ...]


def build(target: Target, scale: Scale, *, seeds: Sequence[int], outcomes: Mapping[str, Outcome]) -> ResultTable:
    """The table of a target from the results that exist, by name of their job."""
    target = with_our_rows(target, scale)
    experiments = dict.fromkeys(cell.experiment for cell in target.cells if cell.experiment is not None)
    found = {
        one: [outcomes[name] for seed in seeds if (name := job_of(one, scale, seed=seed).name) in outcomes]
        for one in experiments
    }
    runs: dict[Place, list[Outcome]] = {}
    by_measure: dict[tuple[str, str] | None, list[list[Outcome]]] = {}
    for cell in target.cells:
        of_experiment = [] if cell.experiment is None else found[cell.experiment]
        here = [run for run in of_experiment if cell.measure is None or run.corruptions is not None]
        runs[cell.row, cell.column] = here
        by_measure.setdefault(cell.measure, []).append(here)
    seed_errors = {measure: _seed_error(measured, measure) for measure, measured in by_measure.items()}
    coco = target.name == "table4"
    cells = {
        place: _cell(cell, runs[place], asked=len(seeds), coco=coco, seed_error=seed_errors[cell.measure])
        for cell in target.cells
        for place in [(cell.row, cell.column)]
    }
    comparisons = _comparisons(target, cells, runs, seed_errors=seed_errors)
    notes = _notes(target, scale, list(cells.values()), comparisons, seed_error=max(seed_errors.values(), default=0.0))
    return ResultTable(
        target=target, scale=scale.name, seeds=tuple(seeds), runs=runs, cells=cells, comparisons=comparisons, notes=notes
    )  # fmt: skip


def _seed_error(cells: Sequence[Sequence[Outcome]], measure: tuple[str, str] | None) -> float:
    """Half of the 95% interval of one run by its seed alone, pooled over healthy pretraining; 0 where none has two seeds."""
    squares, freedom = 0.0, 0
    # a run may serve several cells, and counts once
    for runs in {tuple(run.name for run in runs): runs for runs in cells}.values():
        values = [score.accuracy for run in runs if (score := run.score(measure)) is not None]
        if len(values) > 1 and not any(run.collapsed or run.verdict in BASELINES for run in runs):
            squares += (len(values) - 1) * variance(values)
            freedom += len(values) - 1
    return student_95(freedom) * math.sqrt(squares / freedom) if freedom else 0.0


def _cell(cell: PaperCell, runs: Sequence[Outcome], *, asked: int, coco: bool, seed_error: float) -> TableCell:
    if cell.experiment is None:
        return TableCell(paper=cell.paper, state="none", ours="quoted" if cell.reported else "–")
    if not runs:
        return TableCell(paper=cell.paper, state="open", ours="not run")
    if coco:
        return TableCell(paper=cell.paper, state="none", ours="pretrained", seeds=len(runs))
    measured = [score for run in runs if (score := run.score(cell.measure)) is not None]
    if not measured:
        return TableCell(paper=cell.paper, state="diverged", ours="diverged", seeds=len(runs))
    values = [score.accuracy for score in measured]
    mean = fmean(values)
    image_error = fmean([score.error for score in measured])
    ours = f"{mean:.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"
    collapsed = [run for run in runs if run.collapsed]
    diverged = len(runs) - len(measured)
    if collapsed:
        word = "collapse" if any(run.verdict == "collapsed" for run in collapsed) else "partial collapse"
        some = "" if len(collapsed) == len(runs) else f" in {len(collapsed)} of {len(runs)}"
        ours = f"{word}{some} ({ours})"
    if diverged:
        ours += f", {diverged} of {len(runs)} diverged"
    if len(runs) < asked:
        ours += f" [{len(runs)} of {asked} seeds]"
    knns = [run.accuracies["knn"].accuracy for run in runs if "knn" in run.accuracies and cell.measure is None]
    return TableCell(
        paper=cell.paper,
        # one run of several that breaks down is a property of that run; half of them is one of the entry
        state="collapse" if 2 * (len(collapsed) + diverged) >= len(runs) else "measured",
        ours=ours,
        mean=mean,
        # all seeds are measured on the same test images, so that more of them do not make that part smaller
        error=None if diverged else math.hypot(image_error, seed_error / math.sqrt(len(values))),
        knn=fmean(knns) if knns else None,
        seeds=len(runs),
    )


def student_95(freedom: int) -> float:
    """Student's t that 95% of draws stay within, on both sides, for a whole number of degrees of freedom."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom); every step halves the gap
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _share_within(angle, freedom) < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _share_within(angle: float, freedom: int) -> float:
    """The share of Student's t below sqrt(freedom) tan(angle) in magnitude: for a whole freedom it is a finite series."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = cosine**odd, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def paired_error(
    first: Mapping[int, Score | None], second: Mapping[int, Score | None], *, seed_error: float
) -> float | None:
    """Half of the 95% interval of the difference of two means, image by image and seed by seed.

    The part of the test images is the standard error, over images, of the difference between the two arms averaged over the
    seeds. The seeds' own part is that of two independent means. An arm has a score for each seed; None unless all of them have
    kept what each image got, with the same seeds and test images.
    """
    images = {None if score is None else score.images for arm in (first, second) for score in arm.values()}
    if first.keys() != second.keys() or len(images) != 1:
        return None
    differences = []
    for seed in first:
        mine, other = (None if score is None else score.by_image for score in (first[seed], second[seed]))
        if mine is None or other is None or len(mine) != len(other):
            return None
        differences.append(mine - other)
    image_error = mean_error(np.mean(differences, axis=0))
    return math.hypot(image_error, math.sqrt(2) * seed_error / math.sqrt(len(differences)))


def _comparisons(
    target: Target, cells: Mapping[Place, TableCell], runs: Mapping[Place, Sequence[Outcome]], *,
    seed_errors: Mapping[tuple[str, str] | None, float],
) -> tuple[PaperDifference, ...]:  # fmt: skip
    pairs = [((a, name), (b, name), f"{name}: {a} over {b}") for name in target.columns for a, b in target.compare_rows]
    pairs += [((row, a), (row, b), f"{row}: {a} over {b}") for row in target.rows for a, b in target.compare_columns]
    entries = {(cell.row, cell.column): cell for cell in target.cells}
    comparisons = []
    for first, second, where in pairs:
        if first not in cells or second not in cells:
            continue
        both, measure = [entries[place].experiment for place in (first, second)], entries[first].measure
        if both[0] is not None and both[0] == both[1]:
            continue  # the baselines that ours adds are the same runs in every column
        graphs = [named_graph(one.graph) for one in both if one is not None and one.graph]
        views = [len(graph.made) for graph in graphs]
        learning = {len({edge.predictor for edge in graph.edges}) for graph in graphs}
        if len(views) == 2 and views[0] != views[1] and len(learning) == 2:  # views that are only targets cost little
            where += f", {views[1] / views[0]:.2g} times the compute"
        one, other, seed_error = cells[first], cells[second], seed_errors[measure]
        arms = [{run.seed: run for run in runs[place]} for place in (first, second)]
        if (common := arms[0].keys() & arms[1].keys()) and arms[0].keys() != arms[1].keys():
            arms = [{seed: run for seed, run in arm.items() if seed in common} for arm in arms]
            one, other = (
                _cell(entries[place], list(arm.values()), asked=len(common), coco=False, seed_error=seed_error)
                for place, arm in zip((first, second), arms, strict=True)
            )
        scores = [{seed: run.score(measure) for seed, run in arm.items()} for arm in arms]
        comparisons.append(_compare(one, other, where, paired=paired_error(*scores, seed_error=seed_error)))
    return tuple(comparisons)


def _compare(first: TableCell, second: TableCell, where: str, *, paired: float | None) -> PaperDifference:
    """The sign of a difference; an entry that broke down counts as lower than any number, and two of them as equal."""
    paper_sign, paper = _paper_difference(first.paper, second.paper)
    broken = [{"collapse": "collapsed", "diverged": "diverged"}.get(cell.state) for cell in (first, second)]
    if any(cell.mean is None and not how for cell, how in zip((first, second), broken, strict=True)):
        return PaperDifference(where=where, paper=paper, ours="–", verdict="not measured")
    sign, ours, error = None, "", None
    if first.mean is not None and second.mean is not None:
        difference = first.mean - second.mean
        ours = f"{difference:+.1f}"
        if first.error is not None and second.error is not None:
            error = math.hypot(first.error, second.error) if paired is None else paired
            sign = None if abs(difference) <= error else (1 if difference > 0 else -1)
            ours += f" (±{error:.1f}, {'unpaired' if paired is None else 'paired'})"
    if any(broken):
        sign = 0 if all(broken) else -1 if broken[0] else 1
        words = [f"{which} {how}" for which, how in zip(("first", "second"), broken, strict=True) if how]
        ours = "; ".join(filter(None, (*words, ours)))
    verdict: Agreement = "inconclusive"
    if paper == OURS and sign:
        verdict = "higher" if sign > 0 else "lower"
    elif paper_sign is not None and sign is not None:
        verdict = "agrees" if sign == paper_sign else "disagrees"
    return PaperDifference(where=where, paper=paper, ours=ours, verdict=verdict, error=error)


def _paper_difference(first: str, second: str) -> tuple[int | None, str]:
    for word in (OURS, "unknown"):
        if word in (first, second):
            return None, word
    broken = (first in _BROKEN, second in _BROKEN)
    if all(broken):
        return 0, "both collapse"
    if any(broken):
        return (-1, f"first {first}") if broken[0] else (1, f"second {second}")
    if "converges" in (first, second):
        return None, f"{first} against {second}"
    difference = float(first) - float(second)
    return (difference > 0) - (difference < 0), f"{difference:+.2f}".removesuffix("0")


def _notes(
    target: Target, scale: Scale, cells: Sequence[TableCell], comparisons: Sequence[PaperDifference], *, seed_error: float
) -> tuple[str, ...]:  # fmt: skip
    differs = "Not comparable with the paper in absolute terms" if target.label else "Not the paper's settings"
    notes = [f"{differs} ({scale.name}): {difference}." for difference in scale.differs]
    if target.label and any(cell.paper == OURS for cell in cells):
        notes.append(
            "Rows with – are not in the paper. Equal compute: as many steps and views as DSSL (supervised: as many images as "
            "DSSL has views, those of the runs, with their labels)."
        )
    if any(cell.state == "collapse" for cell in cells):
        notes.append(
            "Collapse is the verdict of the run's health check (docs/explanation/health.md), not a guess from the accuracy, "
            "which is in brackets."
        )
    if any(cell.seeds == 1 for cell in cells):
        notes.append(
            "Where there is no ±, there is one seed; its part in the interval of a difference is "
            + ("taken from the entries with several." if seed_error else "not known, and left out.")
        )
    if any(cell.seeds > 1 for cell in cells):
        notes.append(
            "± is the standard deviation over seeds; another seed also takes other training images where the scale limits "
            "them. The ± of a difference is its 95% interval: from the choice of test images, the same for all seeds, and from "
            "the seeds, whose variance is pooled over the healthy pretrained entries of the table."
        )
    if any(one.error is not None for one in comparisons):
        notes.append(
            "A paired difference compares two rows image by image and seed by seed; an unpaired one, of runs that have not kept "
            "which images they got right, treats the test images of the two rows as different ones, which is cautious."
        )
    return (*notes, *(f"Reading: {one}" for one in target.readings), *(f"Missing: {one}" for one in target.missing))


def document(table: ResultTable, *, command: str, drawn: bool = False) -> str:
    """The page for docs/results; ``drawn`` says whether its picture lies beside it."""
    target = table.target
    outcomes = list({run.name: run for runs in table.runs.values() for run in runs}.values())
    seeds = f"{'seed' if len(table.seeds) == 1 else 'seeds'} {', '.join(map(str, table.seeds))}"
    about = f"{target.measure}, scale `{table.scale}`, {seeds}."
    if target.label:
        about = f"`{target.name}` of the paper (`{target.label}`), {about} An entry is *the paper's number* → ours."
    else:
        about = f"`{target.name}`, not in the paper: {about}"
    show = _both if target.label else lambda cell: _escape(cell.ours)
    lines = [f"# {target.title}", "", about]
    for heading, columns in target.grids.items():
        if heading and set(columns) <= set(_open_columns(table)):
            continue
        lines += ["", *([f"## {heading}", ""] if heading else []), *_grid(table, show, columns)]
        if heading and (rows := _differences(table, columns)):
            lines += ["", *text.markdown(("difference", *map(_within, columns)), rows)]
    if any(cell.knn is not None for cell in table.cells.values()):
        neighbours = {str(run.accuracies["knn"].protocol.get("k")) for run in outcomes if "knn" in run.accuracies}
        lines += ["", f"kNN accuracy (k = {' or '.join(sorted(neighbours))}, temperature 0.1), % of the same runs:", ""]
        lines += _grid(table, lambda cell: "" if cell.knn is None else f"{cell.knn:.1f}", target.columns)
    if drawn:
        lines += ["", f"![kNN accuracy and spread of each run by epoch]({target.name}.png)", "", _SPREAD]
    if table.comparisons and list(target.grids) == [""]:
        lines += ["", f"## {'What agrees with the paper, and what does not' if target.label else 'Differences'}", ""]
        measured = [one for one in table.comparisons if one.verdict != "not measured"]
        rows = [(one.where, *((one.paper,) if target.label else ()), one.ours, one.verdict) for one in measured]
        head = ("difference", *(("paper",) if target.label else ()), "ours", "")
        lines += text.markdown(head, [tuple(map(_escape, row)) for row in rows])
        if missing := len(table.comparisons) - len(measured):
            lines += ["", f"{missing} other differences of this table are not measured yet."]
    notes = [f"Not run: {'; '.join(columns)}."] if (columns := _open_columns(table)) else []
    lines += ["", "## What to know", "", *(f"- {note}" for note in (*notes, *table.notes))]
    lines += ["", "## Run it again", "", "```", command, "```", ""]
    if outcomes:
        minutes = sum(run.seconds for run in outcomes) / 60
        commits = sorted({run.versions["commit"][:12] for run in outcomes if "commit" in run.versions})
        code = f" (code: commit {', '.join(commits)})" if commits else ""
        lines += [f"{len(outcomes)} runs, {minutes:.0f} minutes of training in all{code}:", ""]
        rows = [(run.name, f"{run.steps:,}", f"{run.seconds / 60:.1f}", run.verdict) for run in outcomes]
        lines += text.markdown(("run", "steps", "minutes", "verdict"), rows)
    return "\n".join(lines).rstrip() + "\n"


def _grid(table: ResultTable, show: Callable[[TableCell], str], columns: Sequence[str]) -> list[str]:
    """Rows by columns, without the rows that have nothing to show and the columns in which nothing was run."""
    open_columns = _open_columns(table)
    columns = [column for column in columns if column not in open_columns]
    rows = []
    for row in table.target.rows:
        texts = [show(table.cells[row, column]) if (row, column) in table.cells else "" for column in columns]
        if any(texts):
            rows.append((_escape(row), *texts))
    return text.markdown(("", *(_escape(_within(column)) for column in columns)), rows)


def _within(column: str) -> str:
    """A column's name under the heading of its grid."""
    return column.rpartition(": ")[2]


def _differences(table: ResultTable, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """The differences of a grid, a row for each pair of rows that was measured."""
    found = {one.where: one for one in table.comparisons if one.verdict != "not measured"}
    rows = []
    for first, second in table.target.compare_rows:
        ones = [found.get(f"{column}: {first} over {second}") for column in columns]
        if any(ones):
            texts = ["" if one is None else f"{one.ours}, {one.verdict}" for one in ones]
            rows.append((f"{first} over {second}", *texts))
    return rows


def _open_columns(table: ResultTable) -> list[str]:
    """Columns in which nothing was run, unless that is all of them."""
    states: dict[str, set[str]] = {}
    for (_, column), cell in table.cells.items():
        states.setdefault(column, set()).add(cell.state)
    names = [column for column, seen in states.items() if "open" in seen and seen <= {"open", "none"}]
    return names if len(names) < len(states) else []


def _both(cell: TableCell) -> str:
    return f"*{cell.paper}* → {cell.ours if cell.state == 'none' else f'**{_escape(cell.ours)}**'}"


def _escape(words: str) -> str:
    return words.replace("^", "\\^")


def plain(table: ResultTable) -> dict[str, object]:
    """As JSON holds it."""
    return {
        "name": table.target.name,
        "label": table.target.label,
        "scale": table.scale,
        "seeds": list(table.seeds),
        "cells": [{"row": row, "column": column, **_rounded(cell)} for (row, column), cell in table.cells.items()],
        "comparisons": [_rounded(one) for one in table.comparisons],
    }


def _rounded(entry: TableCell | PaperDifference) -> dict[str, object]:
    """Without the digits that depend on the order in which a version of NumPy adds."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(entry).items()}


def picture(table: ResultTable) -> bytes | None:
    """kNN accuracy and spread by epoch, as in the paper's first figure, as a PNG; None where there is nothing to draw.

    There is a column of panels for each column of the table, and a line for each of its rows.
    """
    from matplotlib.figure import Figure

    drawn = {place: runs for place, runs in table.runs.items() if any(run.curves.get("knn") for run in runs)}
    columns = [column for column in table.target.columns if any(place[1] == column for place in drawn)]
    rows = [row for row in table.target.rows if any(place[0] == row for place in drawn)]
    if not columns or list(table.target.grids) != [""]:
        return None  # the columns of several grids are the same runs, measured differently
    buffer = io.BytesIO()
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
                    color, style = series(place)
                    line = {"color": color, "linestyle": style, "marker": "o" if name == "knn" else ""}
                    for run in drawn.get((row, column), ()):
                        if points := run.curves.get(name):
                            axes.plot(*np.array(points).T, linewidth=2, markersize=4, **line)
        looks = [series(place) for place in range(len(rows))]
        handles = [grid[0, 0].plot([], [], color=color, linestyle=style, linewidth=2.2)[0] for color, style in looks]
        labels = [page.label(row) for row in rows]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(rows)), handlelength=2.2)
        figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()
