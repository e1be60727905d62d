"""What each named operation means: its unit, its range, and the numbers that its kernel gets."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code

Floats: TypeAlias = NDArray[np.float64]
Encode: TypeAlias = Callable[[Floats, Floats, int], Floats]

VALUES = 6
"""How many numbers an operation of a table may hand to its kernel."""

DRAWS = 2
"""How many random numbers an operation may use besides its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A named operation on an image that has its final size; ``encode`` turns values and draws into kernel numbers.

    ``encode(values, draws, size)`` gets N values and N x 2 draws in [0, 1) and returns N x (at most 6) numbers.
    """

    name: str
    kernel: int
    unit: str
    low: float
    high: float
    one_channel: str = "the same"
    encode: Encode
    default: float | None = None
    """The value where none is written: ``equalize`` is ``equalize(1)``."""
    uses_draws: bool = False


def _plain(values: Floats, draws: Floats, size: int) -> Floats:
    return values[:, None]


def _whole(values: Floats, draws: Floats, size: int) -> Floats:
    return np.trunc(values)[:, None]


def _posterize(values: Floats, draws: Floats, size: int) -> Floats:
    return np.maximum(np.trunc(values), 1.0)[:, None]


def _solarize(values: Floats, draws: Floats, size: int) -> Floats:
    return np.ceil(values)[:, None]


def _matrix(values: Floats, a: Floats | float, b: Floats | float, c: Floats | float, d: Floats | float,
            e: Floats | float, f: Floats | float) -> Floats:  # fmt: skip
    numbers = np.empty((len(values), 6))
    for column, entry in enumerate((a, b, c, d, e, f)):
        numbers[:, column] = entry
    return numbers


def _rotate(values: Floats, draws: Floats, size: int) -> Floats:
    # rounded to 15 digits as Pillow does, value by value: NumPy's cosine may differ from the C library's in the last bit
    angles = [-math.radians(value % 360.0) for value in values]
    cosine = np.array([round(math.cos(angle), 15) for angle in angles])
    sine = np.array([round(math.sin(angle), 15) for angle in angles])
    centre = size / 2
    return _matrix(values, cosine, sine, cosine * -centre + sine * -centre + 0.0 + centre,
                   -sine, cosine, -sine * -centre + cosine * -centre + 0.0 + centre)  # fmt: skip


def _shear_x(values: Floats, draws: Floats, size: int) -> Floats:
    return _matrix(values, 1, values, 0, 0, 1, 0)


def _shear_y(values: Floats, draws: Floats, size: int) -> Floats:
    return _matrix(values, 1, 0, 0, values, 1, 0)


def _translate_x(values: Floats, draws: Floats, size: int) -> Floats:
    return _matrix(values, 1, 0, values, 0, 1, 0)


def _translate_y(values: Floats, draws: Floats, size: int) -> Floats:
    return _matrix(values, 1, 0, 0, 0, 1, values)


def _translate_x_share(values: Floats, draws: Floats, size: int) -> Floats:
    return _translate_x(values * size, draws, size)


def _translate_y_share(values: Floats, draws: Floats, size: int) -> Floats:
    return _translate_y(values * size, draws, size)


def _cutout(values: Floats, draws: Floats, size: int) -> Floats:
    corner = np.trunc(np.maximum(draws * size - values[:, None] / 2, 0.0))
    far = np.trunc(np.minimum(corner + values[:, None], size))
    return np.concatenate([corner, far], axis=1)


def _cutout_share(values: Floats, draws: Floats, size: int) -> Floats:
    return _cutout(values * size, draws, size)


def _hue(values: Floats, draws: Floats, size: int) -> Floats:
    return (np.trunc(values * 255.0) % 256.0)[:, None]


def box_radius(sigma: Floats) -> Floats:
    """The radius of the three box passes that stand for a Gaussian, in the mixture of float and double of Pillow's C."""
    single = np.float32
    variance = (sigma.astype(single) * sigma.astype(single) / single(3)).astype(np.float64)
    length = np.sqrt(12.0 * variance + 1.0).astype(single).astype(np.float64)
    whole = np.floor((length - 1.0) / 2.0).astype(single)
    square = variance.astype(single)
    part = (single(2) * whole + single(1)) * (whole * (whole + single(1)) - single(3) * square)
    part = part / (single(6) * (square - (whole + single(1)) * (whole + single(1))))
    radius: Floats = (whole + part).astype(np.float64)
    return radius


def _operation(
    name: str,
    kernel: int,
    encode: Encode,
    unit: str,
    low: float,
    high: float,
    *,
    one_channel: str = "the same",
    default: float | None = None,
) -> Operation:
    return Operation(
        name=name,
        kernel=kernel,
        encode=encode,
        unit=unit,
        low=low,
        high=high,
        one_channel=one_channel,
        default=default,
        uses_draws=kernel == code.CUTOUT,
    )


_STAYS = "stays as it is"
_FILLED = "filled with 123"
OPERATIONS: dict[str, Operation] = {
    entry.name: entry
    for entry in (
        _operation("identity", code.SKIP, _plain, "", 0, 0, default=0),
        _operation("autocontrast", code.AUTOCONTRAST, _plain, "strength", 0, 1, default=1),
        _operation("equalize", code.EQUALIZE, _plain, "strength", 0, 1, default=1),
        _operation("invert", code.INVERT, _plain, "", 0, 0, default=0),
        _operation("gray", code.GRAY, _plain, "", 0, 0, default=0, one_channel=_STAYS),
        _operation("rotate", code.AFFINE, _rotate, "degrees, counter-clockwise", -360, 360),
        _operation("posterize", code.POSTERIZE, _posterize, "bits kept, at least 1", 0, 8),
        _operation("solarize", code.SOLARIZE, _solarize, "threshold", 0, 256),
        _operation("solarize-add", code.SOLARIZE_ADD, _whole, "amount added before solarize(128)", -255, 255),
        _operation("color", code.COLOR, _plain, "factor", 0, 10, one_channel=_STAYS),
        _operation("contrast", code.CONTRAST, _plain, "factor", 0, 10),
        _operation("brightness", code.BRIGHTNESS, _plain, "factor", 0, 10),
        _operation("sharpness", code.SHARPNESS, _plain, "factor", 0, 10),
        _operation("hue", code.HUE, _hue, "turns", -0.5, 0.5, one_channel=_STAYS),
        _operation("shear-x", code.AFFINE, _shear_x, "tangent", -10, 10),
        _operation("shear-y", code.AFFINE, _shear_y, "tangent", -10, 10),
        _operation("translate-x", code.AFFINE, _translate_x_share, "share of the image", -1, 1),
        _operation("translate-y", code.AFFINE, _translate_y_share, "share of the image", -1, 1),
        _operation("translate-x-pixels", code.AFFINE, _translate_x, "pixels", -10_000, 10_000),
        _operation("translate-y-pixels", code.AFFINE, _translate_y, "pixels", -10_000, 10_000),
        _operation("cutout", code.CUTOUT, _cutout_share, "side as a share of the image", 0, 2, one_channel=_FILLED),
        _operation("cutout-pixels", code.CUTOUT, _cutout, "side in pixels", 0, 10_000, one_channel=_FILLED),
    )
}
"""Every operation that a table or a policy can name; ``custom.py`` adds to it."""

Sign: TypeAlias = Literal["none", "negate", "mirror"]
"""What a random sign does to a value: nothing, value -> -value, or the distance from the neutral factor 1 is mirrored."""
