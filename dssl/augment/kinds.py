"""The kinds of corruption as data: what group each belongs to and its constants at five severities, and ``corruption(fog,3)``."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dssl.augment.kernels import codes as code
from dssl.augment.operations import DRAWS, NEED_COLOUR, VALUES, Row, Sign
from dssl.augment.primitives import Script
from dssl.errors import DsslError, choices

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
