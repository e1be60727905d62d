"""What each named operation means: its unit, its range, and how its kernel gets its numbers."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code

Floats: TypeAlias = NDArray[np.float64]

VALUES = 6
"""How many numbers an operation of a table may pass to its kernel."""

DRAWS = 2
"""How many random numbers an operation may use besides its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A named operation on an image that has its final size."""

    name: str
    kernel: int
    unit: str
    low: float
    high: float
    one_channel: str = "the same"
    encoding: int
    """How its value, and up to two draws, become the numbers of its kernel: a code of ``kernels.codes``."""
    number: int = 0
    """Which of the custom operations it is."""
    default: float | None = None
    """The default value: ``equalize`` is ``equalize(1)``."""

    @property
    def needs_colour(self) -> bool:
        """Whether it means nothing for channels that are not red, green and blue (or gray)."""
        return self.kernel in (code.COLOR, code.GRAY, code.HUE)


def _operation(
    name: str,
    kernel: int,
    encoding: int,
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
        encoding=encoding,
        unit=unit,
        low=low,
        high=high,
        one_channel=one_channel,
        default=default,
    )


_STAYS = "stays as it is"
_FILLED = "filled with 123"
OPERATIONS: dict[str, Operation] = {
    entry.name: entry
    for entry in (
        _operation("identity", code.SKIP, code.PLAIN, "", 0, 0, default=0),
        _operation("autocontrast", code.AUTOCONTRAST, code.PLAIN, "strength", 0, 1, default=1),
        _operation("equalize", code.EQUALIZE, code.PLAIN, "strength", 0, 1, default=1),
        _operation("invert", code.INVERT, code.PLAIN, "", 0, 0, default=0),
        _operation("gray", code.GRAY, code.PLAIN, "", 0, 0, default=0, one_channel=_STAYS),
        _operation("rotate", code.AFFINE, code.DEGREES, "degrees, counter-clockwise", -360, 360),
        _operation("posterize", code.POSTERIZE, code.BITS, "bits kept, at least 1", 0, 8),
        _operation("solarize", code.SOLARIZE, code.THRESHOLD, "threshold", 0, 256),
        _operation("solarize-add", code.SOLARIZE_ADD, code.WHOLE, "amount added before solarize(128)", -255, 255),
        _operation("color", code.COLOR, code.PLAIN, "factor", 0, 10, one_channel=_STAYS),
        _operation("contrast", code.CONTRAST, code.PLAIN, "factor", 0, 10),
        _operation("brightness", code.BRIGHTNESS, code.PLAIN, "factor", 0, 10),
        _operation("sharpness", code.SHARPNESS, code.PLAIN, "factor", 0, 10),
        _operation("hue", code.HUE, code.TURNS, "turns", -0.5, 0.5, one_channel=_STAYS),
        _operation("shear-x", code.AFFINE, code.SHEAR_X, "tangent", -10, 10),
        _operation("shear-y", code.AFFINE, code.SHEAR_Y, "tangent", -10, 10),
        _operation("translate-x", code.AFFINE, code.SHARE_X, "share of the image", -1, 1),
        _operation("translate-y", code.AFFINE, code.SHARE_Y, "share of the image", -1, 1),
        _operation("translate-x-pixels", code.AFFINE, code.SHIFT_X, "pixels", -10_000, 10_000),
        _operation("translate-y-pixels", code.AFFINE, code.SHIFT_Y, "pixels", -10_000, 10_000),
        _operation("cutout", code.CUTOUT, code.SHARE_SIDE, "side as a share of the image", 0, 2, one_channel=_FILLED),
        _operation("cutout-pixels", code.CUTOUT, code.SIDE, "side in pixels", 0, 10_000, one_channel=_FILLED),
    )
}
"""Every operation that a table or a policy can name; ``custom.py`` adds to it."""

Sign: TypeAlias = Literal["none", "negate", "mirror"]
"""What a random sign does to a value: nothing, value -> -value, or the distance from the neutral factor 1 is mirrored."""
