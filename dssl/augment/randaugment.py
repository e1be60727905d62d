"""RandAugment and its relatives: operations drawn per image from a table."""

from dataclasses import dataclass

from dssl.augment.kernels import codes as code
from dssl.augment.kernels.codes import MAGNITUDES
from dssl.augment.operations import DRAWS, VALUES
from dssl.augment.primitives import Script, check_number
from dssl.augment.tables import TABLES, Table
from dssl.errors import DsslError, choices


def named_table(name: str) -> Table:
    """A table of operations by its name."""
    if name not in TABLES:
        raise choices("table of operations", name, TABLES)
    return TABLES[name]


def _check_magnitude(magnitude: float) -> None:
    check_number("the magnitude", magnitude, 0, MAGNITUDES)


def _add_rows(script: Script, rows: Table) -> int:
    """Append the operations of a table, and return the place of the first."""
    places = [script.add_operation(row.operation, low=row.low, high=row.high, sign=row.sign) for row in rows]
    return places[0]


@dataclass(frozen=True, slots=True)
class RandAugment:
    """``count`` operations, drawn with replacement from a table, all at one magnitude; signs are drawn per image."""

    count: int
    magnitude: float
    table: str = "dssl16"

    def __post_init__(self) -> None:
        if self.count != int(self.count):
            raise DsslError(f"ra({self.count:g}, ...): the number of operations must be a whole number")
        check_number("the number of operations of ra", self.count, 0, 64)
        _check_magnitude(self.magnitude)
        named_table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    def slots(self) -> int:
        return self.count * (2 + DRAWS)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = named_table(self.table)
        first = _add_rows(script, rows)
        for place in range(self.count):
            at = slot + place * (2 + DRAWS)
            script.add(code.DRAW_OPERATION, slot=at, step=step + place, whole=(first, len(rows), -1, at + 1),
                       numbers=(float(self.magnitude),))  # fmt: skip


@dataclass(frozen=True, slots=True)
class UniformAugment:
    """``count`` operations, each with its own uniform probability and magnitude."""

    count: int = 2
    table: str = "uniform13"

    def __post_init__(self) -> None:
        if self.count != int(self.count):
            raise DsslError(f"ua({self.count:g}): the number of operations must be a whole number")
        check_number("the number of operations of ua", self.count, 0, 64)
        named_table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    def slots(self) -> int:
        return self.count * (5 + DRAWS)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = named_table(self.table)
        first = _add_rows(script, rows)
        for place in range(self.count):
            at = slot + place * (5 + DRAWS)
            with script.only_if(code.GO_LESS, slot=at + 1):
                script.add(code.DRAW_OPERATION, slot=at, step=step + place, whole=(first, len(rows), at + 3, at + 4),
                           numbers=(float(MAGNITUDES),))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrivialAugment:
    """One operation at one of the 31 magnitudes, both drawn uniformly."""

    table: str = "trivial14"

    def __post_init__(self) -> None:
        named_table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,)

    def slots(self) -> int:
        return 3 + DRAWS

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = named_table(self.table)
        script.add(code.DRAW_OPERATION, slot=slot, step=step, whole=(_add_rows(script, rows), len(rows), slot + 1, slot + 2),
                   numbers=(MAGNITUDES + 1.0, 1.0))  # fmt: skip


@dataclass(frozen=True, slots=True)
class AtMagnitude:
    """One named operation of a table at a magnitude, its sign drawn per image: what ra does when it draws it."""

    operation: str
    magnitude: float
    table: str = "dssl16"

    def __post_init__(self) -> None:
        names = [row.operation for row in named_table(self.table)]
        if self.operation not in names:
            raise choices(f"operation of {self.table}", self.operation, names)
        _check_magnitude(self.magnitude)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,)

    def slots(self) -> int:
        return 1 + DRAWS

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = tuple(row for row in named_table(self.table) if row.operation == self.operation)
        script.add(code.DRAW_OPERATION, slot=slot, step=step, whole=(_add_rows(script, rows), 1, -1, slot),
                   numbers=(float(self.magnitude),))  # fmt: skip
