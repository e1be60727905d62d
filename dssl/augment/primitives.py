"""The single steps of a policy, as data; each draws its numbers per image.

Of every policy ``widths`` says how many numbers each of its steps hands to a kernel, ``slots`` how many random numbers it
needs, and ``write`` writes down how those become kernels and numbers, for ``kernels/draw.py`` to follow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code
from dssl.augment.operations import DRAWS, OPERATIONS, TABLES, VALUES, Floats, Operation, Sign, Table
from dssl.errors import DsslError, choices

_WHOLE, _NUMBERS = 7, 7  # columns of a script
_SIGNS = {"none": 0, "negate": code.NEGATE, "mirror": code.MIRROR}


class Script:
    """The decisions of a view or several, in order, as the rows of arrays that ``kernels/draw.py`` follows."""

    def __init__(self, *, size: int) -> None:
        self.size = size
        """Of the views, in pixels: not every policy works at every size."""
        self._rows: list[list[int]] = []
        self._numbers: list[list[float]] = []
        self._operations: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, what: int, *, slot: int = 0, step: int = 0, whole: Sequence[int] = (), numbers: Sequence[float] = ()
    ) -> int:
        """Append one row and return its place: what happens, its first draw, its step, and its parameters."""
        row = [what, slot, step, *whole]
        self._rows.append(row + [0] * (_WHOLE - len(row)))
        self._numbers.append([*numbers] + [0.0] * (_NUMBERS - len(numbers)))
        return len(self) - 1

    def lead_here(self, leap: int) -> None:
        """Make the row at ``leap`` jump to whatever is written next."""
        self._rows[leap][3] = len(self)

    @contextmanager
    def only_if(self, what: int, *, slot: int, number: float = 0.0) -> Iterator[None]:
        """Whatever is written inside happens only if the draw says so."""
        leap = self.add(what, slot=slot, numbers=(number,))
        yield
        self.lead_here(leap)

    def add_operation(self, name: str, *, low: float = 0.0, high: float = 0.0, sign: Sign = "none") -> int:
        """Append an operation with its values at both ends of the magnitudes, and return its place."""
        known = operation(name)
        self._operations.append([known.encoding, known.kernel, known.number, low, high, _SIGNS[sign]])
        return len(self._operations) - 1

    def arrays(self) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The rows, their numbers, and the operations."""
        return (
            np.array(self._rows, np.int64).reshape(-1, _WHOLE),
            np.array(self._numbers).reshape(-1, _NUMBERS),
            np.array(self._operations, np.float64).reshape(-1, 6),
        )


def check_number(what: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside a range."""
    if not low <= value <= high:  # NaN compares false, and so is refused
        raise DsslError(f"{what} is {value:g}: expected a number between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True)
class Crop:
    """RandomResizedCrop: a box of ``low`` to ``high`` of the area, ratio 3/4 to 4/3, resized bilinearly."""

    widths: ClassVar = (4 + 2 * code.CROP_ATTEMPTS,)
    slots: ClassVar = 2 + 2 * code.CROP_ATTEMPTS
    low: float = 0.2
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number("the smallest area of crop", self.low, 1e-6, 1)
        check_number("the largest area of crop", self.high, self.low, 1)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        script.add(code.DRAW_CROP, slot=slot, step=step, numbers=(self.low, self.high))


@dataclass(frozen=True, slots=True)
class Resize:
    """The whole image (``resize``) or its largest centred square (``center``), resized bilinearly."""

    widths: ClassVar = (1,)
    slots: ClassVar = 0
    square: bool = False

    def write(self, script: Script, *, step: int, slot: int) -> None:
        script.add(code.PUT, step=step, whole=(code.RESIZE, 1), numbers=(float(self.square),))


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirrors left and right with a probability."""

    widths: ClassVar = (0,)
    slots: ClassVar = 1
    probability: float = 0.5

    def __post_init__(self) -> None:
        check_number("the probability of flip", self.probability, 0, 1)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        with script.only_if(code.GO_BELOW, slot=slot, number=self.probability):
            script.add(code.PUT, step=step, whole=(code.FLIP, 0))


@dataclass(frozen=True, slots=True)
class Jitter:
    """ColorJitter: factors within 1 +- each number, hue within +- turns, in a random order."""

    widths: ClassVar = (1, 1, 1, 1)
    slots: ClassVar = 5
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_number(f"{name} of jitter", getattr(self, name), 0, 10)
        check_number("hue of jitter", self.hue, 0, 0.5)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        numbers = []
        for reach in (self.brightness, self.contrast, self.saturation):
            low = max(0.0, 1.0 - reach)
            numbers += [low, 1.0 + reach - low]
        reaches = (self.brightness, self.contrast, self.saturation, self.hue)
        useful = sum(1 << place for place, reach in enumerate(reaches) if reach != 0)
        script.add(code.DRAW_JITTER, slot=slot, step=step, whole=(useful,), numbers=(*numbers, self.hue))


@dataclass(frozen=True, slots=True)
class Blur:
    """Pillow's GaussianBlur with sigma between ``low`` and ``high`` pixels."""

    widths: ClassVar = (1,)
    slots: ClassVar = 1
    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        check_number("the smallest sigma of blur", self.low, 0, 100)
        check_number("the largest sigma of blur", self.high, self.low, 100)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        script.add(code.DRAW_BLUR, slot=slot, step=step, numbers=(self.low, self.high - self.low))


@dataclass(frozen=True, slots=True)
class Jigsaw:
    """Cuts the image into tiles x tiles and shuffles them."""

    tiles: int

    def __post_init__(self) -> None:
        check_number("the number of tiles of jigsaw", self.tiles, 1, 1024)

    @property
    def widths(self) -> tuple[int, ...]:
        return (1 + self.tiles**2,)

    @property
    def slots(self) -> int:
        return self.tiles**2

    def write(self, script: Script, *, step: int, slot: int) -> None:
        if self.tiles > script.size:
            raise DsslError(
                f"jigsaw({self.tiles}) needs views of at least {self.tiles} pixels; these have {script.size}"
            )
        script.add(code.DRAW_JIGSAW, slot=slot, step=step, whole=(self.tiles,))


@dataclass(frozen=True, slots=True)
class Single:
    """One operation at one value in its own unit, or at one drawn up to ``high``: ``rotate(30)`` is 30 degrees."""

    widths: ClassVar = (VALUES,)
    operation: str
    value: float
    high: float | None = None

    def __post_init__(self) -> None:
        known = operation(self.operation)
        check_number(f"the value of {self.operation}", self.value, known.low, known.high)
        if self.high is not None:
            check_number(f"the largest value of {self.operation}", self.high, self.value, known.high)

    @property
    def slots(self) -> int:
        return DRAWS if self.high is None else 2 + DRAWS

    def write(self, script: Script, *, step: int, slot: int) -> None:
        if self.high is not None:
            place = script.add_operation(self.operation, low=float(self.value), high=float(self.high))
            script.add(code.DRAW_OPERATION, slot=slot, step=step, whole=(place, 1, slot, slot + 1),
                       numbers=(float(code.MAGNITUDES),))  # fmt: skip
            return
        place = script.add_operation(self.operation)
        script.add(code.DRAW_VALUE, slot=slot, step=step, whole=(place,), numbers=(float(self.value),))


def operation(name: str) -> Operation:
    """An operation by its name."""
    if name not in OPERATIONS:
        raise choices("operation", name, OPERATIONS)
    return OPERATIONS[name]


def named_table(name: str) -> Table:
    """A table of operations by its name."""
    if name not in TABLES:
        raise choices("table of operations", name, TABLES)
    return TABLES[name]


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
        check_number("the number of operations of ra", self.count, 0, 64)
        check_number("the magnitude", self.magnitude, 0, code.MAGNITUDES)
        named_table(self.table)

    @property
    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    @property
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
        check_number("the number of operations of ua", self.count, 0, 64)
        named_table(self.table)

    @property
    def widths(self) -> tuple[int, ...]:
        return (VALUES,) * self.count

    @property
    def slots(self) -> int:
        return self.count * (5 + DRAWS)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = named_table(self.table)
        first = _add_rows(script, rows)
        for place in range(self.count):
            at = slot + place * (5 + DRAWS)
            with script.only_if(code.GO_LESS, slot=at + 1):
                script.add(code.DRAW_OPERATION, slot=at, step=step + place, whole=(first, len(rows), at + 3, at + 4),
                           numbers=(float(code.MAGNITUDES),))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrivialAugment:
    """One operation at one of the 31 magnitudes, both drawn uniformly."""

    widths: ClassVar = (VALUES,)
    slots: ClassVar = 3 + DRAWS
    table: str = "trivial14"

    def __post_init__(self) -> None:
        named_table(self.table)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = named_table(self.table)
        script.add(code.DRAW_OPERATION, slot=slot, step=step, whole=(_add_rows(script, rows), len(rows), slot + 1, slot + 2),
                   numbers=(code.MAGNITUDES + 1.0, 1.0))  # fmt: skip


@dataclass(frozen=True, slots=True)
class AtMagnitude:
    """One named operation of a table at a magnitude, its sign drawn per image: what ra does when it draws it."""

    widths: ClassVar = (VALUES,)
    slots: ClassVar = 1 + DRAWS
    operation: str
    magnitude: float
    table: str = "dssl16"

    def __post_init__(self) -> None:
        names = [row.operation for row in named_table(self.table)]
        if self.operation not in names:
            raise choices(f"operation of {self.table}", self.operation, names)
        check_number("the magnitude", self.magnitude, 0, code.MAGNITUDES)

    def write(self, script: Script, *, step: int, slot: int) -> None:
        rows = tuple(row for row in named_table(self.table) if row.operation == self.operation)
        script.add(code.DRAW_OPERATION, slot=slot, step=step, whole=(_add_rows(script, rows), 1, -1, slot),
                   numbers=(float(self.magnitude),))  # fmt: skip
