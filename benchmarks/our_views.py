"""Our views as jobs: image by image as the loader works on photos, many at a time as it works on small images, and the loader."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from benchmarks.view_peers import VIEWS, Job
from dssl.augment import IMAGENET, Plan, ViewMaker
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
            made.apply(plan, row, load(row), buffers, row)

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


class _Memory:
    """A source whose images are an array."""

    name, fingerprint = "an array", "array"
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None

    def __init__(self, images: list[np.ndarray] | np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> np.ndarray:
        return self.images[index]

    def label_of(self, index: int) -> str:
        return str(index)


def loader(size: int, images: list[np.ndarray] | np.ndarray, *, threads: int, batch: int) -> Job:
    """What training gets: whole batches from the real loader, one after the other, with nothing else to do."""
    batches = Batches(_Memory(images), maker(size), batch_size=batch, seed=0, steps=10**9, threads=threads)
    step = 0

    def job() -> int:
        nonlocal step
        batches.at(step)
        step += 1
        return VIEWS * batch

    return job
