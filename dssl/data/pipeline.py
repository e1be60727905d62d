"""Threads that fill batches ahead of whoever consumes them, in order, without worker processes, hangs or orphans."""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_PATIENCE = 5.0  # seconds; a thread that a dead network disk holds for longer is left behind: it is a daemon


class _Slot(Generic[T]):
    """A batch in the making: rows are claimed by threads and then finished."""

    def __init__(self, content: T, count: int) -> None:
        self.content, self.count = content, count
        self.claimed = 0
        self.finished = 0


class _Shared(Generic[T]):
    """What threads and consumer share; the threads hold only this, so that a forgotten pipeline can be collected."""

    def __init__(
        self,
        start: Callable[[int], tuple[T, int]],
        fill: Callable[[T, range, Callable[[], bool]], None],
        *,
        first: int,
        steps: int,
        ahead: int,
        chunk: int,
    ) -> None:
        self.start, self.fill, self.steps, self.ahead, self.chunk = start, fill, steps, ahead, chunk
        self.changed = threading.Condition()
        self.slots: dict[int, _Slot[T]] = {}
        self.wanted = first
        self.error: BaseException | None = None
        self.stopped = False

    def is_stopped(self) -> bool:
        """Asked between images, so that closing does not wait for a batch."""
        return self.stopped

    def claim(self) -> tuple[_Slot[T], range] | None:
        """The next rows to fill, oldest batch first; None where all within reach is taken. The lock is held."""
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
        """The life of one thread; whatever goes wrong in it is raised at the consumer."""
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
        if thread is not threading.current_thread() and thread.is_alive():  # not where the system refused to start it
            thread.join(max(0.0, deadline - time.monotonic()))


class Pipeline(Generic[T]):
    """Contents by step, made by threads ahead of the step that is asked for.

    `start(step)` gives an empty content and its number of rows; `fill(content, rows, is_stopped)` fills some rows and returns
    early where it is told to stop. A content belongs to the consumer once it has been handed over.
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
        self.waited = 0.0
        """Seconds that the consumer has waited, in all."""
        self._shared: _Shared[T] = _Shared(start, fill, first=first, steps=steps, ahead=ahead, chunk=chunk)
        workers = [
            threading.Thread(target=self._shared.work, name=f"dssl-loader-{number}", daemon=True)
            for number in range(threads)
        ]
        # runs on close, when nobody holds the pipeline any more, and before the interpreter ends
        self._finalizer = weakref.finalize(self, _stop, self._shared, workers)
        for worker in workers:
            worker.start()

    def take(self, step: int) -> T:
        """The content of a step; asking for another one than the next makes the threads start there."""
        shared = self._shared
        begin = time.perf_counter()
        with shared.changed:
            if step != shared.wanted:
                shared.slots.clear()  # what is in the making is left to its threads and thrown away
                shared.wanted = step
                shared.changed.notify_all()
            while shared.error is None and not shared.stopped:
                slot = shared.slots.get(step)
                if slot is not None and slot.finished == slot.count:
                    del shared.slots[step]
                    shared.wanted = step + 1
                    shared.changed.notify_all()
                    self.waited += time.perf_counter() - begin
                    return slot.content
                shared.changed.wait()
            if shared.error is not None:
                raise shared.error
        raise RuntimeError("the loader has been closed")

    def close(self) -> None:
        """Stop the threads and wait for them; a second call does nothing."""
        self._finalizer()
