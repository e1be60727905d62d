"""What can be reproduced: the paper's tables and figures (``paper.toml``), and four of ours."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from dssl.errors import choices
from dssl.recipes import PAPER_HEAVY

OURS = "–"
"""In place of the paper's number in a row that only our tables have."""
WORDS = ("collapse", "diverges", "converges", "unknown")
"""What the file may have in place of a number."""
EQUAL_COMPUTE = "2 standard pairs (equal compute)"
BASELINES = ("supervised", "untrained", "pixels")
"""What an experiment may name in place of a method: nothing is pretrained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is trained, apart from what a scale decides."""

    data: str
    method: str
    """A method's name, or one of ``BASELINES``."""
    graph: str = ""
    """A preset's name or text; empty for a baseline."""
    standard: str = ""
    """The policy of standard views; empty for the data set's own."""
    heavy: str = ""
    """The policy of heavy views; empty where the graph has none."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the method, or with a section before a dot, where they differ from the scale's."""
    epochs: float = 1.0
    """Times the scale's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """One entry of a table or figure."""

    row: str
    column: str
    paper: str
    """The number with the paper's digits, one of ``WORDS``, or ``OURS``."""
    reported: bool = False
    """Quoted from another paper."""
    experiment: Experiment | None = None
    """None where nothing can be run: reported numbers, and boxes that the text does not describe."""
    measure: tuple[str, str] | None = None
    """Of accuracy under corruption: linear or knn, and one of ``CORRUPTIONS``. None: the linear accuracy on the test set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A table or figure."""

    name: str
    also: tuple[str, ...] = ()
    """Other names that the command accepts."""
    label: str = ""
    """Its label in the paper's LaTeX source; empty for a table that the paper does not have."""
    title: str
    measure: str
    complete: bool = False
    """Whether it has all its rows: a scale adds none."""
    readings: tuple[str, ...] = ()
    """How something that the paper leaves open is interpreted here."""
    missing: tuple[str, ...] = ()
    """What the paper's text does not state."""
    compare_rows: tuple[tuple[str, str], ...] = ()
    """Pairs of rows whose difference the table is about."""
    compare_columns: tuple[tuple[str, str], ...] = ()
    cells: tuple[PaperCell, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def grids(self) -> dict[str, list[str]]:
        """Columns that stand together, by the heading that is before a colon in their names: most tables have one, without."""
        grids: dict[str, list[str]] = {}
        for column in self.columns:
            grids.setdefault(column.rpartition(": ")[0], []).append(column)
        return grids


@cache
def targets() -> dict[str, Target]:
    """Every table and figure of the paper by name, in its order."""
    # a Decimal keeps the digits that the paper prints: 82.80 is not 82.8
    text = Path(__file__).with_name("paper.toml").read_text(encoding="utf-8")
    return {table["name"]: _target(table) for table in tomllib.loads(text, parse_float=Decimal)["target"]}


def _target(table: Mapping[str, Any]) -> Target:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key in ("compare_rows", "compare_columns"):
        values[key] = tuple((better, worse) for better, worse in values.get(key, ()))
    return Target(**values | {"cells": tuple(map(_cell, values["cells"]))})


def _cell(table: Mapping[str, Any]) -> PaperCell:
    about = dict(table)
    entry = {key: about.pop(key) for key in ("row", "column", "paper", "reported") if key in about}
    experiment = Experiment(**about) if about else None
    return PaperCell(**entry | {"paper": str(entry["paper"])}, experiment=experiment)


_DSSL = Experiment(data="cifar10", method="", graph="dssl", heavy=PAPER_HEAVY)
_PAIRS = replace(_DSSL, graph="standard2", heavy="")
_HEAVY = replace(_DSSL, graph="heavy2")
_CROPS = replace(_PAIRS, graph="s1<->s2, l1->s1, l2->s2, l1 = crop(0.05,0.3)@16(image), l2 = crop(0.05,0.3)@16(image)")
_GUARD = (("guard", 1.0),)
_NAMES = {
    "simclr": "SimCLR", "byol": "BYOL", "simsiam": "SimSiam", "vicreg": "VICReg", "barlowtwins": "Barlow Twins",
    "lejepa": "LeJEPA", "moco": "MoCo v3", "swav": "SwAV", "dino": "DINO",
}  # fmt: skip
_ADDED = ("simclr", "simsiam", "vicreg")
_REGULARIZED = replace(_DSSL, settings=(("regularise", "all"),))  # its first name, which its results have
_BEYOND: tuple[tuple[str, Experiment, tuple[str, ...], str], ...] = (
    # a row, the methods that have it, and the row that it is compared with
    ("DSSL", _DSSL, _ADDED, EQUAL_COMPUTE),
    ("mean target", replace(_DSSL, graph="s1<->s2, h1->mean(s1,s2), h2->mean(s1,s2)"), _ADDED, "DSSL"),
    ("rising weight", replace(_DSSL, graph="s1<->s2, h1->s1:0..1, h2->s2:0..1"), _ADDED, "DSSL"),
    ("predictor per kind", replace(_DSSL, settings=(("predictor", "per-kind"),)), ("simsiam",), "DSSL"),
    ("DSSL, guard 1", replace(_DSSL, settings=_GUARD), ("simsiam",), "DSSL"),
    ("DSSL, every view regularised", _REGULARIZED, ("vicreg",), EQUAL_COMPUTE),
    ("2 heavy pairs", _HEAVY, ("simsiam", "vicreg"), "DSSL"),
    ("2 heavy pairs, guard 1", replace(_HEAVY, settings=_GUARD), ("simsiam",), "2 heavy pairs"),
    ("four means (FastSiam)", replace(_PAIRS, graph="fastsiam"), _ADDED, EQUAL_COMPUTE),
    ("small crops", _CROPS, _ADDED, EQUAL_COMPUTE),
    ("small crops, equal time", replace(_CROPS, epochs=1.5), _ADDED, EQUAL_COMPUTE),
)
_THREE = ("simclr", "byol", "simsiam")
_PLAIN, _PLAIN_CORRUPTED, _DSSL_CORRUPTED, _UNDIRECTED_CORRUPTED = (
    "2 standard pairs",
    "2 standard pairs, corruptions on every view",
    "DSSL, corruptions",
    "DSSL's views and corruptions, without direction",
)
_WEAK = ", ".join(f"w{number} = (crop(0.2,1) > flip)(image)" for number in (1, 2, 3, 4))
_TO_WEAK = f"s1->w2[similarity], s2->w1[similarity], s3->w4[similarity], s4->w3[similarity], {_WEAK}"
_FROM_WEAK = f"w1->s2[similarity], w2->s1[similarity], w3->s4[similarity], w4->s3[similarity], {_WEAK}"
_REPELLED = "s1<->s2, h1->s1[similarity], h2->s2[similarity]"
_ROBUSTNESS: tuple[tuple[str, Experiment, tuple[str, ...]], ...] = (
    # a row, and the methods that have it: none for a baseline, which is the same run for all of them
    (_PLAIN, _PAIRS, _THREE),
    (_PLAIN_CORRUPTED, replace(_PAIRS, standard="standard-cifar > corrupt?0.75"), _THREE),
    ("2 heavy pairs", _HEAVY, _THREE),
    ("DSSL", _DSSL, _THREE),
    ("DSSL, UA", replace(_DSSL, heavy="ua"), _THREE),
    (_DSSL_CORRUPTED, replace(_DSSL, heavy="corrupt?0.75"), _THREE),
    (_UNDIRECTED_CORRUPTED, replace(_DSSL, graph="s1<->s2, h1<->s1, h2<->s2", heavy="corrupt?0.75"), _THREE),
    ("four means (FastSiam)", replace(_PAIRS, graph="fastsiam"), _THREE),
    ("weak targets", replace(_PAIRS, graph=_TO_WEAK), ("byol",)),
    ("weak sources (control)", replace(_PAIRS, graph=_FROM_WEAK), ("byol",)),
    ("DSSL, heavy views repelled too", replace(_DSSL, graph=_REPELLED), ("simclr",)),
    ("DSSL, falling weights", replace(_DSSL, graph="s1<->s2, h1->s1:1..0, h2->s2:1..0"), _THREE),
    ("untrained encoder", Experiment(data="cifar10", method="untrained"), ()),
    ("raw pixels", Experiment(data="cifar10", method="pixels"), ()),
)
_BOTH_CROPS = ", ".join(f"{crop}->{view}" for crop in ("l1", "l2") for view in ("s1", "s2"))
_MULTICROP = replace(_CROPS, graph=_CROPS.graph.replace("l1->s1, l2->s2", _BOTH_CROPS))
_RELATED = replace(_DSSL, graph="s1<->s2, h1->s1[relation], h2->s2[relation]")
_TUNED_RELATION = (("relation.temperature", 0.2), ("relation.target_temperature", 0.02))
"""The best for SimCLR of fifteen settings on held-out images (docs/results/tuning.md)."""
_OTHERS = tuple(name for name in _NAMES if name not in ("swav", "dino"))
_METHODS: tuple[tuple[str, Experiment, tuple[str, ...]], ...] = (
    # a row, and the methods that have it
    (_PLAIN, _PAIRS, tuple(_NAMES)),
    ("four means (FastSiam)", replace(_PAIRS, graph="fastsiam"), tuple(_NAMES)),
    ("DSSL", _DSSL, tuple(_NAMES)),
    ("DSSL, heavy views by relation", _RELATED, ("simclr", "moco")),
    ("DSSL, heavy views by relation, tuned", replace(_RELATED, settings=_TUNED_RELATION), ("simclr", "moco")),
    ("small crops, equal time", replace(_CROPS, epochs=1.5), _OTHERS),
    ("small crops, equal time", replace(_MULTICROP, epochs=1.5), ("swav", "dino")),
)
CORRUPTIONS = {
    "clean": "clean",
    "seen": "5 kinds of corrupt",
    "not seen": "10 other kinds",
    "geometry": "geometry",
}
"""Sets of conditions of ``dssl.evaluation.robustness``, where "seen" is what the policy ``corrupt`` draws from."""
_LENGTHS = {"1/4 of the steps": 0.25, "1/2 of the steps": 0.5, "all steps": 1.0, "twice the steps": 2.0}


def our_cell(
    row: str, column: str, experiment: Experiment, *, measure: tuple[str, str] | None = None, **changes: Any
) -> PaperCell:
    """An entry that the paper lacks: an experiment with these changes."""
    return PaperCell(row=row, column=column, paper=OURS, experiment=replace(experiment, **changes), measure=measure)


BEYOND = Target(
    name="beyond",
    title="Beyond the paper: each addition alone",
    measure="linear accuracy, %",
    readings=(
        "Every row has as many steps as DSSL, unless it says equal time. A crop of 16 px costs a quarter of a view, so small "
        "crops cost 2.5 views instead of 4: equal time is 1.5 times the epochs.",
        "VICReg regularises only the views of similarity edges: both views of a heavy pair, and no heavy view of DSSL, unless "
        "the row says every view.",
    ),
    compare_rows=tuple((row, over) for row, _, _, over in _BEYOND),
    cells=tuple(
        our_cell(row, _NAMES[method], experiment, method=method)
        for row, experiment, methods, _ in _BEYOND
        for method in methods
    ),
)
STEPS = Target(
    name="steps",
    title="The gain of DSSL over two standard pairs at equal compute, against the number of steps",
    measure="linear accuracy, %",
    complete=True,
    compare_columns=tuple((f"{_NAMES[one]}, DSSL", f"{_NAMES[one]}, 2 pairs") for one in ("simclr", "simsiam")),
    cells=tuple(
        our_cell(row, f"{_NAMES[method]}, {column}", experiment, method=method, epochs=epochs)
        for row, epochs in _LENGTHS.items()
        for method in ("simclr", "simsiam")
        for column, experiment in (("2 pairs", _PAIRS), ("DSSL", _DSSL))
    ),
)
ROBUSTNESS = Target(
    name="robustness",
    title="Accuracy under corruption, at equal compute",
    measure="accuracy, %",
    complete=True,
    readings=(
        "The probe and kNN (k = 20) learn from clean images and are measured on 2,000 test images, clean and under 15 kinds of "
        "corruption and 3 of geometry at 5 severities (docs/reference/evaluation.md); "
        "an entry is the mean over its kinds and severities.",
        "The policy `corrupt` draws one of 5 of these kinds. The sets are the same for every row, whatever its own policies.",
        "A difference is over the seeds that both rows have.",
        "In every row four views of an image learn. Without direction, a corrupted view and the standard view that it was made "
        "from attract each other (`h1<->s1`). Weak views are only cropped and flipped: with weak targets each standard "
        "view learns from one, which costs four more views to make but no more passes, and the control reverses that.",
    ),
    compare_rows=(
        *((row, _PLAIN) for row, _, methods in _ROBUSTNESS if methods and row != _PLAIN),
        ("DSSL", _PLAIN_CORRUPTED),
        (_DSSL_CORRUPTED, "DSSL"),
        (_DSSL_CORRUPTED, _PLAIN_CORRUPTED),
        (_DSSL_CORRUPTED, _UNDIRECTED_CORRUPTED),
        ("weak targets", "weak sources (control)"),
    ),
    cells=tuple(
        our_cell(row, f"{_NAMES[method]}, {title}: {conditions}", experiment, measure=(kind, name), **changes)
        for row, experiment, methods in _ROBUSTNESS
        for method in methods or _THREE
        for changes in [{"method": method} if methods else {}]
        for kind, title in (("linear", "linear probe"), ("knn", "kNN"))
        for name, conditions in CORRUPTIONS.items()
    ),
)
METHODS = Target(
    name="methods",
    title="Which method, with which views, at equal compute",
    measure="accuracy, %",
    complete=True,
    readings=(
        "The probe learns from clean images and is measured on 2,000 test images: clean, under the 5 kinds of corruption that "
        "the policy `corrupt` draws from, and under 10 other kinds, at 5 severities each. No run saw a corruption.",
        "A method has one rate for all of its rows; docs/results/tuning.md says how it was chosen, on held-out training images.",
        "All rows but small crops have four views of 32 px and as many steps. A crop of 16 px costs a quarter of a view: equal "
        "time is 1.5 times the epochs. A crop learns from one large view, with SwAV and DINO from both, as in their papers.",
        "The target networks of BYOL, MoCo v3 and DINO make additional passes without gradient: 4 with two standard pairs and "
        "four means, 2 with DSSL and small crops.",
    ),
    compare_rows=tuple(dict.fromkeys((row, _PLAIN) for row, _, _ in _METHODS if row != _PLAIN)),
    cells=tuple(
        our_cell(
            row,
            f"linear probe, {CORRUPTIONS[name]}: {_NAMES[method]}",
            experiment,
            measure=("linear", name),
            method=method,
        )
        for row, experiment, methods in _METHODS
        for method in methods
        for name in ("clean", "seen", "not seen")
    ),
)


def every_target() -> dict[str, Target]:
    """By name: the paper's in its order, then ours."""
    return targets() | {target.name: target for target in (BEYOND, STEPS, ROBUSTNESS, METHODS)}


def chosen_targets(name: str) -> tuple[Target, ...]:
    """The target of a name, an alias or a LaTeX label; ``all`` is every one of the paper that has something to run."""
    if name == "all":
        return tuple(target for target in targets().values() if any(cell.experiment for cell in target.cells))
    every = every_target()
    for target in every.values():
        if name and name in (target.name, target.label, *target.also):
            return (target,)
    raise choices("target", name, [*every, *(also for target in every.values() for also in target.also), "all"])
