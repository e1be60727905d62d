"""Images inside a page: PNG thumbnails as data URIs."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow

from dssl.types import Image

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


def picture(image: Image, *, description: str, side: int = 144) -> Picture:
    """A thumbnail whose longer side has at most ``side`` pixels; small images are never resampled."""
    pillow = to_pillow(image)
    enlarge = max(pillow.size) <= _ENLARGE_UP_TO
    if not enlarge and max(pillow.size) > side:
        scale = side / max(pillow.size)
        smaller = (max(1, round(pillow.width * scale)), max(1, round(pillow.height * scale)))
        pillow = pillow.resize(smaller, Pillow.Resampling.LANCZOS)
    encoded = base64.b64encode(png(pillow)).decode("ascii")
    return Picture(
        source=f"data:image/png;base64,{encoded}",
        width=pillow.width,
        height=pillow.height,
        description=description,
        enlarge=enlarge,
    )
