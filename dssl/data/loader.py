"""Batches of views for training, made by threads ahead of the step, and plain batches for evaluation."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dssl.data.order import Order
from dssl.data.pipeline import Pipeline
from dssl.data.quarantine import Quarantine, Reader
from dssl.data.sources import Source, thread_count
from dssl.errors import DsslError
from dssl.types import Image

if TYPE_CHECKING:
    from typing import Self

_SMALL = 64 * 64  # pixels; images up to this size are handed to the kernels many at a time
_CHUNK = 64


class Maker(Protocol):
    """What makes views: `dssl.augment.ViewMaker`, or something with the same methods."""

    names: tuple[str, ...]

    def allocate(self, count: int, *, pinned: bool = False) -> Any:
        """Buffers N x H x W x C, one for each view; ``pinned`` is given where the batches ask for it."""

    def plan(self, indices: NDArray[np.int64], *, epoch: int) -> Any:
        """The parameters of every view of these images."""

    def apply(self, plan: Any, row: int, image: NDArray[np.uint8], out: Any, out_row: int) -> None:
        """All views of one image."""

    def apply_many(self, plan: Any, row: int, images: NDArray[np.uint8], out: Any, out_row: int) -> None:
        """All views of images of one size."""


class Event(Protocol):
    """Something that happens on a device, such as the end of a copy: a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of a global batch; it stays untouched for as long as somebody holds one of its tensors."""

    step: int
    epoch: int
    indices: NDArray[np.int64]
    views: dict[str, Tensor]
    """N x C x H x W, in channels_last memory."""
    readers: list[Event] = field(default_factory=list)
    """Whoever lets a device read the tensors without waiting adds the event of its end: they stay untouched until then, too."""


@dataclass(slots=True)
class _Content:
    step: int
    epoch: int
    indices: NDArray[np.int64]
    buffers: Any
    plan: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_Free = deque[tuple[Any, list[Event]]]


def _settle(free: _Free) -> None:
    """Waits until no device reads the buffers any more, so that their memory may go."""
    while free:
        for event in free.pop()[1]:
            event.synchronize()


class _Pool:
    """Buffers that are used again once every tensor on them is gone and no device reads them any more."""

    def __init__(self, maker: Maker, count: int, *, keep: int, pinned: bool) -> None:
        self._maker, self._count, self._keep, self._pinned = maker, count, keep, pinned
        self._free: _Free = deque()
        self._finalizer = weakref.finalize(self, _settle, self._free)

    def take(self) -> Any:
        free, found = self._free, None
        for _ in range(len(free)):
            buffers, readers = free.popleft()
            if not all(event.query() for event in readers):
                free.append((buffers, readers))  # never waited for: the consumer may be asking for a batch right now
            elif found is None:
                found = buffers
            elif len(free) < self._keep:
                free.append((buffers, []))
        if found is not None:
            return found
        return self._maker.allocate(self._count, pinned=True) if self._pinned else self._maker.allocate(self._count)

    def lend(self, buffers: Any) -> tuple[dict[str, Tensor], list[Event]]:
        """The buffers as tensors, without a copy, and the list for the events of their readers."""
        tokens = deque(range(len(buffers) - 1))
        free, finalizer = self._free, self._finalizer
        readers: list[Event] = []

        def gone() -> None:
            try:
                tokens.pop()  # one step, since the last two tensors may die in two threads at once
            except IndexError:
                free.append((buffers, readers))
                if not finalizer.alive:  # the loader is closed or forgotten, and the memory goes now
                    _settle(free)

        tensors = {}
        for name in self._maker.names:
            array = buffers[
                name
            ].view()  # an object of its own, which lives exactly as long as the tensor's memory is in use
            weakref.finalize(array, gone).atexit = False
            tensors[name] = torch.from_numpy(array).permute(0, 3, 1, 2)
        return tensors, readers

    def close(self) -> None:
        self._finalizer()


class Batches:
    """The batches of a training run, from any step on: `for batch in batches`, or `batches.at(step)`.

    Order, views and position depend on seed, epoch and step alone, so that neither the number of threads, nor the start step, nor
    the number of ranks changes an image. `batch_size` is the global one; a rank gets its slice of it.
    """

    def __init__(
        self,
        source: Source,
        maker: Maker,
        *,
        batch_size: int,
        seed: int,
        epochs: int | None = None,
        steps: int | None = None,
        start_step: int = 0,
        threads: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 2,
        quarantine: Quarantine | None = None,
        pinned: bool = False,
    ) -> None:
        if len(source) < 2:
            raise DsslError(f"{source.name}: one image is not enough: self-supervision compares images with each other")
        order = Order(len(source), batch_size=batch_size, seed=seed)
        if batch_size % world_size:
            raise DsslError(f"batch size {batch_size}: expected a multiple of the {world_size} processes that share it")
        if (epochs is None) == (steps is None):
            raise DsslError("the length of a run is given by epochs or by steps: expected one of them")
        threads = thread_count(threads)
        if ahead < 0:
            raise DsslError(f"ahead {ahead}: expected at least 0 batches")
        self.steps_per_epoch = order.steps_per_epoch
        self.steps = steps if steps is not None else (epochs or 0) * order.steps_per_epoch
        if not 0 <= start_step <= self.steps:
            raise DsslError(f"start step {start_step}: the run has {self.steps} steps")
        self.quarantine = quarantine if quarantine is not None else Quarantine(source)
        self._next = start_step
        count = batch_size // world_size
        self._pool = pool = _Pool(maker, count, keep=ahead + 2, pinned=pinned)
        reader = Reader(source, seed=seed, quarantine=self.quarantine)

        def start(step: int) -> tuple[_Content, int]:
            position = order.at(step)
            return _Content(
                step, position.epoch, position.indices[rank * count : (rank + 1) * count], pool.take()
            ), count

        self._pipeline = Pipeline(
            start,
            lambda content, rows, is_stopped: _fill(reader, maker, content, rows, is_stopped),
            first=start_step,
            steps=self.steps,
            threads=threads,
            ahead=ahead,
            # small enough that all threads work on the batch that is needed next
            chunk=max(1, min(_CHUNK, -(-count // (2 * threads)))),
        )

    @property
    def waited(self) -> float:
        """Seconds that the consumer has waited for data so far."""
        return self._pipeline.waited

    def at(self, step: int) -> Batch:
        """The batch of a step: at once where the threads have made it ahead, which they do for the step after the last asked."""
        if not 0 <= step < self.steps:
            raise DsslError(f"step {step}: the run has the steps 0 to {self.steps - 1}")
        content = self._pipeline.take(step)
        self._next = step + 1
        views, readers = self._pool.lend(content.buffers)
        return Batch(step=content.step, epoch=content.epoch, indices=content.indices, views=views, readers=readers)

    def __iter__(self) -> Iterator[Batch]:
        """From the next step to the last."""
        while self._next < self.steps:
            yield self.at(self._next)

    def close(self) -> None:
        """Stop the threads."""
        self._pipeline.close()
        self._pool.close()

    def __enter__(self) -> Self:
        """The batches themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the threads."""
        self.close()


def _fill(reader: Reader, maker: Maker, content: _Content, rows: range, is_stopped: Callable[[], bool]) -> None:
    """Read some images of a batch and make their views."""
    with content.lock:  # once for the whole batch: a plan costs a millisecond, however few its images
        if content.plan is None:
            content.plan = maker.plan(content.indices, epoch=content.epoch)
    plan = content.plan
    pending: list[Image] = []
    first = rows.start  # of the pending images

    def flush() -> None:
        if pending:
            try:
                maker.apply_many(plan, first, np.stack(pending), content.buffers, first)
            except Exception as error:
                name(error, [int(content.indices[row]) for row in range(first, first + len(pending))])
                raise
            pending.clear()

    def name(error: Exception, indices: list[int]) -> None:
        error.add_note(f"while making the views of {', '.join(map(reader.source.label_of, indices))}")

    for row in rows:
        if is_stopped():
            return
        index = int(content.indices[row])
        try:
            image = reader.read(index)
            small = image.shape[0] * image.shape[1] <= _SMALL
            if not small:
                maker.apply(plan, row, image, content.buffers, row)
        except Exception as error:
            name(error, [index])
            raise
        if pending and not (small and image.shape == pending[0].shape):
            flush()
        if small:
            first = first if pending else row
            pending.append(image)
    flush()
