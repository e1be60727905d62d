"""How strong a policy is on one's own images, measured on the views and not read from its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Batch: TypeAlias = NDArray[np.uint8]
"""N x H x W x C."""

Features: TypeAlias = NDArray[np.floating]
"""N x D."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """An encoder's name, and what takes N images to their N x D features."""

    name: str
    features: Callable[[Batch], Features]


FLAT_BELOW = 3.0
"""An image whose ``spread`` is below this many of 255 levels is called nearly flat, or blank.

No CIFAR-10 image is below 8, and the shares of heavy views below 2 and below 4 are nearly the same: see docs/views.md.
"""


def spread(images: Batch) -> NDArray[np.float64]:
    """For each image the standard deviation of its pixels around the mean of their channel, pooled over the channels.

    Around the channel's own mean, since a picture of one red is as blank as a picture of one gray.
    """
    planes = np.ascontiguousarray(images.reshape(len(images), -1, images.shape[-1]).transpose(0, 2, 1)).astype(
        np.uint16
    )
    # whole numbers until the end: exact, and ten times as fast as the variance of floats at 224 px
    pixels, total, squares = (
        planes.shape[2],
        planes.sum(axis=2, dtype=np.int64),
        (planes**2).sum(axis=2, dtype=np.int64),
    )
    variance = (pixels * squares - total**2) / pixels**2
    return np.asarray(np.sqrt(variance.mean(axis=1)))


def nearly_flat(images: Batch) -> NDArray[np.bool_]:
    """Which images carry almost nothing to learn from."""
    return spread(images) < FLAT_BELOW


def change(first: Batch, second: Batch) -> NDArray[np.float64]:
    """For each pair of images the mean absolute difference of their pixels, 0 to 255."""
    difference = np.abs(first.astype(np.int16) - second.astype(np.int16))
    return np.asarray(difference.reshape(len(first), -1).mean(axis=1))


def farther(originals: Batch, standard: Batch, heavy: Batch) -> NDArray[np.bool_]:
    """For which images the heavy view is farther from the original than the standard view: the paper's premise, in pixels.

    The distance is ``change``, place by place: a shift of an otherwise equal image counts as far, and the standard view's crop
    is itself a shift.
    """
    return change(originals, heavy) > change(originals, standard)


def farther_in_features(originals: Features, standard: Features, heavy: Features) -> NDArray[np.bool_]:
    """The same for the features of the images: the distance is one minus the cosine."""
    original, near, far = (_unit(features) for features in (originals, standard, heavy))
    return np.asarray((original * far).sum(axis=1) < (original * near).sum(axis=1))


def _unit(features: Features) -> NDArray[np.float64]:
    """Rows of length one; a row of zeros stays, and is at right angles to everything."""
    rows = np.asarray(features, dtype=np.float64)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)
