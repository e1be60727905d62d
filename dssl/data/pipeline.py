"""Threads that work ahead of their consumer, in order, without worker processes, hangs or orphans."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from dssl.errors import DsslError

T = TypeVar("T")
_PATIENCE = 5.0  # seconds; a thread that a dead network disk blocks for longer is left behind: it is a daemon
_WINDOW = 256


def thread_count(threads: int | None) -> int:
    """The number asked for, or by default one for each core that this process may use."""
    if threads is not None and threads < 1:
        raise DsslError(f"threads {threads}: expected at least 1")
    return default_threads() if threads is None else threads


def default_threads() -> int:
    """One thread for each core of this process; torchrun says how many processes share a node's cores (LOCAL_WORLD_SIZE)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(neighbours) if neighbours.isdecimal() else 1))


def in_threads(function: Callable[[int], T], items: Sequence[int], *, threads: int | None = None) -> Iterator[T]:
    """``map(function, items)`` in threads, at most 256 items ahead; an error ends it at once."""
    with thread_pool(thread_count(threads), "dssl-map") as pool:
        for begin in range(0, len(items), _WINDOW):
            yield from pool.map(function, items[begin : begin + _WINDOW])


@contextmanager
def thread_pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, `within_limits`."""
    with within_limits(), ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name) as pool:
        yield pool


@contextmanager
def within_limits() -> Iterator[None]:
    """Start threads in it: a system that allows no more of them is an error of one line."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise DsslError(
            f"{error}: the system allows this process no more than its {threading.active_count()}; use fewer (--threads), or "
            "raise the limits on memory and processes (ulimit -v, ulimit -u)"
        ) from error


@dataclass(slots=True)
class _Slot(Generic[T]):
    """A batch in the making: rows are claimed by threads and then finished."""

    content: T
    count: int
    claimed: int = 0
    finished: int = 0


@dataclass(slots=True)
class _Shared(Generic[T]):
    """What threads and consumer share; the threads hold only this, so that a forgotten pipeline can be collected."""

    start: Callable[[int], tuple[T, int]]
    fill: Callable[[T, range, Callable[[], bool]], None]
    wanted: int
    steps: int
    ahead: int
    chunk: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    slots: dict[int, _Slot[T]] = field(default_factory=dict)
    error: BaseException | None = None
    stopped: bool = False

    def is_stopped(self) -> bool:
        """Asked between images, so that closing does not wait for a batch."""
        return self.stopped

    def claim(self) -> tuple[_Slot[T], range] | None:
        """The next rows to fill, oldest batch first; None where all of them are claimed. The lock is held."""
        for step in range(self.wanted, min(self.wanted + self.ahead + 1, self.steps)):
            slot = self.slots.get(step)
            if slot is None:
                slot = self.slots[step] = _Slot(*self.start(step))
            if slot.claimed < slot.count:
                rows = range(slot.claimed, min(slot.claimed + self.chunk, slot.count))
                slot.claimed = rows.stop
                return slot, rows
        return None

    def work(self) -> None:
        """The life of one thread; any error in it is raised at the consumer."""
        try:
            while True:
                with self.changed:
                    claim = None
                    while not self.stopped and (claim := self.claim()) is None:
                        self.changed.wait()
                    if claim is None or self.stopped:
                        return
                slot, rows = claim
                self.fill(slot.content, rows, self.is_stopped)
                with self.changed:
                    slot.finished += len(rows)
                    if slot.finished == slot.count:
                        self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                if self.error is None:
                    self.error = error
                self.stopped = True
                self.changed.notify_all()


def _stop(shared: _Shared[T], threads: list[threading.Thread]) -> None:
    with shared.changed:
        shared.stopped = True
        shared.slots.clear()
        shared.changed.notify_all()
    deadline = time.monotonic() + _PATIENCE
    for thread in threads:
        # a thread that the system did not start is not alive
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


class Pipeline(Generic[T]):
    """Contents by step, made by threads ahead of the step that is asked for.

    `start(step)` returns an empty content and its number of rows; `fill(content, rows, is_stopped)` fills some rows and returns
    early when told to stop. A content belongs to the consumer once it has been handed over.
    """

    def __init__(
        self,
        start: Callable[[int], tuple[T, int]],
        fill: Callable[[T, range, Callable[[], bool]], None],
        *,
        first: int,
        steps: int,
        threads: int,
        ahead: int,
        chunk: int,
    ) -> None:
        self._shared: _Shared[T] = _Shared(start, fill, first, steps, ahead, chunk)
        workers = [
            threading.Thread(target=self._shared.work, name=f"dssl-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        # runs on close, when nobody holds the pipeline any more, and before the interpreter ends
        self._finalizer = weakref.finalize(self, _stop, self._shared, workers)
        try:
            with within_limits():
                for worker in workers:
                    worker.start()
        except DsslError:
            self.close()
            raise

    def take(self, step: int) -> T:
        """The content of a step; asking for any but the next one makes the threads start over there."""
        shared = self._shared
        with shared.changed:
            if step != shared.wanted:
                shared.slots.clear()  # unfinished contents are left to their threads and thrown away
                shared.wanted = step
                shared.changed.notify_all()
            while shared.error is None and not shared.stopped:
                slot = shared.slots.get(step)
                if slot is not None and slot.finished == slot.count:
                    del shared.slots[step]
                    shared.wanted = step + 1
                    shared.changed.notify_all()
                    return slot.content
                shared.changed.wait()
            if shared.error is not None:
                raise shared.error
        raise RuntimeError("the loader has been closed")

    def close(self) -> None:
        """Stop the threads and wait for them; a second call does nothing."""
        self._finalizer()


class Piped:
    """What batches from a pipeline have in common: a ``with`` block that stops the threads."""

    _pipeline: Pipeline[Any]

    def close(self) -> None:
        """Stop the threads."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
