"""Tables of operations for RandAugment and its relatives, as data."""

from dataclasses import dataclass

from dssl.augment.kernels.codes import MAGNITUDES
from dssl.augment.operations import OPERATIONS, Sign


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of a table and the values it has at magnitude 0 and 30."""

    operation: str
    low: float
    high: float
    sign: Sign = "none"

    def value(self, magnitude: float) -> float:
        """The value at a magnitude, before a sign is drawn."""
        return magnitude / MAGNITUDES * (self.high - self.low) + self.low


Table = tuple[Row, ...]

# the ranges of the published code; magnitude does not mean strength here: most factors are neutral at 15
_DSSL16: Table = (
    Row("autocontrast", 1, 1),
    Row("equalize", 1, 1),
    Row("invert", 0, 0),
    Row("rotate", 0, 30, "negate"),
    Row("posterize", 0, 4),
    Row("solarize", 0, 256),
    Row("solarize-add", 0, 110),
    Row("color", 0.1, 1.9),
    Row("contrast", 0.1, 1.9),
    Row("brightness", 0.1, 1.9),
    Row("sharpness", 0.1, 1.9),
    Row("shear-x", 0, 0.3, "negate"),
    Row("shear-y", 0, 0.3, "negate"),
    Row("cutout-pixels", 0, 40),
    Row("translate-x-pixels", 0, 100, "negate"),
    Row("translate-y-pixels", 0, 100, "negate"),
)

# the fourteen operations of the RandAugment paper
_RANDAUGMENT14: Table = (
    Row("identity", 0, 0),
    Row("autocontrast", 1, 1),
    Row("equalize", 1, 1),
    Row("rotate", 0, 30, "negate"),
    Row("solarize", 256, 0),
    Row("color", 1, 1.9, "mirror"),
    Row("posterize", 8, 4),
    Row("contrast", 1, 1.9, "mirror"),
    Row("brightness", 1, 1.9, "mirror"),
    Row("sharpness", 1, 1.9, "mirror"),
    Row("shear-x", 0, 0.3, "negate"),
    Row("shear-y", 0, 0.3, "negate"),
    Row("translate-x", 0, 0.45, "negate"),
    Row("translate-y", 0, 0.45, "negate"),
)

# magnitude 0 changes nothing and a larger one changes more, so autocontrast and equalize are blended in
_MONOTONE14: Table = (
    Row("identity", 0, 0),
    Row("autocontrast", 0, 1),
    Row("equalize", 0, 1),
    Row("rotate", 0, 30, "negate"),
    Row("solarize", 256, 0),
    Row("color", 1, 1.9, "mirror"),
    Row("posterize", 8, 2),
    Row("contrast", 1, 1.9, "mirror"),
    Row("brightness", 1, 1.9, "mirror"),
    Row("sharpness", 1, 1.9, "mirror"),
    Row("shear-x", 0, 0.3, "negate"),
    Row("shear-y", 0, 0.3, "negate"),
    Row("translate-x", 0, 0.33, "negate"),
    Row("translate-y", 0, 0.33, "negate"),
)

# the thirteen transformations of UniformAugment
_UNIFORM13: Table = (
    Row("shear-x", 0, 0.3, "negate"),
    Row("shear-y", 0, 0.3, "negate"),
    Row("translate-x", 0, 0.45, "negate"),
    Row("translate-y", 0, 0.45, "negate"),
    Row("rotate", 0, 30, "negate"),
    Row("autocontrast", 1, 1),
    Row("equalize", 1, 1),
    Row("solarize", 0, 256),
    Row("posterize", 4, 8),
    Row("contrast", 0.1, 1.9),
    Row("color", 0.1, 1.9),
    Row("brightness", 0.1, 1.9),
    Row("sharpness", 0.1, 1.9),
)

# TrivialAugment's wide ranges
_TRIVIAL14: Table = (
    Row("identity", 0, 0),
    Row("shear-x", 0, 0.99, "negate"),
    Row("shear-y", 0, 0.99, "negate"),
    Row("translate-x-pixels", 0, 32, "negate"),
    Row("translate-y-pixels", 0, 32, "negate"),
    Row("rotate", 0, 135, "negate"),
    Row("brightness", 1, 1.99, "mirror"),
    Row("color", 1, 1.99, "mirror"),
    Row("contrast", 1, 1.99, "mirror"),
    Row("sharpness", 1, 1.99, "mirror"),
    Row("posterize", 8, 2),
    Row("solarize", 256, 0),
    Row("autocontrast", 1, 1),
    Row("equalize", 1, 1),
)

TABLES: dict[str, Table] = {
    "dssl16": _DSSL16,
    "randaugment14": _RANDAUGMENT14,
    "monotone14": _MONOTONE14,
    "uniform13": _UNIFORM13,
    "trivial14": _TRIVIAL14,
}
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
