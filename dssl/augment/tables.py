"""Tables of operations for RandAugment and its relatives, as data."""

from dataclasses import dataclass

from dssl.augment.kernels.codes import MAGNITUDES
from dssl.augment.operations import OPERATIONS, Sign


@dataclass(frozen=True, slots=True)
class TableRow:
    """One operation of a table and the values it has at magnitude 0 and 30."""

    operation: str
    low: float
    high: float
    sign: Sign = "none"

    def value(self, magnitude: float) -> float:
        """The value at a magnitude, before a sign is drawn."""
        return magnitude / MAGNITUDES * (self.high - self.low) + self.low


Table = tuple[TableRow, ...]

# the ranges of the published code; magnitude does not mean strength here: most factors are neutral at 15
_DSSL16: Table = (
    TableRow("autocontrast", 1, 1),
    TableRow("equalize", 1, 1),
    TableRow("invert", 0, 0),
    TableRow("rotate", 0, 30, "negate"),
    TableRow("posterize", 0, 4),
    TableRow("solarize", 0, 256),
    TableRow("solarize-add", 0, 110),
    TableRow("color", 0.1, 1.9),
    TableRow("contrast", 0.1, 1.9),
    TableRow("brightness", 0.1, 1.9),
    TableRow("sharpness", 0.1, 1.9),
    TableRow("shear-x", 0, 0.3, "negate"),
    TableRow("shear-y", 0, 0.3, "negate"),
    TableRow("cutout-pixels", 0, 40),
    TableRow("translate-x-pixels", 0, 100, "negate"),
    TableRow("translate-y-pixels", 0, 100, "negate"),
)

# the fourteen operations of the RandAugment paper
_RANDAUGMENT14: Table = (
    TableRow("identity", 0, 0),
    TableRow("autocontrast", 1, 1),
    TableRow("equalize", 1, 1),
    TableRow("rotate", 0, 30, "negate"),
    TableRow("solarize", 256, 0),
    TableRow("color", 1, 1.9, "mirror"),
    TableRow("posterize", 8, 4),
    TableRow("contrast", 1, 1.9, "mirror"),
    TableRow("brightness", 1, 1.9, "mirror"),
    TableRow("sharpness", 1, 1.9, "mirror"),
    TableRow("shear-x", 0, 0.3, "negate"),
    TableRow("shear-y", 0, 0.3, "negate"),
    TableRow("translate-x", 0, 0.45, "negate"),
    TableRow("translate-y", 0, 0.45, "negate"),
)

# magnitude 0 changes nothing and a larger one changes more, so autocontrast and equalize are blended in
_MONOTONE14: Table = (
    TableRow("identity", 0, 0),
    TableRow("autocontrast", 0, 1),
    TableRow("equalize", 0, 1),
    TableRow("rotate", 0, 30, "negate"),
    TableRow("solarize", 256, 0),
    TableRow("color", 1, 1.9, "mirror"),
    TableRow("posterize", 8, 2),
    TableRow("contrast", 1, 1.9, "mirror"),
    TableRow("brightness", 1, 1.9, "mirror"),
    TableRow("sharpness", 1, 1.9, "mirror"),
    TableRow("shear-x", 0, 0.3, "negate"),
    TableRow("shear-y", 0, 0.3, "negate"),
    TableRow("translate-x", 0, 0.33, "negate"),
    TableRow("translate-y", 0, 0.33, "negate"),
)

# the thirteen transformations of UniformAugment
_UNIFORM13: Table = (
    TableRow("shear-x", 0, 0.3, "negate"),
    TableRow("shear-y", 0, 0.3, "negate"),
    TableRow("translate-x", 0, 0.45, "negate"),
    TableRow("translate-y", 0, 0.45, "negate"),
    TableRow("rotate", 0, 30, "negate"),
    TableRow("autocontrast", 1, 1),
    TableRow("equalize", 1, 1),
    TableRow("solarize", 0, 256),
    TableRow("posterize", 4, 8),
    TableRow("contrast", 0.1, 1.9),
    TableRow("color", 0.1, 1.9),
    TableRow("brightness", 0.1, 1.9),
    TableRow("sharpness", 0.1, 1.9),
)

# TrivialAugment's wide ranges
_TRIVIAL14: Table = (
    TableRow("identity", 0, 0),
    TableRow("shear-x", 0, 0.99, "negate"),
    TableRow("shear-y", 0, 0.99, "negate"),
    TableRow("translate-x-pixels", 0, 32, "negate"),
    TableRow("translate-y-pixels", 0, 32, "negate"),
    TableRow("rotate", 0, 135, "negate"),
    TableRow("brightness", 1, 1.99, "mirror"),
    TableRow("color", 1, 1.99, "mirror"),
    TableRow("contrast", 1, 1.99, "mirror"),
    TableRow("sharpness", 1, 1.99, "mirror"),
    TableRow("posterize", 8, 2),
    TableRow("solarize", 256, 0),
    TableRow("autocontrast", 1, 1),
    TableRow("equalize", 1, 1),
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
