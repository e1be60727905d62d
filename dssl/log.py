"""What a run shows: a progress line, metrics.jsonl, TensorBoard and the trackers of ``--log``."""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dssl.run import RunFolder, naming
from dssl.state import HealthCheck, RunLength
from dssl.trackers import Board, Tracker, start_trackers

logger = logging.getLogger("dssl")
_SILENCE = 2.0
"""Seconds after which a phase says what it is."""


def show_messages() -> None:
    """Print what the program logs to stderr, and of other libraries only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)


@contextmanager
def phase(doing: str) -> Iterator[None]:
    """Say what is being done where it takes longer than two seconds, so that nobody waits in front of a silent program."""

    def say() -> None:
        with tqdm.external_write_mode(file=sys.stderr):  # takes a progress bar away and puts it back
            logger.info(f"{doing} ...")

    timer = threading.Timer(_SILENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def clock_time(seconds: float) -> str:
    """``0:40``, ``12:40``, ``1:02:40``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _overwrites() -> bool:
    """Whether a line of stderr can be written over: on a terminal, and in a cell of a notebook."""
    kernel = sys.modules.get("ipykernel.iostream")
    return sys.stderr is not None and (
        sys.stderr.isatty() or (kernel is not None and isinstance(sys.stderr, kernel.OutStream))
    )


class Log:
    """Only the first process is ``active``; on the others nothing is written or printed."""

    def __init__(
        self, folder: RunFolder | None, *, start: int, length: RunLength, batch_size: int, active: bool,
        trackers: Sequence[str] = (), parameters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``parameters`` are the settings of the run, for its ``trackers``."""
        self.active, self.length, self.batch_size = active, length, batch_size
        self.status = ""
        """The last status that was logged."""
        self.last_knn: float | None = None
        self._began, self._start = time.perf_counter(), start
        self._since, self._since_step, self._waited = time.perf_counter(), start, 0.0
        self._done, self._speed = start, ""
        self._measured: list[str] = []
        self._last_check: HealthCheck | None = None
        folder = folder if active else None
        self._file = None if folder is None else folder.metrics_file.open("a", encoding="utf-8", buffering=1)
        self._trackers: list[Tracker] = []
        if folder is not None:
            board = Board(folder.tensorboard, purge_step=start + 1 if start else 0)
            self._trackers = [board, *start_trackers(trackers, folder, parameters=parameters or {})]
        # without a terminal or a notebook (a pipe, a batch system) one line per epoch is enough
        self._bar = tqdm(total=length.total, initial=start, bar_format="{desc}", disable=not (active and _overwrites()))

    def step(self, waited: float) -> None:
        """Count one step and the seconds for which it waited for data."""
        self._waited += waited
        self._done += 1
        if not self._bar.disable:
            self._bar.set_description_str(self._fitting(), refresh=False)
            self._bar.update(1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Measuring and saving are not training: their seconds count neither in its rate nor in its share of waiting."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._since += seconds
        if self._done == self._start:  # before the first step: no part of what the steps take
            self._began += seconds

    def check(self, now: HealthCheck, *, rate: float) -> None:
        """Record what was measured; of a verdict that has changed also its reason and its remedies, which are printed, too."""
        seconds = max(time.perf_counter() - self._since, 1e-9)
        step, verdict, status = now.step + 1, now.verdict, now.verdict.status
        images = (step - self._since_step) * self.batch_size / seconds
        data = min(self._waited / seconds, 1.0)
        self._since, self._since_step, self._waited = time.perf_counter(), step, 0.0
        self._last_check = now
        scalars = {"loss": now.loss, "rate": rate, "images_per_second": images, "data_share": data}
        news = status != self.status and verdict.reason != ""
        reason = {"reason": verdict.reason, "remedies": verdict.remedies} if news else {}
        self.write(now.record | self._at(step) | scalars | {"verdict": status} | reason)
        tables = {group: table for group, table in now.record.items() if isinstance(table, Mapping)}
        named = {f"{group}/{name}": value for group, table in tables.items() for name, value in table.items()}
        self._scalars(scalars | named, step)
        self._speed = f"{images:.0f} images/s (data {data:.0%})"
        if news:
            self.say(*verdict.lines())
            self.summary({"verdict": status, "reason": verdict.reason}, step)
        self.status = status

    def round(self, status: str, *, progress: str = "") -> None:
        """One line per round; beside a progress bar only if something was measured."""
        if (self._bar.disable or self._measured) and self._last_check is not None:
            verdict = f"{status}, {progress.partition(' (')[0]}" if progress else status
            self.say(" · ".join([*self._parts(verdict), *self._measured]))
            self._measured = []  # of this round; the next line shows it only if it is measured again

    def _parts(self, status: str) -> list[str]:
        """Of a line, the most important first: a narrow terminal shows only the beginning."""
        seconds, steps = time.perf_counter() - self._began, self._done - self._start
        left = clock_time(seconds / steps * (self.length.total - self._done)) if steps else "?"
        parts = [self.length.position(self._done), f"{left} left"]
        if (now := self._last_check) is not None:
            parts += [status, self._speed, f"loss {now.loss:.3f}", *([now.text] if now.text else [])]
        return parts

    def _fitting(self) -> str:
        """As much of the line as the terminal is wide."""
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except OSError:  # a notebook
            width = 100
        line = ""
        for part in self._parts(self.status):
            longer = f"{line} · {part}" if line else part
            if len(longer) >= width:
                break
            line = longer
        return line

    def knn(self, step: int, result: Mapping[str, Any]) -> None:
        self.write(self._at(step) | dict(result))
        self.last_knn = float(result["knn"])
        self._show(step, f"kNN {self.last_knn:.1f}%")
        self._scalars({"knn": self.last_knn}, step)

    def _show(self, step: int, text: str) -> None:
        """In the line of this round; what is measured before the first step is said by whoever measures it."""
        if step:
            self._measured.append(text)

    def start(self, step: int, record: Mapping[str, Any], text: str) -> None:
        """How a run compares with its start."""
        self.write(self._at(step) | dict(record))
        self._show(step, text)
        values = record["start"] | record["start"]["held_out"]
        scalars = {f"start/{name}": value for name, value in values.items() if isinstance(value, float)}
        self._scalars(scalars, step)

    def gallery(self, picture: NDArray[np.uint8]) -> None:
        """The views of a few images (height x width x 3)."""
        for tracker in self._trackers:
            tracker.picture("views", picture)

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        """What holds for the whole run; the trackers show it next to the curves."""
        for tracker in self._trackers:
            tracker.summary({name: value for name, value in values.items() if value != ""}, step)

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.scalars(values, step)

    def _at(self, step: int) -> dict[str, Any]:
        return {"step": step, "epoch": step / self.length.steps_per_epoch}

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            with naming(Path(self._file.name), note="checkpoints are untouched; "):
                self._file.write(json.dumps(_numbers(record), allow_nan=False) + "\n")

    def say(self, *lines: str) -> None:
        if self.active:
            for line in lines:
                self._bar.clear()
                logger.info(line)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._file is not None:
            with suppress(OSError):  # a line that could not be written has been reported
                self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _numbers(value: Any) -> Any:
    """The same with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _numbers(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
