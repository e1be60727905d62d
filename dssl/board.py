"""TensorBoard's event file, written in this thread: a disk that fails costs its curves and never the run.

torch's own SummaryWriter writes in a thread that dies with a traceback when the disk is full or gone, and raises from then on.
"""

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("dssl")


class Board:
    """Scalars and pictures by step; where they can no longer be written it says so once, without TensorBoard nothing."""

    def __init__(self, folder: Path | None, *, purge_step: int | None) -> None:
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
        if purge_step is not None:
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
