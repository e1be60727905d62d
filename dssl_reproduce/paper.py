"""What the paper states: ``paper.toml``, read strictly."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from dssl.errors import DsslError, choices
from dssl.methods import METHODS

OURS = "–"
"""In place of the paper's number in a row that only our tables have."""
WORDS = ("collapse", "diverges", "converges", "unknown")
"""What the file may have in place of a number."""
DATA_SETS = ("cifar10", "imagenet")
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
    """Of the method, where they differ from the scale's."""
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


@cache
def targets() -> dict[str, Target]:
    """Every table and figure by name, in the paper's order."""
    return read_targets(Path(__file__).with_name("paper.toml"))


def read_targets(path: Path) -> dict[str, Target]:
    """Read such a file; an unknown name, or a word in place of a number, is refused."""
    # a Decimal keeps the digits that the paper prints: 82.80 is not 82.8
    plain = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    found: dict[str, Target] = {}
    for table in plain.pop("target"):
        target = _target(table, path)
        if target.name in found:
            raise DsslError(f"{path}: {target.name} is a duplicate")
        found[target.name] = target
    if plain:
        raise DsslError(f"{path}: unknown {', '.join(plain)}")
    return found


def _target(table: Mapping[str, Any], path: Path) -> Target:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    where = f"{path}: {values.get('name')}"
    _known(values, {one.name for one in fields(Target)}, where)
    for key in ("compare_rows", "compare_columns"):
        values[key] = tuple((better, worse) for better, worse in values.get(key, ()))
    values["cells"] = tuple(_cell(cell, where) for cell in values["cells"])
    target = Target(**values)
    places = [(cell.row, cell.column) for cell in target.cells]
    if len(set(places)) != len(places):
        raise DsslError(f"{where}: duplicate row and column")
    for key, names in (("compare_rows", target.rows), ("compare_columns", target.columns)):
        for name in (name for pair in getattr(target, key) for name in pair):
            if name not in names:
                raise DsslError(f"{where}: {key}: {choices('name', name, names)}")
    return target


def _cell(table: Mapping[str, Any], where: str) -> PaperCell:
    about = {one.name for one in fields(Experiment)}
    place = f"{where}, {table.get('row')}, {table.get('column')}"
    _known(table, {"row", "column", "paper", "reported", *about}, place)
    paper = str(table["paper"])
    if paper not in WORDS and not isinstance(table["paper"], Decimal | int):
        raise DsslError(f"{place}: paper is {paper!r}, expected a number or one of {', '.join(WORDS)}")
    given = {key: table[key] for key in about if key in table}
    experiment = Experiment(**given) if given else None
    if experiment is not None and (experiment.data not in DATA_SETS or experiment.method not in (*METHODS, *BASELINES)):
        raise DsslError(f"{place}: {experiment.method} on {experiment.data} is unknown")
    rest = {key: table[key] for key in ("row", "column", "reported") if key in table}
    return PaperCell(paper=paper, experiment=experiment, **rest)


def _known(values: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in values:
        if name not in names:
            raise DsslError(f"{where}: {choices('key', name, names)}")
