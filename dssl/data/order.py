"""The order of the images: a pure function of seed, epoch and step, which any rank can compute from any start."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.errors import DsslError


@dataclass(frozen=True, slots=True)
class Position:
    """What one global step trains on."""

    epoch: int
    indices: NDArray[np.int64]


class Order:
    """Shuffles `count` images anew in every epoch and cuts them into global batches; the last, partial one is left out."""

    def __init__(self, count: int, *, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise DsslError(f"batch size {batch_size}: expected at least 1")
        if count < batch_size:
            raise DsslError(
                f"the data set has {count:,} image{'s' if count != 1 else ''}, fewer than the batch size of {batch_size:,}: "
                "choose a smaller batch or more data"
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.steps_per_epoch = count // batch_size
        self._shuffles: dict[int, NDArray[np.int64]] = {}
        self._lock = threading.Lock()

    def at(self, step: int) -> Position:
        """The indices of one global step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        with self._lock:
            if epoch not in self._shuffles:
                for old in [known for known in self._shuffles if known < epoch - 1 or known > epoch + 1]:
                    del self._shuffles[old]
                self._shuffles[epoch] = rng.permutation(rng.key(self.seed, "order", epoch), self.count)
            shuffle = self._shuffles[epoch]
        return Position(epoch, shuffle[position * self.batch_size : (position + 1) * self.batch_size])
