"""What can be reproduced: the paper's tables and figures, and two of ours (each addition alone; the gain against steps)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dssl.errors import choices
from dssl.recipes import PAPER_HEAVY
from dssl_reproduce.paper import OURS, Experiment, PaperCell, Target, targets
from dssl_reproduce.scales import EQUAL_COMPUTE

_DSSL = Experiment(data="cifar10", method="", graph="dssl", heavy=PAPER_HEAVY)
_PAIRS = replace(_DSSL, graph="standard2", heavy="")
_HEAVY = replace(_DSSL, graph="heavy2")
_CROPS = replace(
    _PAIRS,
    graph="s1<->s2, l1->s1, l2->s2, l1 = crop(0.05,0.3)@16(image), l2 = crop(0.05,0.3)@16(image)",
)
_GUARD = (("guard", 1.0),)
_NAMES = {"simclr": "SimCLR", "simsiam": "SimSiam", "vicreg": "VICReg"}
_EVERY = tuple(_NAMES)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    experiment: Experiment
    methods: tuple[str, ...] = _EVERY
    over: str = "DSSL"
    """The row that it is compared with."""


_BEYOND = (
    _Row("DSSL", _DSSL, over=EQUAL_COMPUTE),
    _Row("mean target", replace(_DSSL, graph="s1<->s2, h1->mean(s1,s2), h2->mean(s1,s2)")),
    _Row("rising weight", replace(_DSSL, graph="s1<->s2, h1->s1:0..1, h2->s2:0..1")),
    _Row("predictor per kind", replace(_DSSL, settings=(("predictor", "per-kind"),)), methods=("simsiam",)),
    _Row("DSSL, guard 1", replace(_DSSL, settings=_GUARD), methods=("simsiam",)),
    _Row(
        "DSSL, every view regularised",
        replace(_DSSL, settings=(("regularise", "all"),)),  # its first name, which its results have
        methods=("vicreg",),
        over=EQUAL_COMPUTE,
    ),
    _Row("2 heavy pairs", _HEAVY, methods=("simsiam", "vicreg")),
    _Row("2 heavy pairs, guard 1", replace(_HEAVY, settings=_GUARD), methods=("simsiam",), over="2 heavy pairs"),
    _Row("four means (FastSiam)", replace(_PAIRS, graph="fastsiam"), over=EQUAL_COMPUTE),
    _Row("small crops", _CROPS, over=EQUAL_COMPUTE),
    _Row("small crops, equal time", replace(_CROPS, epochs=1.5), over=EQUAL_COMPUTE),
)
_LENGTHS = {"1/4 of the steps": 0.25, "1/2 of the steps": 0.5, "all steps": 1.0, "twice the steps": 2.0}


def _cells(rows: Iterable[_Row]) -> tuple[PaperCell, ...]:
    return tuple(
        PaperCell(row=row.name, column=_NAMES[method], paper=OURS, experiment=replace(row.experiment, method=method))
        for row in rows
        for method in row.methods
    )


def _length(name: str, method: str, column: str, experiment: Experiment) -> PaperCell:
    found = replace(experiment, method=method, epochs=_LENGTHS[name])
    return PaperCell(row=name, column=f"{_NAMES[method]}, {column}", paper=OURS, experiment=found)


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
    compare_rows=tuple((row.name, row.over) for row in _BEYOND),
    cells=_cells(_BEYOND),
)
STEPS = Target(
    name="steps",
    title="The gain of DSSL over two standard pairs at equal compute, against the number of steps",
    measure="linear accuracy, %",
    complete=True,
    compare_columns=tuple((f"{_NAMES[one]}, DSSL", f"{_NAMES[one]}, 2 pairs") for one in ("simclr", "simsiam")),
    cells=tuple(
        _length(name, method, column, experiment)
        for name in _LENGTHS
        for method in ("simclr", "simsiam")
        for column, experiment in (("2 pairs", _PAIRS), ("DSSL", _DSSL))
    ),
)


def every_target() -> dict[str, Target]:
    """By name: the paper's in its order, then ours."""
    return targets() | {target.name: target for target in (BEYOND, STEPS)}


def chosen_targets(name: str) -> tuple[Target, ...]:
    """The target of a name, an alias or a LaTeX label; ``all`` is every one of the paper that has something to run."""
    if name == "all":
        return tuple(target for target in targets().values() if any(cell.experiment for cell in target.cells))
    every = every_target()
    for target in every.values():
        if name and name in (target.name, target.label, *target.also):
            return (target,)
    raise choices("target", name, [*every, *(also for target in every.values() for also in target.also), "all"])
