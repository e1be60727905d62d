"""All that must survive a kill: weights, optimiser, step, and the watch's memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.methods import Method
from dssl.train import checkpoint
from dssl.train.checkpoint import Checkpoint
from dssl.train.health import Health
from dssl.train.optim import load_optimizer_tensors, optimizer_tensors
from dssl.train.run_folder import RunFolder


@dataclass
class TrainState:
    method: Method
    optimizer: torch.optim.Optimizer
    health: Health
    step: int = 0
    """Steps done; also the next step's number."""

    def tensors(self) -> dict[str, Tensor]:
        assert isinstance(self.method, nn.Module)
        return {
            **{f"method.{name}": value for name, value in self.method.state_dict().items()},
            **{f"optimizer.{name}": value for name, value in optimizer_tensors(self.optimizer, self.method).items()},
        }

    def is_finite(self) -> bool:
        """Whether every weight and every number of the optimiser still is a number."""
        return all(bool(torch.isfinite(value).all()) for value in self.tensors().values() if value.is_floating_point())

    def load(self, saved: Checkpoint) -> None:
        assert isinstance(self.method, nn.Module)
        try:
            self.method.load_state_dict(saved.part("method"), strict=True)
        except RuntimeError as error:
            raise DsslError(f"the checkpoint does not fit the method: {' '.join(str(error).split())}") from None
        load_optimizer_tensors(self.optimizer, self.method, saved.part("optimizer"))
        self.health.load_state(saved.header["health"])
        self.step = int(saved.header["step"])


class Keeper:
    """Decides when to save, saves, and keeps the newest, the periodic and the last healthy checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        state: TrainState,
        *,
        steps_per_epoch: int,
        header: Mapping[str, Any],
    ) -> None:
        self.folder, self.config, self.state = folder, config, state
        self.steps_per_epoch, self.header = steps_per_epoch, dict(header)
        self.last_healthy: int | None = None
        self.complaints: list[str] = []
        self._saved_at = time.monotonic()
        self._epochs_since = 0

    def restore(self, resumed: tuple[Path, Checkpoint, list[str]], *, fingerprint: str) -> None:
        path, saved, complaints = resumed
        if saved.header["fingerprint"] != fingerprint:
            raise DsslError(
                f"the images of {self.config.data} are not those that {path} was trained on "
                f"(fingerprint {fingerprint[:12]}, then {saved.header['fingerprint'][:12]}): put them back, or take another --out"
            )
        self.state.load(saved)
        self.last_healthy = saved.header.get("last_healthy")
        self.complaints = [f"{line}; continuing from {path.name}" for line in complaints]

    def due(self, *, epoch_ends: bool, last: bool) -> bool:
        self._epochs_since += epoch_ends
        return (
            last
            or self._epochs_since >= self.config.checkpoint.every_epochs
            or time.monotonic() - self._saved_at > 60 * self.config.checkpoint.every_minutes
        )

    def save(self) -> Path:
        """Write the state as it is now."""
        step = self.state.step
        verdict = self.state.health.opinion.verdict
        if verdict in ("healthy", "too early"):
            self.last_healthy = step
        path = checkpoint.path_at(self.folder.checkpoints, step)
        checkpoint.write(
            path,
            {
                **self.header,
                "step": step,
                "steps_per_epoch": self.steps_per_epoch,
                "epoch": step / self.steps_per_epoch,
                "health": self.state.health.state(),
                "verdict": verdict,
                "last_healthy": self.last_healthy,
            },
            self.state.tensors(),
        )
        self._saved_at, self._epochs_since = time.monotonic(), 0
        checkpoint.prune(self.folder.checkpoints, keep=self.config.checkpoint.keep, protected=self._protected())
        return path

    def _protected(self) -> set[int]:
        protected = set() if self.last_healthy is None else {self.last_healthy}
        every = self.config.checkpoint.keep_every
        if every is not None:
            period = every * self.steps_per_epoch
            protected |= {step for step in checkpoint.steps_in(self.folder.checkpoints) if step % period == 0}
        return protected

    def newest(self) -> Path | None:
        steps = checkpoint.steps_in(self.folder.checkpoints)
        return checkpoint.path_at(self.folder.checkpoints, steps[-1]) if steps else None

    def last_healthy_line(self) -> str:
        if self.last_healthy is None:
            return "no healthy checkpoint was written"
        return f"the last healthy checkpoint is {checkpoint.path_at(self.folder.checkpoints, self.last_healthy)}"
