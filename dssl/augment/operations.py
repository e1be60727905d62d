"""What each named operation means: its unit, its range, how its kernel gets its numbers; and tables of them for RandAugment."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dssl.augment import kernels as code

Floats: TypeAlias = NDArray[np.float64]
Sign: TypeAlias = Literal["none", "negate", "mirror"]
"""What a random sign does to a value: nothing, value -> -value, or the distance from the neutral factor 1 is mirrored."""

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
    """How its value, and up to two draws, become the numbers of its kernel: a code of ``kernels``."""
    unit: str
    low: float
    high: float
    default: float | None = None
    """The default value: ``equalize`` is ``equalize(1)``."""
    number: int = 0
    """Which of the custom operations it is."""

    @property
    def needs_colour(self) -> bool:
        """Whether it means nothing for channels that are not red, green and blue (or gray)."""
        return self.kernel in NEED_COLOUR


OPERATIONS: dict[str, Operation] = {
    entry.name: entry
    for entry in (
        Operation("identity", code.SKIP, code.PLAIN, "", 0, 0, default=0),
        Operation("autocontrast", code.AUTOCONTRAST, code.PLAIN, "strength", 0, 1, default=1),
        Operation("equalize", code.EQUALIZE, code.PLAIN, "strength", 0, 1, default=1),
        Operation("invert", code.INVERT, code.PLAIN, "", 0, 0, default=0),
        Operation("gray", code.GRAY, code.PLAIN, "", 0, 0, default=0),
        Operation("rotate", code.AFFINE, code.DEGREES, "degrees, counter-clockwise", -360, 360),
        Operation("posterize", code.POSTERIZE, code.BITS, "bits kept, at least 1", 0, 8),
        Operation("solarize", code.SOLARIZE, code.THRESHOLD, "threshold", 0, 256),
        Operation("solarize-add", code.SOLARIZE_ADD, code.WHOLE, "amount added before solarize(128)", -255, 255),
        Operation("color", code.COLOR, code.PLAIN, "factor", 0, 10),
        Operation("contrast", code.CONTRAST, code.PLAIN, "factor", 0, 10),
        Operation("brightness", code.BRIGHTNESS, code.PLAIN, "factor", 0, 10),
        Operation("sharpness", code.SHARPNESS, code.PLAIN, "factor", 0, 10),
        Operation("hue", code.HUE, code.TURNS, "turns", -0.5, 0.5),
        Operation("shear-x", code.AFFINE, code.SHEAR_X, "tangent", -10, 10),
        Operation("shear-y", code.AFFINE, code.SHEAR_Y, "tangent", -10, 10),
        Operation("translate-x", code.AFFINE, code.SHARE_X, "share of the image", -1, 1),
        Operation("translate-y", code.AFFINE, code.SHARE_Y, "share of the image", -1, 1),
        Operation("translate-x-pixels", code.AFFINE, code.SHIFT_X, "pixels", -10_000, 10_000),
        Operation("translate-y-pixels", code.AFFINE, code.SHIFT_Y, "pixels", -10_000, 10_000),
        Operation("translate", code.AFFINE, code.SHARE_AROUND, "share of the image, in any direction", 0, 1),
        Operation("cutout", code.CUTOUT, code.SHARE_SIDE, "side as a share of the image", 0, 2),
        Operation("cutout-pixels", code.CUTOUT, code.SIDE, "side in pixels", 0, 10_000),
        Operation("noise", code.NOISE, code.SEEDED, "standard deviation as a share of 255", 0, 1),
        Operation("soften", code.GAUSSIAN, code.ROOT, "sigma in pixels at 128 px", 0, 100),
        Operation("add", code.ADD, code.PLAIN, "share of 255 that is added", -1, 1),
        Operation("jpeg", code.JPEG, code.PLAIN, "quality", 1, 100),
    )
}
"""Every operation that a table or a policy can name; ``add_kernel`` and ``add_function`` add to it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of a table and the values it has at magnitude 0 and 30."""

    operation: str
    low: float
    high: float
    sign: Sign = "none"


Table = tuple[Row, ...]

TABLES: dict[str, Table] = {
    # the ranges of the published code; magnitude does not mean strength here: most factors are neutral at 15
    "dssl16": (
        Row("autocontrast", 1, 1), Row("equalize", 1, 1), Row("invert", 0, 0), Row("rotate", 0, 30, "negate"),
        Row("posterize", 0, 4), Row("solarize", 0, 256), Row("solarize-add", 0, 110), Row("color", 0.1, 1.9),
        Row("contrast", 0.1, 1.9), Row("brightness", 0.1, 1.9), Row("sharpness", 0.1, 1.9),
        Row("shear-x", 0, 0.3, "negate"), Row("shear-y", 0, 0.3, "negate"), Row("cutout-pixels", 0, 40),
        Row("translate-x-pixels", 0, 100, "negate"), Row("translate-y-pixels", 0, 100, "negate"),
    ),
    # the fourteen operations of the RandAugment paper
    "randaugment14": (
        Row("identity", 0, 0), Row("autocontrast", 1, 1), Row("equalize", 1, 1), Row("rotate", 0, 30, "negate"),
        Row("solarize", 256, 0), Row("color", 1, 1.9, "mirror"), Row("posterize", 8, 4),
        Row("contrast", 1, 1.9, "mirror"), Row("brightness", 1, 1.9, "mirror"), Row("sharpness", 1, 1.9, "mirror"),
        Row("shear-x", 0, 0.3, "negate"), Row("shear-y", 0, 0.3, "negate"), Row("translate-x", 0, 0.45, "negate"),
        Row("translate-y", 0, 0.45, "negate"),
    ),
    # magnitude 0 changes nothing and a larger one changes more, so autocontrast and equalize are blended in
    "monotone14": (
        Row("identity", 0, 0), Row("autocontrast", 0, 1), Row("equalize", 0, 1), Row("rotate", 0, 30, "negate"),
        Row("solarize", 256, 0), Row("color", 1, 1.9, "mirror"), Row("posterize", 8, 2),
        Row("contrast", 1, 1.9, "mirror"), Row("brightness", 1, 1.9, "mirror"), Row("sharpness", 1, 1.9, "mirror"),
        Row("shear-x", 0, 0.3, "negate"), Row("shear-y", 0, 0.3, "negate"), Row("translate-x", 0, 0.33, "negate"),
        Row("translate-y", 0, 0.33, "negate"),
    ),
    # the thirteen transformations of UniformAugment
    "uniform13": (
        Row("shear-x", 0, 0.3, "negate"), Row("shear-y", 0, 0.3, "negate"), Row("translate-x", 0, 0.45, "negate"),
        Row("translate-y", 0, 0.45, "negate"), Row("rotate", 0, 30, "negate"), Row("autocontrast", 1, 1),
        Row("equalize", 1, 1), Row("solarize", 0, 256), Row("posterize", 4, 8), Row("contrast", 0.1, 1.9),
        Row("color", 0.1, 1.9), Row("brightness", 0.1, 1.9), Row("sharpness", 0.1, 1.9),
    ),
    # TrivialAugment's wide ranges
    "trivial14": (
        Row("identity", 0, 0), Row("shear-x", 0, 0.99, "negate"), Row("shear-y", 0, 0.99, "negate"),
        Row("translate-x-pixels", 0, 32, "negate"), Row("translate-y-pixels", 0, 32, "negate"),
        Row("rotate", 0, 135, "negate"), Row("brightness", 1, 1.99, "mirror"), Row("color", 1, 1.99, "mirror"),
        Row("contrast", 1, 1.99, "mirror"), Row("sharpness", 1, 1.99, "mirror"), Row("posterize", 8, 2),
        Row("solarize", 256, 0), Row("autocontrast", 1, 1), Row("equalize", 1, 1),
    ),
}  # fmt: skip
COLOURLESS = {
    "dssl16": "dssl15", "randaugment14": "randaugment13", "monotone14": "monotone13", "uniform13": "uniform12",
    "trivial14": "trivial13",
}  # fmt: skip
"""The table without operations on colour that stands for each of the above where images have other channels."""
TABLES |= {
    COLOURLESS[name]: tuple(row for row in rows if not OPERATIONS[row.operation].needs_colour)
    for name, rows in TABLES.items()
}
"""Every table that a policy can name."""
