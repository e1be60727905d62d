"""The single steps of a policy, as data; each draws its numbers per image and writes them to a sheet.

Every policy has three methods. ``widths`` says how many numbers each of its steps hands to a kernel, ``slots`` how many
random numbers it needs, and ``draw`` turns those (N x slots, in [0, 1)) into kernels and numbers, for the images that are
``active``.
"""

import itertools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code
from dssl.augment.operations import DRAWS, OPERATIONS, VALUES, Floats, Operation, box_radius
from dssl.errors import DsslError, choices

Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The arrays of a plan: which kernel each step of each image runs, and with which numbers."""

    codes: NDArray[np.int32]
    values: Floats
    offsets: NDArray[np.int64]
    size: int

    def write(self, step: int, active: Flags, kernels: NDArray[np.int32] | int, numbers: Floats) -> None:
        """Fills one step for the images that are active."""
        begin = self.offsets[step]
        if active.all():
            self.codes[:, step] = kernels
            self.values[:, begin : begin + numbers.shape[1]] = numbers
        else:
            self.codes[active, step] = kernels if isinstance(kernels, int) else kernels[active]
            self.values[active, begin : begin + numbers.shape[1]] = numbers[active]


def check_number(what: str, value: float, low: float, high: float) -> None:
    """Refuses a number outside a range."""
    if not low <= value <= high:  # NaN compares false, and so is refused
        raise DsslError(f"{what} is {value:g}; it must lie between {low:g} and {high:g}")


@dataclass(frozen=True, slots=True)
class Crop:
    """RandomResizedCrop: a box of ``low`` to ``high`` of the area, ratio 3/4 to 4/3, resized bilinearly."""

    low: float = 0.2
    high: float = 1.0

    def __post_init__(self) -> None:
        check_number("the smallest area of crop", self.low, 1e-6, 1)
        check_number("the largest area of crop", self.high, self.low, 1)

    def widths(self) -> tuple[int, ...]:
        return (4 + 2 * code.CROP_ATTEMPTS,)

    def slots(self) -> int:
        return 2 + 2 * code.CROP_ATTEMPTS

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        numbers = np.empty((len(draws), 4 + 2 * code.CROP_ATTEMPTS))
        numbers[:, 0] = self.low
        numbers[:, 1] = self.high
        numbers[:, 2:] = draws
        sheet.write(step, active, code.CROP, numbers)


@dataclass(frozen=True, slots=True)
class Resize:
    """The whole image (``resize``) or its largest centred square (``center``), resized bilinearly."""

    square: bool = False

    def widths(self) -> tuple[int, ...]:
        return (1,)

    def slots(self) -> int:
        return 0

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        sheet.write(step, active, code.RESIZE, np.full((len(draws), 1), float(self.square)))


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirrors left and right with a probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_number("the probability of flip", self.probability, 0, 1)

    def widths(self) -> tuple[int, ...]:
        return (0,)

    def slots(self) -> int:
        return 1

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        sheet.codes[active & (draws[:, 0] < self.probability), step] = code.FLIP


_ORDERS = np.array(list(itertools.permutations(range(4))))


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

    def widths(self) -> tuple[int, ...]:
        return (1, 1, 1, 1)

    def slots(self) -> int:
        return 5

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        kernels = np.array([code.BRIGHTNESS, code.CONTRAST, code.COLOR, code.HUE], dtype=np.int32)
        ranges = (self.brightness, self.contrast, self.saturation)
        numbers = np.empty((len(draws), 4))
        for column, reach in enumerate(ranges):
            low = max(0.0, 1.0 - reach)
            numbers[:, column] = low + (1.0 + reach - low) * draws[:, column]
        numbers[:, 3] = np.trunc((2.0 * draws[:, 3] - 1.0) * self.hue * 255.0) % 256.0
        kernels[np.array([*ranges, self.hue]) == 0] = code.SKIP
        order = _ORDERS[(draws[:, 4] * len(_ORDERS)).astype(np.int64)]
        rows = np.arange(len(draws))
        for place in range(4):
            chosen = order[:, place]
            sheet.write(step + place, active, kernels[chosen], numbers[rows, chosen][:, None])


@dataclass(frozen=True, slots=True)
class Blur:
    """Pillow's GaussianBlur with sigma between ``low`` and ``high`` pixels."""

    low: float = 0.1
    high: float = 2.0

    def __post_init__(self) -> None:
        check_number("the smallest sigma of blur", self.low, 0, 100)
        check_number("the largest sigma of blur", self.high, self.low, 100)

    def widths(self) -> tuple[int, ...]:
        return (1,)

    def slots(self) -> int:
        return 1

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        sigma = self.low + (self.high - self.low) * draws[:, 0]
        sheet.write(step, active, code.BLUR, box_radius(sigma)[:, None])


@dataclass(frozen=True, slots=True)
class Jigsaw:
    """Cuts the image into tiles x tiles and shuffles them."""

    tiles: int

    def __post_init__(self) -> None:
        if self.tiles != int(self.tiles):
            raise DsslError(f"jigsaw({self.tiles:g}): the number of tiles per side must be a whole number")
        check_number("the number of tiles of jigsaw", self.tiles, 1, 1024)

    def widths(self) -> tuple[int, ...]:
        return (1 + self.tiles**2,)

    def slots(self) -> int:
        return int(self.tiles**2)

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        if self.tiles > sheet.size:
            raise DsslError(f"jigsaw({self.tiles}) needs views of at least {self.tiles} pixels, they have {sheet.size}")
        numbers = np.empty((len(draws), 1 + self.tiles**2))
        numbers[:, 0] = self.tiles
        numbers[:, 1:] = np.argsort(draws, axis=1, kind="stable")
        sheet.write(step, active, code.JIGSAW, numbers)


@dataclass(frozen=True, slots=True)
class Single:
    """One operation at one value in its own unit: ``rotate(30)`` is 30 degrees."""

    operation: str
    value: float

    def __post_init__(self) -> None:
        known = operation(self.operation)
        check_number(f"the value of {self.operation}", self.value, known.low, known.high)

    def widths(self) -> tuple[int, ...]:
        return (VALUES,)

    def slots(self) -> int:
        return DRAWS

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        known = operation(self.operation)
        numbers = known.encode(np.full(len(draws), float(self.value)), draws, sheet.size)
        sheet.write(step, active, known.kernel, numbers)


def operation(name: str) -> Operation:
    """An operation by its name."""
    if name not in OPERATIONS:
        raise choices("operation", name, OPERATIONS)
    return OPERATIONS[name]
