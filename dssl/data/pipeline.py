"""Threads that work ahead of their consumer, in order, without worker processes, hangs or orphans."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

from dssl.errors import DsslError

T = TypeVar("T")
_PATIENCE = 5.0  # seconds; a thread that a dead network disk blocks for longer is not waited for
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
    with within_limits():
        pool, whole = ThreadPoolExecutor(max_workers=thread_count(threads), thread_name_prefix="dssl-map"), True
        try:
            for begin in range(0, len(items), _WINDOW):
                yield from pool.map(function, items[begin : begin + _WINDOW])
        except GeneratorExit:
            # left early, perhaps by the garbage collector in a thread of this very pool, which cannot wait for itself
            whole = False
            raise
        finally:
            pool.shutdown(wait=whole, cancel_futures=True)


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


def _stop(pool: ThreadPoolExecutor, stopped: threading.Event, begun: dict[int, tuple[T, list[Future[None]]]]) -> None:
    stopped.set()
    pool.shutdown(wait=False, cancel_futures=True)
    # one that was cancelled before it began never counts as done: `wait` would wait for it
    working = [future for _, futures in begun.values() for future in futures if not future.cancelled()]
    _, blocked = wait(working, timeout=_PATIENCE)
    begun.clear()
    if not blocked:
        pool.shutdown()


class Pipeline(Generic[T]):
    """Contents by step, made by threads ahead of the step that is asked for, until the ``with`` block ends.

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
        self._start, self._fill, self.steps, self._ahead, self._chunk = start, fill, steps, ahead, chunk
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dssl-loader")
        self._begun: dict[int, tuple[T, list[Future[None]]]] = {}
        # runs on close, and when nobody holds the pipeline any more
        self._finalizer = weakref.finalize(self, _stop, self._pool, self._stopped, self._begun)
        try:
            self._begin(first)
        except DsslError:
            self.close()
            raise

    def take(self, step: int) -> T:
        """The content of a step; asking for any but the next one makes the threads start over there."""
        if self._stopped.is_set():
            raise RuntimeError("the loader has been closed")
        self._begin(step)
        content, futures = self._begun[step]
        for future in futures:
            future.result()
        self._begin(step + 1)
        return content

    def _begin(self, step: int) -> None:
        """Let the threads make this step and those after it that are to be ready, oldest first, and no others."""
        wanted = range(step, min(step + self._ahead + 1, self.steps))
        for other in self._begun.keys() - wanted:
            for future in self._begun.pop(other)[1]:
                future.cancel()
        for number in wanted:
            if number not in self._begun:
                content, count = self._start(number)
                parts = [range(count)[begin : begin + self._chunk] for begin in range(0, count, self._chunk)]
                with within_limits():
                    futures = [self._pool.submit(self._fill, content, rows, self._stopped.is_set) for rows in parts]
                self._begun[number] = content, futures

    def close(self) -> None:
        """Stop the threads and wait for them; a second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
