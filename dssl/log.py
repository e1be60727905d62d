"""What a run shows: a progress line, metrics.jsonl and TensorBoard."""

import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dssl.errors import DsslError
from dssl.run import RunFolder
from dssl.state import HealthCheck, RunLength

logger = logging.getLogger("dssl")


def show_messages() -> None:
    """Print what the program logs to stderr, and of other libraries only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)


class Log:
    """Only the first process writes; on the others every call does nothing."""

    def __init__(
        self, folder: RunFolder | None, *, start: int, length: RunLength, batch_size: int, active: bool
    ) -> None:
        self.active = active
        self.length = length
        self.batch_size = batch_size
        self._since = time.perf_counter()
        self._since_step = start
        self._waited = 0.0
        self.status = ""
        """The last status that was logged."""
        self.last_knn: float | None = None
        self._measured = ""
        self._seen: HealthCheck | None = None
        if not active:
            return
        self._file = None if folder is None else folder.metrics_file.open("a", encoding="utf-8", buffering=1)
        self._board = Board(None if folder is None else folder.tensorboard, purge_step=start + 1 if start else 0)
        # without a terminal (a pipe, a batch system) one line per epoch is enough
        self._bar = tqdm(
            total=length.total,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=sys.stderr is None or not sys.stderr.isatty(),
            smoothing=0.05,
        )

    def step(self, waited: float) -> None:
        """Count one step and the seconds for which it waited for data."""
        self._waited += waited
        if self.active:
            self._bar.update(1)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Measuring and saving are not training: their seconds count neither in its rate nor in its share of waiting."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def check(self, now: HealthCheck, *, rate: float) -> None:
        """Record what was measured; of a verdict that has changed also its reason and its remedies, which are printed, too."""
        seconds = time.perf_counter() - self._since
        steps = now.step + 1 - self._since_step
        images = steps * self.batch_size / max(seconds, 1e-9)
        data = min(self._waited / max(seconds, 1e-9), 1.0)
        self._since, self._since_step, self._waited = time.perf_counter(), now.step + 1, 0.0
        if not self.active:
            return
        self._seen = now
        verdict, status = now.verdict, now.verdict.status
        measured = {"loss": now.loss, "rate": rate, "images_per_second": images, "data_share": data}
        self.write(
            now.record
            | {"step": now.step + 1, "epoch": (now.step + 1) / self.length.steps_per_epoch}
            | measured
            | {"verdict": status}
            | (
                {"reason": verdict.reason, "remedies": verdict.remedies}
                if status != self.status and verdict.reason
                else {}
            )
        )
        for name, value in measured.items():
            self._board.scalar(name, value, now.step + 1)
        for group, table in now.record.items():
            for name, value in table.items() if isinstance(table, Mapping) else ():
                self._board.scalar(f"{group}/{name}", value, now.step + 1)
        self._board.flush()
        self._bar.set_postfix_str(
            f"{images:.0f} images/s, loss {now.loss:.3f}, {now.text}, {status}, "
            f"data {data:.0%} / compute {1 - data:.0%}"
        )
        if status != self.status and verdict.reason:
            self.say(*verdict.lines())
        self.status = status

    def round(self, step: int, status: str) -> None:
        """One line per round; beside a progress bar only if something was measured."""
        if self.active and (self._bar.disable or self._measured) and (now := self._seen) is not None:
            where = self.length.position(step)
            self.say(f"{where}  loss {now.loss:.3f}  {now.text}  {status}{self._measured}")
            self._measured = ""  # of this round; the next line shows it only if it is measured again

    def knn(self, step: int, result: Mapping[str, Any]) -> None:
        if not self.active:
            return
        self.write({"step": step, "epoch": step / self.length.steps_per_epoch, **result})
        self.last_knn = float(result["knn"])
        self._measured = f", kNN {self.last_knn:.1f} %"
        self._board.scalar("knn", result["knn"], step)

    def start(self, step: int, record: Mapping[str, Any], text: str) -> None:
        """Where a run that started from weights stands beside them."""
        if not self.active:
            return
        self.write({"step": step, "epoch": step / self.length.steps_per_epoch, **record})
        self._measured = f", {text}"
        for name, value in (record["start"] | record["start"]["held_out"]).items():
            if isinstance(value, float):
                self._board.scalar(f"start/{name}", value, step)

    def gallery(self, picture: Any) -> None:
        """The views of a few images, for TensorBoard's page of images (height x width x 3, uint8)."""
        if self.active:
            self._board.picture("views", picture)

    def write(self, record: Mapping[str, Any]) -> None:
        if not self.active or self._file is None:
            return
        try:
            self._file.write(json.dumps(_numbers(record), allow_nan=False) + "\n")
        except OSError as error:
            raise DsslError(
                f"{self._file.name} could not be written ({error.strerror}): checkpoints are untouched; "
                "free disk space or fix the disk, and rerun the command"
            ) from error

    def say(self, *lines: str) -> None:
        if self.active:
            for line in lines:
                self._bar.clear()
                logger.info(line)

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self._bar.close()
            if self._file is not None:
                with suppress(OSError):  # a line that could not be written has been reported
                    self._file.close()
            self._board.close()


def _numbers(value: Any) -> Any:
    """The same with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _numbers(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Board:
    """TensorBoard's event file: scalars and pictures by step. Without TensorBoard it does nothing.

    torch's SummaryWriter writes in a thread that dies with a traceback when the disk is full or gone, and raises from then on.
    This one writes in the caller's thread: a failing disk is reported once and costs the curves, never the run.
    """

    def __init__(self, folder: Path | None, *, purge_step: int) -> None:
        """``purge_step`` tells TensorBoard to forget what an earlier start wrote at and after this step."""
        self._writer: Any = None
        if folder is None:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            return
        self._event = Event
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("wb")
            self._writer = RecordWriter(self._file)
        except OSError as error:
            self._give_up(error)
        self._write(file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            from torch.utils.tensorboard.summary import scalar

            self._write(step=step, summary=scalar(name, value))

    def picture(self, name: str, pixels: NDArray[np.uint8]) -> None:
        """Height x width x 3."""
        if self._writer is not None:
            from torch.utils.tensorboard.summary import image

            self._write(step=0, summary=image(name, pixels, dataformats="HWC"))

    def flush(self) -> None:
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _write(self, **content: Any) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(self._event(wall_time=time.time(), **content).SerializeToString())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._writer is not None:
            self._writer = None
            with suppress(OSError):  # what is left in the buffer fails again
                self._file.close()
        logger.warning(
            f"TensorBoard's curves can no longer be written ({error.strerror}); metrics.jsonl has all of them"
        )
