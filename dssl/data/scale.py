"""From the values of a sensor to 8 bits: TIFF, PNG and NPY of any number of channels, and the range that becomes 0 to 255.

Values are read as they are stored: no colour, no gamma, no transparency, no orientation. The range is stated, or the percentiles
of a sample, measured once.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import PngImagePlugin

from dssl.data.jpeg import check_size
from dssl.errors import DsslError, InvalidSetting
from dssl.text import number
from dssl.types import Image

MAX_CHANNELS = 1024
MAX_VALUES = 1 << 28  # of an image: a gigabyte as float32
ENDINGS = frozenset(["tif", "tiff", "png", "npy"])
NPY, PNG, TIFF = b"\x93NUMPY", b"\x89PNG\r\n\x1a\n", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_EXPECTED = "expected LOW,HIGH such as 0,4095 or 1%,99%, or a pair for each channel: 0,4095;0,10000"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that become 0 and 255: one pair for all channels, or one for each. As percentiles it has yet to be measured."""

    bounds: tuple[tuple[float, float], ...]
    percent: bool = False

    def __post_init__(self) -> None:
        for low, high in self.bounds:
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise InvalidSetting("range", f"is {self.text()}, expected finite numbers, the smaller one first")
            if self.percent and not 0 <= low < high <= 100:
                raise InvalidSetting("range", f"is {self.text()}, expected percentiles between 0 and 100")

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
    value_range = text if isinstance(text, Range) else _parse(text)
    pairs = len(value_range.bounds)
    if pairs not in (1, channels):
        raise InvalidSetting("range", f"has {pairs} pairs for {channels} channels ({value_range.text()}), {_EXPECTED}")
    return value_range


def _parse(text: str) -> Range:
    pairs = [pair.split(",") for pair in text.split(";")]
    parts = [part.strip() for pair in pairs for part in pair]
    percent = parts[0].endswith("%")
    if any(len(pair) != 2 for pair in pairs):
        raise InvalidSetting("range", f"is {text!r}, {_EXPECTED}")
    if any(part.endswith("%") != percent for part in parts):
        raise InvalidSetting("range", f"is {text!r}, which mixes values and percentiles: {_EXPECTED}")
    try:
        numbers = [float(part.removesuffix("%")) for part in parts]
    except ValueError:
        raise InvalidSetting("range", f"is {text!r}, {_EXPECTED}") from None
    return Range(tuple(zip(numbers[::2], numbers[1::2], strict=True)), percent=percent)


def scaled(values: NDArray[Any], value_range: Range) -> Image:
    """Height x width x channels of any numbers as bytes: 255 (value - low) / (high - low), rounded half up, clipped to 0 .. 255.

    What is not a number, as satellites mark pixels without data, becomes 0.
    """
    out = np.empty(values.shape, np.uint8)
    for channel in range(values.shape[2]):
        plane, bounds = values[:, :, channel], value_range.of_channel(channel)
        if values.dtype.kind in "ui" and values.dtype.itemsize <= 2:
            out[:, :, channel] = _table(*bounds, values.dtype.name)[plane.astype(np.int32)]
        else:
            out[:, :, channel] = _bytes(plane, *bounds)
    return out


@functools.lru_cache(maxsize=4 * MAX_CHANNELS)
def _table(low: float, high: float, kind: str) -> NDArray[np.uint8]:
    """The byte of each value that a short integer can have, negative ones from the end: exact, and several times faster."""
    limits = np.iinfo(kind)
    return _bytes(np.concatenate([np.arange(limits.max + 1), np.arange(limits.min, 0)]), low, high)


def _bytes(values: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    with np.errstate(over="ignore", invalid="ignore"):
        shares = (values.astype(np.float64) - low) * 255.0 / (high - low)
    rounded = np.floor(np.clip(np.nan_to_num(shares, nan=0.0, posinf=255.0, neginf=0.0), 0.0, 255.0) + 0.5)
    return rounded.astype(np.uint8)


def read_values(content: bytearray, *, channels: int) -> NDArray[Any]:
    """Height x width x channels of whatever numbers the file holds; raises whatever its reader raises."""
    if content[:6] == NPY:
        values = _npy(content, channels)
    elif content[:8] == PNG:
        values = _png(content)
    elif bytes(content[:4]) in TIFF:
        values = _tiff(content)
    else:
        raise ValueError(
            "the file is empty" if not content else "not a TIFF, PNG or NPY, which --channels and --range read"
        )
    if values.shape[2] != channels:
        raise ValueError(
            f"{values.shape[2]} channels, expected {channels}: all images of a run need the number that --channels gives"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).any():
        raise ValueError("none of its values is a finite number")
    return values


def _check(shape: tuple[int, ...], kind: np.dtype[Any]) -> None:
    """Refuse what is not an array of numbers, or too large, before it is read."""
    if kind.kind not in "uif":
        raise ValueError(f"values of type {kind}: expected integers or floating-point numbers")
    if math.prod(shape) > MAX_VALUES:
        raise ValueError(f"{' x '.join(map(str, shape))} values are more than the limit of {MAX_VALUES:,}")
    if 0 in shape:
        raise ValueError(f"an array of shape {shape} has no values")


def _npy(content: bytearray, channels: int) -> NDArray[Any]:
    """NumPy's own format, never a pickle: height x width (x channels) or, where that does not fit, channels first."""
    file = io.BytesIO(content)
    first = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, by_columns, kind = read(file)
    _check(shape, kind)
    if len(shape) not in (2, 3):
        raise ValueError(f"an array of shape {shape}: expected height x width x channels, or channels first")
    begin, size = file.tell(), math.prod(shape) * kind.itemsize
    if len(content) - begin < size:
        raise ValueError(f"truncated: {size:,} bytes of values expected, {len(content) - begin:,} found")
    values = np.frombuffer(content, kind, math.prod(shape), begin).reshape(shape, order="F" if by_columns else "C")
    if len(shape) == 2:
        values = values[:, :, None]
    elif shape[2] != channels and shape[0] == channels:
        values = values.transpose(1, 2, 0)
    check_size(values.shape[1], values.shape[0])
    return values


def _png(content: bytearray) -> NDArray[Any]:
    """8 and 16 bits. Of 16-bit colour Pillow keeps the high bytes alone, so it is told to unpack the low ones, too.

    torchvision reads such files as well, but the process dies of a damaged one.
    """
    picture = PngImagePlugin.PngImageFile(io.BytesIO(content))
    check_size(*picture.size)
    bits, kind = content[24], content[25]
    if kind == 3 or bits < 8:
        raise ValueError(
            "a PNG with a palette or few bits: expected 8 or 16 bits of gray or colour, with or without alpha"
        )
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[kind]
    if bits == 16 and channels == 2:  # the bytes of one pixel are laid out as those of 8-bit RGBA
        values: NDArray[Any] = _unpacked(content, "RGBA", "RGBA").view(">u2")
    elif bits == 16 and channels > 1:
        mode = "RGB" if channels == 3 else "RGBA"
        high, low = (_unpacked(content, mode, f"{mode};16{end}").astype(np.uint16) for end in "BL")
        values = high << 8 | low
    else:
        values = np.array(picture)
    return values.reshape(picture.height, picture.width, channels)


def _unpacked(content: bytearray, mode: str, layout: str) -> NDArray[np.uint8]:
    picture = PngImagePlugin.PngImageFile(io.BytesIO(content))
    picture._mode, picture.tile = mode, [tile._replace(args=layout) for tile in picture.tile]
    return np.array(picture)


def _tiff(content: bytearray) -> NDArray[Any]:
    """The first image of the file, its channels from samples, planes or pages."""
    try:
        import tifffile
    except ImportError as error:
        raise DsslError(
            "reading TIFF with --channels or --range needs tifffile: pip install 'dssl[science]'"
        ) from error
    # it logs oddities without naming the file; whatever matters is raised, and named
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        if file.pages.first.photometric == tifffile.PHOTOMETRIC.PALETTE:
            raise ValueError("a TIFF with a palette: expected gray, colour or channels")
        series = file.series[0]
        if any(page is None for page in series.pages):
            raise ValueError("some of its channels are in other files (multi-file OME-TIFF): write them into one file")
        _check(series.shape, np.dtype(series.dtype))
        named = dict(zip(series.axes, series.shape, strict=True))
        check_size(named.get("X", 0), named.get("Y", 0))
        long = [place for place, size in enumerate(series.shape) if size > 1 or series.axes[place] in "YX"]
        axes = "".join(series.axes[place] for place in long)
        if "Y" not in axes or "X" not in axes or len(axes) > 3:
            raise ValueError(
                f"axes {series.axes} of {series.shape}: expected height, width and at most one of channels"
            )
        values: NDArray[Any] = series.asarray().reshape([series.shape[place] for place in long])
    order = [axes.index("Y"), axes.index("X"), *(place for place, name in enumerate(axes) if name not in "YX")]
    return values.transpose(order) if len(axes) == 3 else values.transpose(order)[:, :, None]
