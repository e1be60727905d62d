"""The health check as a callback of Hugging Face's Trainer: ``Trainer(..., callbacks=[HealthCallback("projector")])``."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dssl.integrations import WatchedOutputs
from dssl.training.health import HealthMonitor


class HealthCallback(TrainerCallback):  # type: ignore[misc]  # mypy never sees transformers
    """Judges what the model's projector, and predictor, put out; the verdict is ``callback.monitor.verdict``.

    The Trainer does not give its loss to callbacks, so a divergence is seen in the embeddings only.
    Only the first process checks, on its own part of the batch, and nothing is exchanged.
    """

    def __init__(self, projector: str, *, predictor: str | None = None, monitor: HealthMonitor | None = None) -> None:
        self._outputs = WatchedOutputs(projector, predictor=predictor, monitor=monitor)
        self.monitor = self._outputs.monitor

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if state.is_world_process_zero:
            self._outputs.attach(more["model"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if state.is_world_process_zero:
            self._outputs.begin(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if state.is_world_process_zero:
            self._outputs.end()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        self._outputs.detach()
