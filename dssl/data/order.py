"""The order of a run's images: random over all of them, or shard by shard; a pure function of seed, epoch and step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.data.pipeline import within_limits
from dssl.data.source import Shuffle, Source, Subset
from dssl.errors import DsslError

WINDOW = 16


@dataclass(frozen=True, slots=True)
class Position:
    """What one global step trains on."""

    epoch: int
    indices: NDArray[np.int64]


class Order:
    """The order of `count` images: reshuffled for each epoch and cut into global batches, without the last, partial one.

    A pure function of seed, epoch and step, which any rank can compute from any start.
    """

    def __init__(self, count: int, *, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise DsslError(f"batch size {batch_size}: expected at least 1")
        if count < batch_size:
            raise DsslError(
                f"the data set has {count:,} image{'s' if count != 1 else ''}, fewer than the batch size of {batch_size:,}: "
                "use a smaller batch or more data"
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.steps_per_epoch = count // batch_size
        # two epochs, since threads work ahead
        self._shuffled = functools.lru_cache(maxsize=2)(
            lambda epoch: rng.permutation(rng.key(seed, "order", epoch), count)
        )

    def at(self, step: int) -> Position:
        """The indices of one global step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return Position(epoch, self._slice(epoch, position * self.batch_size, (position + 1) * self.batch_size))

    def _slice(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        """Part of the order of an epoch."""
        return self._shuffled(epoch)[begin:end]


class ShardOrder(Order):
    """Shards in random order, `window` of them at a time, the images of these mixed at random.

    The reads of a while fall into a few shards, and no more than two windows of the order are in memory. `bounds` says where
    the images of each shard begin and the last one's end; `ahead` is told the shards of a window before they are needed.
    """

    def __init__(
        self,
        bounds: NDArray[np.int64],
        *,
        batch_size: int,
        seed: int,
        window: int = WINDOW,
        ahead: Callable[[NDArray[np.int64]], None] | None = None,
    ) -> None:
        super().__init__(int(bounds[-1]), batch_size=batch_size, seed=seed)
        if window < 1:
            raise DsslError(f"window {window}: expected at least 1 shard")
        self._first, self._sizes = bounds[:-1], np.diff(bounds)
        self._ahead = ahead
        self.windows = -(-len(self._sizes) // window)
        # as equal as possible: of 17 shards and a window of 16, the last would not be mixed at all
        self._cuts = np.arange(self.windows + 1) * len(self._sizes) // self.windows
        self._mixed: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def _slice(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        _, starts = self._layout(epoch)
        first, last = np.searchsorted(starts, [begin, end - 1], side="right") - 1
        windows = [self._mix(epoch, number) for number in range(first, last + 1)]
        return np.concatenate(windows)[begin - starts[first] : end - starts[first]]

    def shards_of(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The shards of a window."""
        shards, _ = self._layout(epoch)
        return shards[self._cuts[number] : self._cuts[number + 1]]

    def _layout(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The shards of an epoch in their order, and where each window begins."""
        if epoch not in self._epochs:
            self._epochs = {near: layout for near, layout in self._epochs.items() if abs(near - epoch) <= 1}
            shards = rng.permutation(rng.key(self.seed, "shards", epoch), len(self._sizes))
            starts = np.concatenate([[0], np.cumsum(self._sizes[shards])])[self._cuts]
            self._epochs[epoch] = shards, starts[:-1]
        return self._epochs[epoch]

    def _mix(self, epoch: int, number: int) -> NDArray[np.int64]:
        """The images of a window in their order."""
        key = (epoch, number)
        if key not in self._mixed:
            previous = (epoch, number - 1) if number else (epoch - 1, self.windows - 1)
            self._mixed = {window: images for window, images in self._mixed.items() if window == previous}
            shards = self.shards_of(epoch, number)
            images = np.concatenate([np.arange(self._sizes[shard]) + self._first[shard] for shard in shards])
            self._mixed[key] = images[rng.permutation(rng.key(self.seed, "window", epoch, number), len(images))]
            if self._ahead is not None:
                following = (epoch, number + 1) if number + 1 < self.windows else (epoch + 1, 0)
                wanted = self.shards_of(*following)
                self._ahead(wanted if previous in self._mixed else np.concatenate([shards, wanted]))
        return self._mixed[key]


def order_of(
    source: Source, *, batch_size: int, seed: int, shuffle: Shuffle | None = None, window: int | None = None
) -> Order:
    """The order of a source: the one that suits it unless asked otherwise."""
    if (shuffle or source.shuffle) != "shards":
        if window is not None:
            raise DsslError(f"window {window}: only --shuffle shards has one")
        return Order(len(source), batch_size=batch_size, seed=seed)
    bounds = require_shards(source)
    filled = np.flatnonzero(np.diff(bounds))  # of a part of the data, some shards may have no image

    def ahead(shards: NDArray[np.int64]) -> None:
        # a system may take its time to accept what it is told
        thread = threading.Thread(target=source.read_ahead, args=(filled[shards],), name="dssl-ahead", daemon=True)
        with within_limits():
            thread.start()

    bounds = np.append(bounds[filled], bounds[-1])
    return ShardOrder(bounds, batch_size=batch_size, seed=seed, window=window or source.window, ahead=ahead)


def require_shards(source: Source) -> NDArray[np.int64]:
    """Where the images of each shard begin, and the last one's end; an error for a source without shards."""
    if source.shards is None:
        if isinstance(source, Subset) and source.source.shards is not None:
            raise DsslError(f"--shuffle shards: {source.name} are not in the order of their shards")
        raise DsslError(f"--shuffle shards: {source.name} does not consist of shards; expected tar or Parquet files")
    return source.shards
