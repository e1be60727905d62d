"""The single steps of a policy, as data; each draws its numbers per image. Last, the kinds of corruption: what group each belongs
to and its constants at five severities.

Every policy can ``write`` itself into a ``Script``: how random numbers become kernels and the numbers of these, for
``kernels/draw.py`` to follow.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment import kernels as code
from dssl.augment.operations import DRAWS, NEED_COLOUR, OPERATIONS, TABLES, VALUES, Floats, Row, Sign, Table
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
        check_number("brightness of jitter", self.brightness, 0, 10)
        check_number("contrast of jitter", self.contrast, 0, 10)
        check_number("saturation of jitter", self.saturation, 0, 10)
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


Group: TypeAlias = Literal["noise", "blur", "weather", "digital", "geometry"]
Constants: TypeAlias = tuple[tuple[float, ...], ...]
"""One row for each severity."""

LARGE = 64
"""Views of more pixels than this get the constants of ImageNet-C, others those of CIFAR-10-C."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of corruption; ``lengths`` of its constants, the first ones, are pixels, at 32 px and at 224 px."""

    name: str
    group: Group
    kernel: int
    small: Constants
    large: Constants
    lengths: int = 0
    official: str | None = None
    """What CIFAR-10-C and ImageNet-C call it; None where they have nothing like it."""
    operation: str | None = None
    """The operation that it is at a value, in any direction; None where it is a kernel of its own."""
    sign: Sign = "none"

    @property
    def family(self) -> str:
        """Kinds that look alike: ``noise``, ``blur``, ``light`` (fog, brightness, contrast, saturate), or the kind alone."""
        if self.group in ("noise", "blur"):
            return self.group
        return "light" if self.name in ("fog", "brightness", "contrast", "saturate") else self.name

    @property
    def needs_colour(self) -> bool:
        """Whether it means nothing for channels that are not red, green and blue (or gray)."""
        return self.kernel in NEED_COLOUR

    def constants(self, severity: int, *, size: int) -> tuple[float, ...]:
        """Its constants for views of a size; lengths grow with it."""
        row, side = (self.large, 224) if size > LARGE else (self.small, 32)
        return tuple(
            value * size / side if place < self.lengths else value for place, value in enumerate(row[severity - 1])
        )


def _each(*values: float) -> Constants:
    return tuple((value,) for value in values)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("gaussian-noise", "noise", code.NOISE, _each(0.04, 0.06, 0.08, 0.09, 0.10),
             _each(0.08, 0.12, 0.18, 0.26, 0.38), official="gaussian_noise"),
        Kind("shot", "noise", code.SHOT, _each(500, 250, 100, 75, 50), _each(60, 25, 12, 5, 3), official="shot_noise"),
        Kind("impulse", "noise", code.IMPULSE, _each(0.01, 0.02, 0.03, 0.05, 0.07),
             _each(0.03, 0.06, 0.09, 0.17, 0.27), official="impulse_noise"),
        Kind("speckle", "noise", code.SPECKLE, _each(0.06, 0.1, 0.12, 0.16, 0.2),
             _each(0.15, 0.2, 0.35, 0.45, 0.6), official="speckle_noise"),
        Kind("gaussian-blur", "blur", code.GAUSSIAN, _each(0.4, 0.6, 0.7, 0.8, 1), _each(1, 2, 3, 4, 6),
             lengths=1, official="gaussian_blur"),
        Kind("defocus", "blur", code.DEFOCUS, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
             ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)), lengths=1, official="defocus_blur"),
        Kind("motion", "blur", code.MOTION, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
             ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), lengths=2, official="motion_blur"),
        Kind("zoom", "blur", code.ZOOM, ((0.01, 7), (0.01, 12), (0.01, 16), (0.01, 21), (0.01, 26)),
             ((0.01, 12), (0.01, 16), (0.02, 11), (0.02, 13), (0.03, 11)), official="zoom_blur"),
        Kind("fog", "weather", code.FOG, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
             ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)), official="fog"),
        Kind("brightness", "weather", code.BRIGHTEN, _each(0.05, 0.1, 0.15, 0.2, 0.3),
             _each(0.1, 0.2, 0.3, 0.4, 0.5), official="brightness"),
        Kind("contrast", "digital", code.FADE, _each(0.75, 0.5, 0.4, 0.3, 0.15), _each(0.4, 0.3, 0.2, 0.1, 0.05),
             official="contrast"),
        Kind("saturate", "digital", code.SATURATE, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
             ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)), official="saturate"),
        Kind("elastic", "digital", code.ELASTIC,
             ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
             ((488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88)),
             lengths=3, official="elastic_transform"),
        Kind("pixelate", "digital", code.PIXELATE, _each(0.95, 0.9, 0.85, 0.75, 0.65), _each(0.6, 0.5, 0.4, 0.3, 0.25),
             official="pixelate"),
        Kind("jpeg", "digital", code.JPEG, _each(80, 65, 58, 50, 40), _each(25, 18, 15, 10, 7),
             official="jpeg_compression"),
        Kind("rotation", "geometry", code.AFFINE, *(_each(10, 20, 30, 40, 50),) * 2, operation="rotate", sign="negate"),
        Kind("shift", "geometry", code.AFFINE, *(_each(0.12, 0.24, 0.36, 0.48, 0.6),) * 2, operation="translate"),
        Kind("occlusion", "geometry", code.CUTOUT, *(_each(0.12, 0.24, 0.36, 0.48, 0.6),) * 2, operation="cutout"),
    )
}  # fmt: skip
"""Every kind by its name; those of the group geometry stand outside the mean of a robustness table."""

SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class Corruption:
    """One kind of corruption at a severity from 1 to 5."""

    kind: str
    severity: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise choices("kind of corruption", self.kind, KINDS)
        if self.severity not in SEVERITIES:
            raise DsslError(f"the severity of corruption({self.kind},{self.severity:g}): expected 1, 2, 3, 4 or 5")

    def write(self, script: Script) -> None:
        kind = KINDS[self.kind]
        constants = kind.constants(int(self.severity), size=script.size)
        slot, widths = script.draws(1 + DRAWS), (VALUES,)
        if kind.operation is None:
            script.add(code.DRAW_CORRUPTION, slot=slot, widths=widths, whole=(kind.kernel,), numbers=constants)
        else:  # the low end of a table of one row
            place = script.add_operations(Row(kind.operation, constants[0], constants[0], kind.sign))
            script.add(code.DRAW_OPERATION, slot=slot, widths=widths, whole=(place, 1, -1, slot))
