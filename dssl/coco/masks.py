"""Masks between polygons, run lengths and pixels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl.coco.annotations import Segmentation


def run_lengths(text: str | bytes) -> list[int]:
    """The counts in COCO's compressed text: five bits a character, lowest first; from the third on, differences.

    pycocotools decodes too, but warns with NumPy 2, and warnings cannot be silenced in one thread alone.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text.encode("ascii") if isinstance(text, str) else text:
        bits = character - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    return counts


def decode(runs: dict[str, Any]) -> NDArray[np.uint8]:
    """Height x width, 0 or 1; runs go down the columns, and the first is of zeros."""
    height, width = runs["size"]
    counts = runs["counts"] if isinstance(runs["counts"], list) else run_lengths(runs["counts"])
    values = np.arange(len(counts), dtype=np.uint8) % 2
    return np.ascontiguousarray(np.repeat(values, counts).reshape(width, height).T)


def encode(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """Run lengths as JSON can hold them."""
    from pycocotools import mask

    runs = mask.encode(np.asfortranarray(pixels))
    return {"size": [int(side) for side in runs["size"]], "counts": runs["counts"].decode("ascii")}


def draw_mask(segmentation: Segmentation, *, before: tuple[int, int], after: tuple[int, int]) -> NDArray[np.uint8]:
    """An object's pixels (height x width, 0 or 1) in an image that was scaled; both sizes are width, height.

    Polygons are scaled as numbers and drawn at the new size; run lengths are drawn and then scaled.
    """
    if isinstance(segmentation, dict):
        drawn = decode(segmentation)
        if after == before:
            return drawn
        return np.array(Pillow.fromarray(drawn).resize(after, Pillow.Resampling.NEAREST))
    return _fill([_scaled(polygon, before, after) for polygon in segmentation], after)


def _scaled(polygon: Sequence[float], before: tuple[int, int], after: tuple[int, int]) -> list[float]:
    ratio = np.array([after[0] / before[0], after[1] / before[1]])
    scaled: list[float] = (np.reshape(polygon, (-1, 2)) * ratio).ravel().tolist()
    return scaled


def _fill(polygons: list[list[float]], size: tuple[int, int]) -> NDArray[np.uint8]:
    from pycocotools import mask

    return decode(mask.merge(mask.frPyObjects(polygons, size[1], size[0])))
