"""RandAugment and its kin: operations drawn per image from a table."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl.augment.operations import DRAWS, VALUES, Floats
from dssl.augment.primitives import Flags, Sheet, check_number, operation
from dssl.augment.tables import MAGNITUDES, TABLES, Row, Table
from dssl.errors import DsslError, choices


def table(name: str) -> Table:
    """A table of operations by its name."""
    if name not in TABLES:
        raise choices("table of operations", name, TABLES)
    return TABLES[name]


def _signed(values: Floats, row: Row, positive: Flags) -> Floats:
    if row.sign == "negate":
        return np.where(positive, values, -values)
    if row.sign == "mirror":
        return np.where(positive, values, 2.0 - values)
    return values


def _draw_rows(
    rows: Table, chosen: NDArray[np.int64], magnitudes: Floats, draws: Floats, sheet: Sheet, step: int, active: Flags
) -> None:
    """Operation ``chosen`` of a table at each image's own magnitude; draws are the sign and the operation's own."""
    positive = draws[:, 0] < 0.5
    images = np.flatnonzero(active)
    wanted = chosen[images]
    for index in np.flatnonzero(np.bincount(wanted, minlength=len(rows))):
        row = rows[index]
        here = images[wanted == index]
        known = operation(row.operation)
        values = _signed(magnitudes[here] / MAGNITUDES * (row.high - row.low) + row.low, row, positive[here])
        numbers = known.encode(values, draws[here, 1:], sheet.size)
        begin = sheet.offsets[step]
        sheet.codes[here, step] = known.kernel
        sheet.values[here, begin : begin + numbers.shape[1]] = numbers


def _check_magnitude(magnitude: float) -> None:
    check_number("the magnitude", magnitude, 0, MAGNITUDES)


@functools.lru_cache(maxsize=64)
def _look_up(rows: Table, magnitude: float, size: int) -> tuple[NDArray[np.int32], Floats, Flags]:
    """Kernel and numbers of every operation, for each sign, at a fixed magnitude; and which use draws of their own."""
    kernels = np.zeros(2 * len(rows), np.int32)
    numbers = np.zeros((2 * len(rows), VALUES))
    no_draws = np.zeros((2, DRAWS))
    for index, row in enumerate(rows):
        known = operation(row.operation)
        values = _signed(np.full(2, row.value(magnitude)), row, np.array([True, False]))
        encoded = known.encode(values, no_draws, size)
        kernels[2 * index : 2 * index + 2] = known.kernel
        numbers[2 * index : 2 * index + 2, : encoded.shape[1]] = encoded
    return kernels, numbers, np.array([operation(row.operation).uses_draws for row in rows], np.bool_)


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
        table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    def slots(self) -> int:
        return self.count * (2 + DRAWS)

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        rows = table(self.table)
        kernels, numbers, with_draws = _look_up(rows, float(self.magnitude), sheet.size)
        for place in range(self.count):
            part = draws[:, place * (2 + DRAWS) : (place + 1) * (2 + DRAWS)]
            chosen = (part[:, 0] * len(rows)).astype(np.int64)
            entry = 2 * chosen + (part[:, 1] >= 0.5)
            sheet.write(step + place, active, kernels[entry], numbers[entry])
            here = active & with_draws[chosen]
            if here.any():
                magnitudes = np.full(len(draws), float(self.magnitude))
                _draw_rows(rows, chosen, magnitudes, part[:, 1:], sheet, step + place, here)


@dataclass(frozen=True, slots=True)
class UniformAugment:
    """``count`` operations, each with its own uniform probability and magnitude."""

    count: int = 2
    table: str = "uniform13"

    def __post_init__(self) -> None:
        if self.count != int(self.count):
            raise DsslError(f"ua({self.count:g}): the number of operations must be a whole number")
        check_number("the number of operations of ua", self.count, 0, 64)
        table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    def slots(self) -> int:
        return self.count * (5 + DRAWS)

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        rows = table(self.table)
        for place in range(self.count):
            part = draws[:, place * (5 + DRAWS) : (place + 1) * (5 + DRAWS)]
            happens = active & (part[:, 1] < part[:, 2])
            chosen = (part[:, 0] * len(rows)).astype(np.int64)
            _draw_rows(rows, chosen, part[:, 3] * MAGNITUDES, part[:, 4:], sheet, step + place, happens)


@dataclass(frozen=True, slots=True)
class TrivialAugment:
    """One operation at one of the 31 magnitudes, both drawn uniformly."""

    table: str = "trivial14"

    def __post_init__(self) -> None:
        table(self.table)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,)

    def slots(self) -> int:
        return 3 + DRAWS

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        rows = table(self.table)
        chosen = (draws[:, 0] * len(rows)).astype(np.int64)
        magnitudes = np.floor(draws[:, 1] * (MAGNITUDES + 1))
        _draw_rows(rows, chosen, magnitudes, draws[:, 2:], sheet, step, active)


@dataclass(frozen=True, slots=True)
class AtMagnitude:
    """One named operation of a table at a magnitude, its sign drawn per image: what ra does when it draws it."""

    operation: str
    magnitude: float
    table: str = "dssl16"

    def __post_init__(self) -> None:
        names = [row.operation for row in table(self.table)]
        if self.operation not in names:
            raise choices(f"operation of {self.table}", self.operation, names)
        _check_magnitude(self.magnitude)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,)

    def slots(self) -> int:
        return 1 + DRAWS

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        rows = tuple(row for row in table(self.table) if row.operation == self.operation)
        chosen = np.zeros(len(draws), np.int64)
        _draw_rows(rows, chosen, np.full(len(draws), float(self.magnitude)), draws, sheet, step, active)
