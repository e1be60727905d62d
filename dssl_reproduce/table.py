"""The paper's table with our numbers beside its own: mean and deviation over seeds, collapse, and what cannot be compared."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Literal

import numpy as np

from dssl.errors import DsslError
from dssl.graph import named_graph
from dssl.report.page import Colour
from dssl_reproduce import outcome
from dssl_reproduce.outcome import Outcome
from dssl_reproduce.paper import BASELINES, OURS, PaperCell, Target
from dssl_reproduce.scales import Scale, job_of, named_scale, with_our_rows

Agreement = Literal["agrees", "disagrees", "higher", "lower", "inconclusive", "not measured"]
_COLOURS: dict[str, Colour] = {"collapse": "bad", "diverged": "bad", "agrees": "good", "disagrees": "bad"}
_BROKEN = ("collapse", "diverges")
_NORMAL_95 = 1.959963984540054


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
    """Half of the 95 % interval of the mean: from the test images, and from the seeds where the table has several.

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
    """Half of the 95 % interval of our difference; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """A target's table; equal results give equal tables."""

    name: str
    label: str
    """Empty for a table that the paper does not have."""
    title: str
    measure: str
    scale: str
    seeds: tuple[int, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], TableCell]
    comparisons: tuple[PaperDifference, ...]
    notes: tuple[str, ...]


def build(target: Target, scale: Scale, *, seeds: Sequence[int], outcomes: Mapping[str, Outcome]) -> ResultTable:
    """The table of a target from the results that exist, by name of their job."""
    target = with_our_rows(target, scale)
    found = runs_of(target, scale, seeds=seeds, outcomes=outcomes)
    seed_error = _seed_error(list(found.values()))
    coco = target.name == "table4"
    cells = {
        (cell.row, cell.column): _cell(
            cell, found[cell.row, cell.column], asked=len(seeds), coco=coco, seed_error=seed_error
        )
        for cell in target.cells
    }
    comparisons = _comparisons(target, cells, found, seed_error=seed_error)
    return ResultTable(
        name=target.name,
        label=target.label,
        title=target.title,
        measure=target.measure,
        scale=scale.name,
        seeds=tuple(seeds),
        rows=target.rows,
        columns=target.columns,
        cells=cells,
        comparisons=comparisons,
        notes=_notes(target, scale, cells, comparisons, seed_error=seed_error),
    )


def runs_of(
    target: Target, scale: Scale, *, seeds: Sequence[int], outcomes: Mapping[str, Outcome]
) -> dict[tuple[str, str], list[Outcome]]:
    """The results that exist for each place of the target's table, by row and column."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for cell in with_our_rows(target, scale).cells:
        names = [] if cell.experiment is None else [job_of(cell.experiment, scale, seed=seed).name for seed in seeds]
        found[cell.row, cell.column] = [outcomes[name] for name in names if name in outcomes]
    return found


def _seed_error(cells: Sequence[Sequence[Outcome]]) -> float:
    """Half of the 95 % interval of one run by its seed alone, pooled over healthy pretraining; 0 where none has two seeds."""
    squares, freedom = 0.0, 0
    # a run may serve several cells, and counts once
    for found in {tuple(one.name for one in found): found for found in cells}.values():
        values = [one.main.accuracy for one in found if one.main is not None]
        if len(values) > 1 and not any(one.collapsed or one.verdict in BASELINES for one in found):
            squares += (len(values) - 1) * variance(values)
            freedom += len(values) - 1
    return student_95(freedom) * math.sqrt(squares / freedom) if freedom else 0.0


def _cell(cell: PaperCell, found: Sequence[Outcome], *, asked: int, coco: bool, seed_error: float) -> TableCell:
    if cell.experiment is None:
        return TableCell(paper=cell.paper, state="none", ours="quoted" if cell.reported else "–")
    if not found:
        return TableCell(paper=cell.paper, state="open", ours="not run")
    if coco:
        return TableCell(paper=cell.paper, state="none", ours="pretrained", seeds=len(found))
    measured = [one.main for one in found if one.main is not None]
    if not measured:
        return TableCell(paper=cell.paper, state="diverged", ours="diverged", seeds=len(found))
    values = [one.accuracy for one in measured]
    mean, runs = fmean(values), math.sqrt(len(values))
    image_error = fmean([(one.interval[1] - one.interval[0]) / 2 for one in measured])
    text = f"{mean:.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{mean:.1f}"
    collapsed = [one for one in found if one.collapsed]
    diverged = len(found) - len(measured)
    if collapsed:
        word = "collapse" if any(one.verdict == "collapsed" for one in collapsed) else "partial collapse"
        some = "" if len(collapsed) == len(found) else f" in {len(collapsed)} of {len(found)}"
        text = f"{word}{some} ({text})"
    if diverged:
        text += f", {diverged} of {len(found)} diverged"
    if len(found) < asked:
        text += f" [{len(found)} of {asked} seeds]"
    knns = [one.accuracies["knn"].accuracy for one in found if "knn" in one.accuracies]
    return TableCell(
        paper=cell.paper,
        # one run of several that breaks down is a property of that run; half of them is one of the entry
        state="collapse" if 2 * (len(collapsed) + diverged) >= len(found) else "measured",
        ours=text,
        mean=mean,
        # all seeds are measured on the same test images, so that more of them do not make that part smaller
        error=None if diverged else math.hypot(image_error, seed_error / runs),
        knn=fmean(knns) if knns else None,
        seeds=len(found),
    )


def student_95(freedom: int) -> float:
    """Student's t that 95 % of draws stay within, on both sides, for a whole number of degrees of freedom."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(freedom); every step halves the gap
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _share_within(angle, freedom) < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _share_within(angle: float, freedom: int) -> float:
    """The share of Student's t below sqrt(freedom) tan(angle) in magnitude: for a whole freedom it is a finite series."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, series = cosine**odd, 0.0
    for power in range(odd, freedom - 1, 2):
        series += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * series) if odd else sine * series


def paired_error(first: Sequence[Outcome], second: Sequence[Outcome], *, seed_error: float) -> float | None:
    """Half of the 95 % interval of the difference of two means, image by image and seed by seed.

    The part of the test images is the standard error, over images, of the difference between the two arms averaged over the
    seeds. The seeds' own part is that of two independent means. None unless every run of both arms has kept which images it
    got right, with the same seeds and test images.
    """
    arms = []
    for outcomes in (first, second):
        measured = {one.seed: one.main for one in outcomes}
        bits = {seed: None if one is None else one.bits() for seed, one in measured.items()}
        images = {None if one is None else one.protocol.get("test_fingerprint") for one in measured.values()}
        arms.append((bits, images))
    (ours, our_images), (theirs, their_images) = arms
    if not ours or ours.keys() != theirs.keys() or our_images != their_images or len(our_images) != 1:
        return None
    differences = []
    for seed, right in ours.items():
        other = theirs[seed]
        if right is None or other is None or len(right) != len(other):
            return None
        differences.append(right.astype(float) - other)
    of_images = 100 * np.mean(differences, axis=0)
    image_error = _NORMAL_95 * float(of_images.std(ddof=1)) / math.sqrt(len(of_images))
    return math.hypot(image_error, math.sqrt(2) * seed_error / math.sqrt(len(ours)))


def _comparisons(
    target: Target,
    cells: Mapping[tuple[str, str], TableCell],
    runs: Mapping[tuple[str, str], Sequence[Outcome]],
    *,
    seed_error: float,
) -> tuple[PaperDifference, ...]:
    pairs = [((a, name), (b, name), f"{name}: {a} over {b}") for name in target.columns for a, b in target.compare_rows]
    pairs += [((row, a), (row, b), f"{row}: {a} over {b}") for row in target.rows for a, b in target.compare_columns]
    experiments = {(cell.row, cell.column): cell.experiment for cell in target.cells}

    def compute(first: tuple[str, str], second: tuple[str, str]) -> str:
        """A label for a difference between graphs of unequal numbers of views."""
        pair = [experiments[place] for place in (first, second)]
        views = [len(named_graph(one.graph).made) for one in pair if one is not None and one.graph]
        share = views[1] / views[0] if len(views) == 2 else 1.0
        return "" if share == 1 else f", {share:.2g} times the compute"

    return tuple(
        _compare(
            cells[first],
            cells[second],
            where + compute(first, second),
            paired=paired_error(runs[first], runs[second], seed_error=seed_error),
        )
        for first, second, where in pairs
        # the baselines that ours adds are the same runs in every column
        if first in cells
        and second in cells
        and (experiments[first] is None or experiments[first] != experiments[second])
    )


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
    target: Target,
    scale: Scale,
    cells: Mapping[tuple[str, str], TableCell],
    comparisons: Sequence[PaperDifference],
    *,
    seed_error: float,
) -> tuple[str, ...]:
    differs = "Not comparable with the paper in absolute terms" if target.label else "Not the paper's settings"
    notes = [f"{differs} ({scale.name}): {text}." for text in scale.differs]
    if target.label and any(cell.paper == OURS for cell in cells.values()):
        notes.append(
            "Rows with – are not in the paper. Equal compute: as many steps and views as DSSL (supervised: as many images as "
            "DSSL has views, those of the runs, with their labels)."
        )
    if any(cell.state == "collapse" for cell in cells.values()):
        notes.append(
            "Collapse is the verdict of the run's health check (docs/health.md), not a guess from the accuracy, "
            "which is in brackets."
        )
    if any(cell.seeds == 1 for cell in cells.values()):
        notes.append(
            "Where there is no ±, there is one seed; its part in the interval of a difference is "
            + ("taken from the entries with several." if seed_error else "not known, and left out.")
        )
    if any(cell.seeds > 1 for cell in cells.values()):
        notes.append(
            "± is the standard deviation over seeds; another seed also takes other training images where the scale limits "
            "them. The ± of a difference is its 95 % interval: from the choice of test images, the same for all seeds, and from "
            "the seeds, whose variance is pooled over the healthy pretrained entries of the table."
        )
    if any(one.error is not None for one in comparisons):
        notes.append(
            "A paired difference compares two rows image by image and seed by seed; an unpaired one, of runs that have not kept "
            "which images they got right, treats the test images of the two rows as different ones, which is cautious."
        )
    return (*notes, *(f"Reading: {text}" for text in target.readings), *(f"Missing: {text}" for text in target.missing))


def for_page(table: ResultTable) -> dict[str, object]:
    """What the page of a report shows of a table."""
    cells = {place: (cell.paper, cell.ours, _COLOURS.get(cell.state, "neutral")) for place, cell in table.cells.items()}
    return {
        "title": table.title,
        "about": f"{table.name}{f' ({table.label})' if table.label else ''}, {table.measure}, scale {table.scale}",
        "columns": table.columns,
        "rows": [(row, [cells.get((row, column)) for column in table.columns]) for row in table.rows],
        "comparisons": [
            (one.where, one.paper, one.ours, one.verdict, _COLOURS.get(one.verdict, "neutral"))
            for one in table.comparisons
        ],
        "notes": table.notes,
    }


def tables_in(folder: Path) -> list[dict[str, object]]:
    """The tables of a folder, rebuilt from its results."""
    from dssl_reproduce.targets import every_target

    outcomes = {path.stem: outcome.read(path) for path in sorted((folder / "cells").glob("*.json"))}
    found = []
    for name, target in every_target().items():
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                plain = json.loads(path.read_text(encoding="utf-8"))
                scale, seeds = named_scale(plain["scale"]), tuple(plain["seeds"])
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise DsslError(
                    f"{path} is not a table of dssl reproduce ({error}): delete it and run dssl reproduce again"
                ) from None
            found.append(for_page(build(target, scale, seeds=seeds, outcomes=outcomes)))
    if not found:
        raise DsslError(f"{folder} holds no table of dssl reproduce (such as table2.json beside a folder cells)")
    return found
