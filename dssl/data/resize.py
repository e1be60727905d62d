"""Pillow's resampling for images of any number of channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image as Pillow

if TYPE_CHECKING:
    from dssl.types import Image


def resize(
    image: Image,
    size: tuple[int, int],
    kind: Pillow.Resampling,
    *,
    box: tuple[float, float, float, float] | None = None,
) -> Image:
    """The image, or a box of it, at width x height; Pillow treats every channel of a colour image by itself, too."""
    if image.shape[2] == 3:
        return np.array(Pillow.fromarray(image).resize(size, kind, box=box))
    planes = (np.ascontiguousarray(image[:, :, channel]) for channel in range(image.shape[2]))
    return np.stack([np.asarray(Pillow.fromarray(plane).resize(size, kind, box=box)) for plane in planes], axis=2)
