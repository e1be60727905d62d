"""What one sees of a run: a progress line, metrics.jsonl and TensorBoard."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dssl.train.health import Look, Opinion
from dssl.train.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("dssl")


class Log:
    """Only the first process writes; on the others every call does nothing."""

    def __init__(
        self, folder: RunFolder, *, start: int, total: int, steps_per_epoch: int, batch_size: int, active: bool
    ) -> None:
        self.active = active
        self.steps_per_epoch = steps_per_epoch
        self.batch_size = batch_size
        self._since = time.perf_counter()
        self._since_step = start
        self._waited = 0.0
        self.verdict = ""
        """The last verdict that was written down."""
        self._knn = ""
        self._spread = 1.0
        if not active:
            return
        self._file = folder.metrics_file.open("a", encoding="utf-8", buffering=1)
        self._board = _summary_writer(folder, purge_step=start)
        # where nobody watches (a pipe, a batch system) a line an epoch says enough
        self._bar = tqdm(
            total=total, initial=start, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty(), smoothing=0.05
        )

    def step(self, waited: float) -> None:
        """Count one step and the seconds for which it waited for data."""
        self._waited += waited
        if self.active:
            self._bar.update(1)

    def look(self, now: Look, opinion: Opinion, *, rate: float, spread: float) -> None:
        """Write down what was seen; says a changed verdict aloud. ``spread`` is the lowest of those that are judged."""
        seconds = time.perf_counter() - self._since
        steps = now.step + 1 - self._since_step
        images = steps * self.batch_size / max(seconds, 1e-9)
        data = min(self._waited / max(seconds, 1e-9), 1.0)
        self._since, self._since_step, self._waited = time.perf_counter(), now.step + 1, 0.0
        if not self.active:
            return
        self._spread = spread
        record = asdict(now) | {
            "step": now.step + 1,
            "epoch": (now.step + 1) / self.steps_per_epoch,
            "rate": rate,
            "images_per_second": images,
            "data_share": data,
            "verdict": opinion.verdict,
        }
        self.write(record)
        if self._board is not None:
            for key in ("loss", "rate", "images_per_second", "data_share"):
                self._board.add_scalar(key, record[key], now.step + 1)
            for group in ("edges", "spread", "rank", "source", "target"):
                for name, value in record[group].items():
                    self._board.add_scalar(f"{group}/{name}", value, now.step + 1)
        self._bar.set_postfix_str(
            f"{images:.0f} images/s, loss {now.loss:.3f}, spread {spread:.2f}, {opinion.verdict}{self._knn}, "
            f"data {data:.0%} / compute {1 - data:.0%}"
        )
        if opinion.verdict != self.verdict and opinion.reason:
            self.say(*opinion.lines())
        self.verdict = opinion.verdict

    def epoch(self, epoch: int, epochs: int, now: Look | None) -> None:
        """Where there is no progress bar, one line an epoch."""
        if self.active and self._bar.disable and now is not None:
            self.say(
                f"epoch {epoch}/{epochs}  loss {now.loss:.3f}  spread {self._spread:.2f}  {self.verdict}{self._knn}"
            )

    def knn(self, step: int, result: Mapping[str, Any]) -> None:
        if not self.active:
            return
        self.write({"step": step, "epoch": step / self.steps_per_epoch, **result})
        self._knn = f", kNN {result['knn']:.1f} %"
        if self._board is not None:
            self._board.add_scalar("knn", result["knn"], step)

    def gallery(self, picture: Any) -> None:
        """The views of a few images, for TensorBoard's page of images (height x width x 3, uint8)."""
        if self.active and self._board is not None:
            self._board.add_image("views", picture, dataformats="HWC")

    def write(self, record: Mapping[str, Any]) -> None:
        if self.active:
            self._file.write(json.dumps(record) + "\n")

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
            self._file.close()
            if self._board is not None:
                self._board.close()


def _summary_writer(folder: RunFolder, *, purge_step: int) -> "SummaryWriter | None":
    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder.tensorboard), purge_step=purge_step or None)
    return None
