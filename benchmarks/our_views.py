"""Our views as jobs: image by image as the loader works on photos, many at a time as it works on small images, and the loader."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from benchmarks.view_peers import VIEWS, Contender, Job
from dssl.augment import IMAGENET, BaseViewMaker, Buffers, Plan, RawImages, ViewMaker
from dssl.data import Source
from dssl.data.loader import Batches
from dssl.graph import View

_AHEAD = 8
POLICY = "standard > ra(2,9)"


def maker(size: int, *, policy: str = POLICY, views: int = VIEWS) -> ViewMaker:
    made = [View(name=f"v{number}", policy=policy) for number in range(views)]
    return ViewMaker(made, size=size, seed=0, normalization=IMAGENET)


def one_by_one(size: int, load: Callable[[int], np.ndarray], count: int, *, threads: int = 1) -> Job:
    """A plan for the batch, then all views of each image into its row."""
    made = maker(size)
    buffers = made.allocate(count)
    epoch = 0
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def part(plan: Plan, rows: range) -> None:
        for row in rows:
            made.apply_many(plan, row, [load(row)], buffers, row)

    def job() -> int:
        nonlocal epoch
        epoch += 1
        plan = made.plan(np.arange(count), epoch=epoch)
        if pool is None:
            part(plan, range(count))
        else:
            step = -(-count // (4 * threads))
            list(pool.map(lambda first: part(plan, range(first, min(first + step, count))), range(0, count, step)))
        return VIEWS * count

    return job


def many(size: int, images: np.ndarray, *, policy: str = POLICY, views: int = VIEWS, threads: int = 1) -> Job:
    """Images of one size, each thread on batches of its own.

    This is kinder than the loader, whose threads share the pieces of one batch and meet at its end.
    """
    made = maker(size, policy=policy, views=views)
    pool = ThreadPoolExecutor(threads)
    buffers = [made.allocate(len(images)) for _ in range(threads)]
    epoch = 0

    def batches(number: int) -> None:
        for ahead in range(_AHEAD):
            plan = made.plan(np.arange(len(images)), epoch=epoch + number * _AHEAD + ahead)
            made.apply_many(plan, 0, images, buffers[number], 0)

    def job() -> int:
        nonlocal epoch
        epoch += threads * _AHEAD
        if threads == 1:
            batches(0)
        else:
            list(pool.map(batches, range(threads)))
        return views * len(images) * threads * _AHEAD

    return job


class _Memory(Source):
    """A source whose images are an array."""

    name, fingerprint = "an array", "array"

    def __init__(self, images: list[np.ndarray] | np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> np.ndarray:
        return self.images[index]


class _Counted(BaseViewMaker):
    """A view maker that counts the views it makes and makes none while it is paused."""

    def __init__(self, made: ViewMaker) -> None:
        self._maker, self.names = made, made.names
        self.made = 0
        self._changed = threading.Condition()
        self._paused, self._busy = True, 0

    def allocate(self, count: int, *, pinned: bool = False) -> Buffers:
        return self._maker.allocate(count, pinned=pinned)

    def plan(self, indices: NDArray[np.int64], *, epoch: int) -> Plan:
        return self._maker.plan(indices, epoch=epoch)

    def apply_many(self, plan: Plan, row: int, images: RawImages, out: Buffers, out_row: int) -> None:
        with self._making(len(images)):
            self._maker.apply_many(plan, row, images, out, out_row)

    @contextmanager
    def _making(self, images: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self.made += images * len(self.names)
                self._changed.notify_all()

    def pause(self) -> None:
        """Returns once nobody is making views any more."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._busy == 0)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()


def loader(size: int, images: list[np.ndarray] | np.ndarray, *, threads: int, batch: int) -> Contender:
    """What training gets: whole batches from the real loader, one after the other, with nothing else to do.

    The loader works ahead, so what it hands over in a window was partly made before it. Views are counted when they are made,
    and the threads rest while others are measured.
    """
    counted = _Counted(maker(size))
    batches = Batches(_Memory(images), counted, batch_size=batch, seed=0, steps=10**9, threads=threads)
    step = seen = 0

    def job() -> int:
        nonlocal step, seen
        batches.at(step)
        step += 1
        before, seen = seen, counted.made
        return seen - before

    def resume() -> None:
        nonlocal seen
        seen = counted.made
        counted.resume()

    def close() -> None:
        counted.resume()  # a thread that waits to make a view would not notice that it should end
        batches.close()

    return Contender(job, "whole batches from the real loader", resume=resume, pause=counted.pause, close=close)
