"""The single steps of a policy, as data; each draws its numbers per image.

Every policy can ``write`` itself into a ``Script``: how random numbers become kernels and the numbers of these, for
``kernels/draw.py`` to follow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code
from dssl.augment.operations import DRAWS, OPERATIONS, TABLES, VALUES, Floats, Row, Table
from dssl.errors import DsslError, choices

_WHOLE, _NUMBERS = 7, 7  # columns of a script
_SIGNS = {"none": 0, "negate": code.NEGATE, "mirror": code.MIRROR}


class Script:
    """The decisions of a view or several, in order, as the rows of arrays that ``kernels/draw.py`` follows."""

    def __init__(self, *, size: int) -> None:
        self.size = size
        """Of the views, in pixels: not every policy works at every size."""
        self.widths: list[int] = []
        """How many numbers each step hands to its kernel, at most."""
        self.step = self.slot = 0
        """The next step, and the next random number of the view, that nobody has claimed."""
        self._rows: list[list[int]] = []
        self._numbers: list[list[float]] = []
        self._operations: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def draws(self, count: int) -> int:
        """Claim random numbers of the view, and return the slot of the first."""
        self.slot += count
        return self.slot - count

    def add(
        self, what: int, *, slot: int = 0, widths: Sequence[int] = (), whole: Sequence[int] = (), numbers: Sequence[float] = ()
    ) -> int:  # fmt: skip
        """Append one row and return its place: what happens, its first draw, its steps, and its parameters."""
        row = [what, slot, self.step, *whole]
        self._rows.append(row + [0] * (_WHOLE - len(row)))
        self._numbers.append([*numbers] + [0.0] * (_NUMBERS - len(numbers)))
        self.step += len(widths)
        self.widths += [0] * (self.step - len(self.widths))
        for step, width in enumerate(widths, self.step - len(widths)):
            self.widths[step] = max(self.widths[step], width)  # the alternatives of a choice share their steps
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

    def add_operations(self, *rows: Row) -> int:
        """Append the operations of a table, and return the place of the first."""
        first = len(self._operations)
        for row in rows:
            operation = OPERATIONS[row.operation]
            values = (row.low, row.high, _SIGNS[row.sign])
            self._operations.append([operation.encoding, operation.kernel, operation.number, *values])
        return first

    def arrays(self) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The rows, their numbers, and the operations."""
        return (
            np.array(self._rows, np.int64).reshape(-1, _WHOLE),
            np.array(self._numbers, np.float64).reshape(-1, _NUMBERS),
            np.array(self._operations, np.float64).reshape(-1, 6),
        )


def check_number(what: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside a range."""
    if not low <= value <= high:  # NaN compares false, and so is refused
        raise DsslError(f"{what} is {value:g}: expected a number between {low:g} and {high:g}")


def named_table(name: str) -> Table:
    """A table of operations by its name."""
    if name not in TABLES:
        raise choices("table of operations", name, TABLES)
    return TABLES[name]


@dataclass(frozen=True, slots=True)
class Crop:
    """RandomResizedCrop: a box of ``low`` to ``high`` of the area, ratio 3/4 to 4/3, resized bilinearly."""

    low: float = 0.2
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number("the smallest area of crop", self.low, 1e-6, 1)
        check_number("the largest area of crop", self.high, self.low, 1)

    def write(self, script: Script) -> None:
        draws = 2 + 2 * code.CROP_ATTEMPTS
        script.add(code.DRAW_CROP, slot=script.draws(draws), widths=(2 + draws,), numbers=(self.low, self.high))


@dataclass(frozen=True, slots=True)
class Resize:
    """The whole image (``resize``) or its largest centred square (``center``), resized bilinearly."""

    square: bool = False

    def write(self, script: Script) -> None:
        script.add(code.PUT, widths=(1,), whole=(code.RESIZE, 1), numbers=(self.square,))


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirrors left and right with a probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_number("the probability of flip", self.probability, 0, 1)

    def write(self, script: Script) -> None:
        with script.only_if(code.GO_BELOW, slot=script.draws(1), number=self.probability):
            script.add(code.PUT, widths=(0,), whole=(code.FLIP, 0))


@dataclass(frozen=True, slots=True)
class Jitter:
    """ColorJitter: factors within 1 +- each number, hue within +- turns, in a random order."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_number(f"{name} of jitter", getattr(self, name), 0, 10)
        check_number("hue of jitter", self.hue, 0, 0.5)

    def write(self, script: Script) -> None:
        numbers = []
        for reach in (self.brightness, self.contrast, self.saturation):
            low = max(0.0, 1.0 - reach)
            numbers += [low, 1.0 + reach - low]
        reaches = (self.brightness, self.contrast, self.saturation, self.hue)
        useful = sum(1 << place for place, reach in enumerate(reaches) if reach != 0)
        script.add(
            code.DRAW_JITTER, slot=script.draws(5), widths=(1,) * 4, whole=(useful,), numbers=(*numbers, self.hue)
        )


@dataclass(frozen=True, slots=True)
class Blur:
    """Pillow's GaussianBlur with sigma between ``low`` and ``high`` pixels."""

    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        check_number("the smallest sigma of blur", self.low, 0, 100)
        check_number("the largest sigma of blur", self.high, self.low, 100)

    def write(self, script: Script) -> None:
        numbers = (self.low, self.high - self.low)
        script.add(code.DRAW_BLUR, slot=script.draws(1), widths=(1,), numbers=numbers)


@dataclass(frozen=True, slots=True)
class Jigsaw:
    """Cuts the image into tiles x tiles and shuffles them."""

    tiles: int

    def __post_init__(self) -> None:
        check_number("the number of tiles of jigsaw", self.tiles, 1, 1024)

    def write(self, script: Script) -> None:
        if self.tiles > script.size:
            raise DsslError(
                f"jigsaw({self.tiles}) needs views of at least {self.tiles} pixels; these have {script.size}"
            )
        count = self.tiles**2
        script.add(code.DRAW_JIGSAW, slot=script.draws(count), widths=(1 + count,), whole=(self.tiles,))


@dataclass(frozen=True, slots=True)
class Single:
    """One operation at one value in its own unit, or at one drawn up to ``high``: ``rotate(30)`` is 30 degrees."""

    operation: str
    value: float
    high: float | None = None

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise choices("operation", self.operation, OPERATIONS)
        limits = OPERATIONS[self.operation]
        check_number(f"the value of {self.operation}", self.value, limits.low, limits.high)
        if self.high is not None:
            check_number(f"the largest value of {self.operation}", self.high, self.value, limits.high)

    def write(self, script: Script) -> None:
        place = script.add_operations(Row(self.operation, self.value, self.value if self.high is None else self.high))
        if self.high is None:
            slot, numbers = script.draws(DRAWS), (self.value,)
            script.add(code.DRAW_VALUE, slot=slot, widths=(VALUES,), whole=(place,), numbers=numbers)
        else:
            slot, numbers = script.draws(2 + DRAWS), (code.MAGNITUDES,)
            script.add(
                code.DRAW_OPERATION, slot=slot, widths=(VALUES,), whole=(place, 1, slot, slot + 1), numbers=numbers
            )


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

    def write(self, script: Script) -> None:
        rows = named_table(self.table)
        first = script.add_operations(*rows)
        for _ in range(self.count):
            slot = script.draws(2 + DRAWS)
            script.add(code.DRAW_OPERATION, slot=slot, widths=(VALUES,), whole=(first, len(rows), -1, slot + 1),
                       numbers=(self.magnitude,))  # fmt: skip


@dataclass(frozen=True, slots=True)
class UniformAugment:
    """``count`` operations, each with its own uniform probability and magnitude."""

    count: int = 2
    table: str = "uniform13"

    def __post_init__(self) -> None:
        check_number("the number of operations of ua", self.count, 0, 64)
        named_table(self.table)

    def write(self, script: Script) -> None:
        rows = named_table(self.table)
        first = script.add_operations(*rows)
        for _ in range(self.count):
            slot = script.draws(5 + DRAWS)
            with script.only_if(code.GO_LESS, slot=slot + 1):
                script.add(code.DRAW_OPERATION, slot=slot, widths=(VALUES,), whole=(first, len(rows), slot + 3, slot + 4),
                           numbers=(code.MAGNITUDES,))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrivialAugment:
    """One operation at one of the 31 magnitudes, both drawn uniformly."""

    table: str = "trivial14"

    def __post_init__(self) -> None:
        named_table(self.table)

    def write(self, script: Script) -> None:
        rows, slot = named_table(self.table), script.draws(3 + DRAWS)
        whole = (script.add_operations(*rows), len(rows), slot + 1, slot + 2)
        numbers = (code.MAGNITUDES + 1, 1)  # the second: rounded down
        script.add(code.DRAW_OPERATION, slot=slot, widths=(VALUES,), whole=whole, numbers=numbers)


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
        check_number("the magnitude", self.magnitude, 0, code.MAGNITUDES)

    def write(self, script: Script) -> None:
        rows, slot = (
            [row for row in named_table(self.table) if row.operation == self.operation],
            script.draws(1 + DRAWS),
        )
        script.add(code.DRAW_OPERATION, slot=slot, widths=(VALUES,), whole=(script.add_operations(*rows), 1, -1, slot),
                   numbers=(self.magnitude,))  # fmt: skip
