"""Images inside a page: PNG thumbnails as data URIs."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow

from dssl.types import Image

SIDE = 144
"""Pixels of the longer side of a picture on a page, at most."""

_ENLARGE_UP_TO = 64
"""Images up to this many pixels a side are kept whole and enlarged with hard edges: each pixel is what the model sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image as a page holds it."""

    source: str
    width: int
    height: int
    description: str
    enlarge: bool


def to_pillow(image: Image) -> Pillow.Image:
    """The Pillow image of a height x width x (1 or 3) array."""
    return Pillow.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] == 1 else image))


def png(image: Pillow.Image) -> bytes:
    """The bytes of a PNG, the same for the same pixels: no time, no software name."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def shrunk(image: Image, *, side: int) -> Image:
    """The image with its longer side brought down to ``side`` pixels (Lanczos); a smaller one stays as it is."""
    height, width, channels = image.shape
    if max(height, width) <= side:
        return image
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(to_pillow(image).resize(size, Pillow.Resampling.LANCZOS)).reshape(size[1], size[0], channels)


def picture(image: Image, *, description: str, side: int = SIDE) -> Picture:
    """A thumbnail whose longer side has at most ``side`` pixels; small images are never resampled."""
    enlarge = max(image.shape[:2]) <= _ENLARGE_UP_TO
    pillow = to_pillow(image if enlarge else shrunk(image, side=side))
    encoded = base64.b64encode(png(pillow)).decode("ascii")
    return Picture(
        source=f"data:image/png;base64,{encoded}",
        width=pillow.width,
        height=pillow.height,
        description=description,
        enlarge=enlarge,
    )
