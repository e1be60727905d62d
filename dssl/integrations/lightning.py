"""The health check as a callback of Lightning: ``Trainer(callbacks=[HealthCallback("projection_head")])``."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dssl.integrations import WatchedOutputs
from dssl.training.health import HealthMonitor


class HealthCallback(Callback):  # type: ignore[misc]  # mypy never sees lightning
    """Judges what the module's projector, and predictor, put out; the verdict is ``callback.monitor.verdict``.

    Only the first process checks, on its own part of the batch, and nothing is exchanged.
    """

    def __init__(self, projector: str, *, predictor: str | None = None, monitor: HealthMonitor | None = None) -> None:
        self._outputs = WatchedOutputs(projector, predictor=predictor, monitor=monitor)
        self.monitor = self._outputs.monitor

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._outputs.attach(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self._outputs.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
            self._outputs.end(loss=0.0 if loss is None else loss)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outputs.detach()

    def state_dict(self) -> dict[str, Any]:
        return self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state_dict)
