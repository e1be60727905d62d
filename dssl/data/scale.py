"""From the values of a sensor to 8 bits: a stated range, or percentiles measured once, becomes 0 to 255."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dssl.errors import DsslError
from dssl.text import number

if TYPE_CHECKING:
    from dssl.types import Image

MAX_CHANNELS = 1024
_EXPECTED = "expected such as 0,4095 or 1%,99%, or a pair for each channel: 0,4095;0,10000"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that become 0 and 255: one pair for all channels, or one for each. As percentiles it has yet to be measured."""

    bounds: tuple[tuple[float, float], ...]
    percent: bool = False

    def __post_init__(self) -> None:
        for low, high in self.bounds:
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise DsslError(f"range {self.text()}: expected finite numbers, the smaller one first")
            if self.percent and not 0 <= low < high <= 100:
                raise DsslError(f"range {self.text()}: percentiles must be between 0 and 100")

    def text(self) -> str:
        """As `parse_range` reads it."""
        sign = "%" if self.percent else ""
        return ";".join(f"{number(low)}{sign},{number(high)}{sign}" for low, high in self.bounds)

    def plain(self) -> list[list[float]]:
        """For a header, as `as_range` reads it."""
        return [[low, high] for low, high in self.bounds]

    def of_channel(self, channel: int) -> tuple[float, float]:
        """The pair that applies to a channel."""
        return self.bounds[channel if len(self.bounds) > 1 else 0]


DEFAULT = Range(((1.0, 99.0),), percent=True)
"""Of images that have neither one channel nor three: nothing else says what is bright there."""


def as_range(bounds: Any) -> Range | None:
    """The range in a header: its pairs; None where there are none."""
    return None if bounds is None else Range(tuple((float(low), float(high)) for low, high in bounds))


def parse_range(text: str | Range | None, *, channels: int) -> Range | None:
    """The range that a user asks for; None for photographs: 1 or 3 channels and no range."""
    if text is None:
        return None if channels in (1, 3) else DEFAULT
    found = text if isinstance(text, Range) else _parse(text)
    if len(found.bounds) not in (1, channels):
        raise DsslError(f"range {found.text()}: {len(found.bounds)} pairs for {channels} channels; {_EXPECTED}")
    return found


def _parse(text: str) -> Range:
    pairs, signs = [], set()
    for pair in text.split(";"):
        numbers = []
        for part in pair.split(","):
            part = part.strip()
            signs.add(part.endswith("%"))
            try:
                numbers.append(float(part.removesuffix("%")))
            except ValueError:
                raise DsslError(f"range {text!r}: {part!r} is not a number; {_EXPECTED}") from None
        if len(numbers) != 2:
            raise DsslError(f"range {text!r}: {_EXPECTED}")
        pairs.append((numbers[0], numbers[1]))
    if len(signs) > 1:
        raise DsslError(f"range {text!r}: values and percentiles cannot be mixed; {_EXPECTED}")
    return Range(tuple(pairs), percent=signs.pop())


def scaled(values: NDArray[Any], value_range: Range) -> Image:
    """Height x width x channels of any numbers as bytes: 255 (value - low) / (high - low), rounded half up, clipped to 0 .. 255.

    What is not a number, as satellites mark pixels without data, becomes 0.
    """
    # a table of all values that 8 or 16 bits can have is exact and several times faster
    table = _table(value_range, values.dtype.name) if values.dtype.kind in "ui" and values.dtype.itemsize <= 2 else None
    out = np.empty(values.shape, np.uint8)
    for channel in range(values.shape[2]):
        plane = values[:, :, channel]
        if table is None:
            out[:, :, channel] = _bytes(plane, *value_range.of_channel(channel))
        else:
            lowest = int(np.iinfo(plane.dtype).min)
            out[:, :, channel] = table[channel % len(table)][plane.astype(np.int32) - lowest]
    return out


@functools.lru_cache(maxsize=4)
def _table(value_range: Range, kind: str) -> NDArray[np.uint8]:
    """The byte of each value that a short integer can have, for each pair of bounds."""
    limits = np.iinfo(kind)
    every = np.arange(limits.min, limits.max + 1)
    return np.stack([_bytes(every, low, high) for low, high in value_range.bounds])


def _bytes(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    with np.errstate(over="ignore", invalid="ignore"):
        shares = (values.astype(np.float64) - low) * 255.0 / (high - low)
    rounded = np.floor(np.clip(np.nan_to_num(shares, nan=0.0, posinf=255.0, neginf=0.0), 0.0, 255.0) + 0.5)
    return rounded.astype(np.uint8)
