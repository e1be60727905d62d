"""Mean and standard deviation of one's own images, for normalising them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.data.decode import UnreadableImage
from dssl.data.parallel import in_threads
from dssl.data.quarantine import Quarantine
from dssl.data.sources import Source
from dssl.errors import DsslError

_SMALLEST = 1 / 255  # constant images have no deviation to divide by


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of each channel, in units of 0 .. 1, and over how many images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    count: int


def measure(
    source: Source,
    *,
    sample: int | None = 10_000,
    seed: int = 0,
    quarantine: Quarantine | None = None,
    threads: int | None = None,
) -> Statistics:
    """Mean and standard deviation over `sample` images drawn by the seed (None: all), each image with the same weight.

    Equal weight, since a view has the same number of pixels whatever the size of its image. Unreadable images are left out.
    """
    quarantine = quarantine if quarantine is not None else Quarantine(source)
    chosen = np.arange(len(source), dtype=np.int64)
    if sample is not None and sample < len(source):
        chosen = np.sort(rng.permutation(rng.key(seed, "statistics"), len(source))[:sample])

    def moments(index: int) -> NDArray[np.float64] | None:
        try:
            pixels = source.image(index)
        except UnreadableImage as error:
            quarantine.record(index, error)
            return None
        # exact: counts of each value, so that the result depends on no order of additions within an image
        counts = np.stack([np.bincount(pixels[:, :, c].ravel(), minlength=256) for c in range(pixels.shape[2])])
        values = np.arange(256) / 255
        both: NDArray[np.float64] = np.stack([counts @ values, counts @ values**2]) / counts[0].sum()
        return both

    found = [value for value in in_threads(moments, chosen.tolist(), threads=threads) if value is not None]
    if not found:
        raise DsslError(f"{source.name}: no readable image to measure")
    first, second = np.mean(found, axis=0)
    std = np.sqrt(np.maximum(second - first**2, 0))
    return Statistics(mean=tuple(first.tolist()), std=tuple(np.maximum(std, _SMALLEST).tolist()), count=len(found))
