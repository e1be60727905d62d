"""All that must survive a kill (weights, optimiser, step, the monitor's memory), and the signals that announce one."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from dssl.config import CheckpointConfig
from dssl.errors import DsslError
from dssl.optim import load_optimizer_tensors, optimizer_tensors
from dssl.run import Resumed, RunFolder
from dssl.weights import checkpoint
from dssl.weights.checkpoint import Checkpoint

Status = Literal["too early", "healthy", "partial collapse", "collapsed", "diverged", "below where it started"]
_HURRY = 1.0
"""Seconds after which a second Ctrl-C is one of a person in a hurry, and not the first one again."""
Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict with its reasons, in words."""

    status: Status
    step: int
    view: str = ""
    edge: str = ""
    reason: str = ""
    remedies: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For the console and the log."""
        if not self.reason:
            return [self.status]
        head = f"{self.status} at step {self.step}: {self.reason}"
        return [head, *(f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """In steps."""

    total: int
    steps_per_epoch: float
    round: int
    """Steps after which a line is written, the task measures itself and the state may be saved."""
    counted: Literal["epoch", "step"]
    """What a line counts; if it is epochs, a round is one."""

    def position(self, step: int) -> str:
        if self.counted == "epoch":
            return f"epoch {step // self.round}/{self.total // self.round}"
        return f"step {step}/{self.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """What was seen at one step."""

    step: int
    loss: float
    record: dict[str, Any]
    """For metrics.jsonl: numbers, and tables of numbers by name."""
    text: str
    """The most telling of them for the progress line, such as "spread 0.93"."""
    verdict: Verdict


class Monitor(Generic[Report]):
    """Checks a run every few steps and judges it; its memory is saved in the checkpoint."""

    verdict: Verdict
    """Of its health, which is not whether it learns."""
    progress: str = ""
    """How the encoder compares with the run's start, such as "better than untrained (kNN 44.3 -> 51.0%)"; empty if unknown."""
    near_start: bool = False
    """Whether the weights as they are now were measured and are close to those that the run started from."""
    last_near_start: int | None = None
    """The last step that was saved while this was so; its checkpoint is kept."""

    def check(self, step: int, report: Report, *, first_bad: int) -> HealthCheck:
        """See and judge; ``first_bad`` is the first step whose loss was not a number, or -1. This waits for the device."""
        raise NotImplementedError

    def divergence(self, step: int, report: Report, *, first_bad: int) -> None:
        """Take note that the weights are no longer numbers."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Only a run that has not diverged is saved."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and, if it is a sum, its parts by name."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


class LossMonitor(Monitor[Loss]):
    """The monitor over a training that cannot collapse but can diverge: it names the part of the loss that did so first."""

    def __init__(self, *, remedies: tuple[str, ...] = ()) -> None:
        self.verdict, self.remedies = Verdict("healthy", 0), remedies

    def check(self, step: int, report: Loss, *, first_bad: int) -> HealthCheck:
        loss = float(report.total.detach())
        parts = {name: float(value.detach()) for name, value in report.parts.items()}
        if first_bad >= 0 or not math.isfinite(loss):
            self.divergence(step, report, first_bad=first_bad)
        record = {"step": step, "loss": loss} | ({"parts": parts} if parts else {})
        text = "  ".join(f"{name} {value:.3f}" for name, value in parts.items())
        return HealthCheck(step=step, loss=loss, record=record, text=text, verdict=self.verdict)

    def divergence(self, step: int, report: Loss, *, first_bad: int) -> None:
        broken = ", ".join(name for name, value in report.parts.items() if not math.isfinite(float(value.detach())))
        reason = f"the loss is no longer a number{f' ({broken})' if broken else ''}"
        if math.isfinite(float(report.total.detach())):
            reason = "the weights are no longer numbers"
        began = first_bad if first_bad >= 0 else step
        self.verdict = Verdict("diverged", began, reason=reason, remedies=self.remedies)


@dataclass
class TrainState:
    name: str
    """Of the module in a checkpoint."""
    module: nn.Module
    optimizer: torch.optim.Optimizer
    monitor: Monitor[Any]
    scaler: torch.amp.GradScaler
    """Of the loss in fp16; has no state in any other precision."""
    step: int = 0
    """Steps done; also the next step's number."""

    def tensors(self) -> dict[str, Tensor]:
        parts = {self.name: self.module.state_dict(), "optimizer": optimizer_tensors(self.optimizer, self.module)}
        return {f"{part}.{name}": value for part, tensors in parts.items() for name, value in tensors.items()}

    def is_finite(self) -> bool:
        """Whether every weight and every number of the optimiser still is a number."""
        return all(bool(torch.isfinite(value).all()) for value in self.tensors().values() if value.is_floating_point())

    def load(self, saved: Checkpoint) -> None:
        try:
            self.module.load_state_dict(saved.part(self.name), strict=True)
        except RuntimeError as error:
            raise DsslError(f"the checkpoint does not fit the {self.name}: {' '.join(str(error).split())}") from None
        try:
            load_optimizer_tensors(self.optimizer, self.module, saved.part("optimizer"))
            self.monitor.load_state(saved.header["health"])
            self.step = int(saved.header["step"])
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(saved.header["scaler"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DsslError(
                f"the checkpoint lacks what a run needs to resume ({type(error).__name__}: {error}): use an older one, "
                "or start again in another --out"
            ) from None


class Checkpointer:
    """Decides when to save, saves, and keeps the newest, the periodic and the last healthy checkpoint."""

    def __init__(
        self, folder: RunFolder | None, config: CheckpointConfig, state: TrainState, *,
        length: RunLength, header: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.folder, self.config, self.state = folder, config, state
        self.length, self.header = length, dict(header)
        self.last_healthy: int | None = None
        self.saved_step: int | None = None
        """Of the newest checkpoint, if there is one."""
        self.warnings: list[str] = []
        self._saved_at = time.monotonic()

    def restore(self, resumed: Resumed) -> None:
        path, saved, warnings = resumed
        fingerprint, before = self.header["fingerprint"], saved.header["fingerprint"]
        if before != fingerprint:
            raise DsslError(
                f"the images are not the ones {path} was trained on "
                f"(fingerprint {fingerprint[:12]}, then {before[:12]}): restore them, or choose another --out"
            )
        self.state.load(saved)
        self.saved_step = self.state.step
        if saved.header.get("verdict") != "too early":  # earlier versions took one that was not judged for healthy
            self.last_healthy = saved.header.get("last_healthy")
        self.warnings = [f"{line}; resuming from {path.name}" for line in warnings]

    def due(self, *, round_ends: bool, last: bool, leaving: bool) -> bool:
        if self.folder is None:
            return False
        # by the step alone: neither a save for the minutes nor a resume moves the rounds that are saved
        rounds = self.state.step // self.length.round
        periods = (self.config.every_epochs, self.config.keep_every or self.config.every_epochs)
        return (
            last
            or leaving
            or (round_ends and any(rounds % period == 0 for period in periods))
            or time.monotonic() - self._saved_at > 60 * self.config.every_minutes
        )

    def begin_again(self) -> None:
        """Restart the minutes to the next save; processes that do not save call this when the first one saves."""
        self._saved_at = time.monotonic()

    def save(self) -> None:
        assert self.folder is not None
        step, monitor = self.state.step, self.state.monitor
        status = monitor.verdict.status
        if status == "healthy":  # not one that was saved too early to be judged
            self.last_healthy = step
        if monitor.near_start:
            monitor.last_near_start = step
        per_epoch, folder = self.length.steps_per_epoch, self.folder.checkpoints
        header = self.header | {
            "step": step, "steps_per_epoch": per_epoch, "epoch": step / per_epoch, "health": monitor.state(),
            "scaler": self.state.scaler.state_dict(), "verdict": status, "last_healthy": self.last_healthy,
        }  # fmt: skip
        checkpoint.write(checkpoint.path_at(folder, step), header, self.state.tensors())
        self.saved_step = step
        self.begin_again()
        protected = {step for step in (self.last_healthy, monitor.last_near_start) if step is not None}
        if self.config.keep_every is not None:
            period = self.config.keep_every * self.length.round
            protected |= {step for step in checkpoint.steps_in(folder) if step % period == 0}
        checkpoint.prune(folder, newest=step, keep=self.config.keep, protected=protected)

    def newest(self) -> Path | None:
        if self.folder is None:
            return None
        steps = checkpoint.steps_in(self.folder.checkpoints)
        return checkpoint.path_at(self.folder.checkpoints, steps[-1]) if steps else None

    def last_healthy_line(self) -> str:
        if self.last_healthy is None or self.folder is None:
            return "no healthy checkpoint was written"
        return f"the last healthy checkpoint is {checkpoint.path_at(self.folder.checkpoints, self.last_healthy)}"


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 (from batch systems) end a run after it has saved; a second signal ends it at once.

    The same signal again is no second one: Slurm sends it to every process, and torchrun hands on its own. A second Ctrl-C
    counts only for a process that is ``alone``, and only a second or more after the first.
    Within the ``with`` block, ``signal`` is the number of the first one, or None.
    """

    def __init__(self, *, alone: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.signal: int | None = None
        self._alone, self._clock, self._since = alone, clock, 0.0
        self._before: dict[int, object] = {}
        self._interrupts = False

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave, it takes

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Around work that may be given up, such as measuring: a signal raises KeyboardInterrupt in it, at once.

        Not in one of several processes, which the others wait for.
        """
        if self._alone and self.signal is not None:
            raise KeyboardInterrupt
        self._interrupts = self._alone
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, self._clock()
            if os.environ.get("RANK", "0") == "0":  # past all buffers: a handler may run in the middle of a write
                with suppress(OSError):
                    os.write(2, f"\n{signal.Signals(number).name} received: stopping\n".encode())
            if self._interrupts:
                raise KeyboardInterrupt
        elif self.signal != number or (
            number == signal.SIGINT and self._alone and self._clock() - self._since >= _HURRY
        ):
            os._exit(128 + number)
