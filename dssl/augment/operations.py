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


NEED_COLOUR = (code.COLOR, code.GRAY, code.HUE, code.FOG, code.BRIGHTEN, code.SATURATE, code.JPEG)


@dataclass(frozen=True, slots=True)
class Operation:
    """A named operation on an image that has its final size."""

    name: str
    kernel: int
    encoding: int
    """How its value, and up to two draws, become the numbers of its kernel: a code of ``kernels.codes``."""
    unit: str
    low: float
    high: float
    one_channel: str = "the same"
    default: float | None = None
    """The default value: ``equalize`` is ``equalize(1)``."""
    number: int = 0
    """Which of the custom operations it is."""

    @property
    def needs_colour(self) -> bool:
        """Whether it means nothing for channels that are not red, green and blue (or gray)."""
        return self.kernel in NEED_COLOUR


_STAYS = "stays as it is"
_FILLED = "filled with 123"
OPERATIONS: dict[str, Operation] = {
    entry.name: entry
    for entry in (
        Operation("identity", code.SKIP, code.PLAIN, "", 0, 0, default=0),
        Operation("autocontrast", code.AUTOCONTRAST, code.PLAIN, "strength", 0, 1, default=1),
        Operation("equalize", code.EQUALIZE, code.PLAIN, "strength", 0, 1, default=1),
        Operation("invert", code.INVERT, code.PLAIN, "", 0, 0, default=0),
        Operation("gray", code.GRAY, code.PLAIN, "", 0, 0, default=0, one_channel=_STAYS),
        Operation("rotate", code.AFFINE, code.DEGREES, "degrees, counter-clockwise", -360, 360),
        Operation("posterize", code.POSTERIZE, code.BITS, "bits kept, at least 1", 0, 8),
        Operation("solarize", code.SOLARIZE, code.THRESHOLD, "threshold", 0, 256),
        Operation("solarize-add", code.SOLARIZE_ADD, code.WHOLE, "amount added before solarize(128)", -255, 255),
        Operation("color", code.COLOR, code.PLAIN, "factor", 0, 10, one_channel=_STAYS),
        Operation("contrast", code.CONTRAST, code.PLAIN, "factor", 0, 10),
        Operation("brightness", code.BRIGHTNESS, code.PLAIN, "factor", 0, 10),
        Operation("sharpness", code.SHARPNESS, code.PLAIN, "factor", 0, 10),
        Operation("hue", code.HUE, code.TURNS, "turns", -0.5, 0.5, one_channel=_STAYS),
        Operation("shear-x", code.AFFINE, code.SHEAR_X, "tangent", -10, 10),
        Operation("shear-y", code.AFFINE, code.SHEAR_Y, "tangent", -10, 10),
        Operation("translate-x", code.AFFINE, code.SHARE_X, "share of the image", -1, 1),
        Operation("translate-y", code.AFFINE, code.SHARE_Y, "share of the image", -1, 1),
        Operation("translate-x-pixels", code.AFFINE, code.SHIFT_X, "pixels", -10_000, 10_000),
        Operation("translate-y-pixels", code.AFFINE, code.SHIFT_Y, "pixels", -10_000, 10_000),
        Operation("translate", code.AFFINE, code.SHARE_AROUND, "share of the image, in any direction", 0, 1),
        Operation("cutout", code.CUTOUT, code.SHARE_SIDE, "side as a share of the image", 0, 2, one_channel=_FILLED),
        Operation("cutout-pixels", code.CUTOUT, code.SIDE, "side in pixels", 0, 10_000, one_channel=_FILLED),
        Operation("noise", code.NOISE, code.SEEDED, "standard deviation as a share of 255", 0, 1),
        Operation(
            "soften", code.GAUSSIAN, code.ROOT, "sigma in pixels at 128 px, growing with the root of the size", 0, 100
        ),
        Operation("add", code.ADD, code.PLAIN, "share of 255 that is added", -1, 1),
        Operation("jpeg", code.JPEG, code.PLAIN, "quality", 1, 100),
    )
}
"""Every operation that a table or a policy can name; ``custom.py`` adds to it."""

Sign: TypeAlias = Literal["none", "negate", "mirror"]
"""What a random sign does to a value: nothing, value -> -value, or the distance from the neutral factor 1 is mirrored."""
