"""The health check in the trainers of other libraries: a callback for each, which needs no change to the model."""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dssl.errors import choices
from dssl.training.health import HealthMonitor


class WatchedOutputs:
    """What the projector, and the predictor, of a model put out in a step, judged by a monitor: what the callbacks share.

    Both are named as in ``model.named_modules()``. Each pass of the projector is a view; the predictor's are in the
    same order.
    """

    def __init__(self, projector: str, *, predictor: str | None, monitor: HealthMonitor | None) -> None:
        self.names = {"projector": projector} | ({} if predictor is None else {"predictor": predictor})
        self.monitor = HealthMonitor() if monitor is None else monitor
        self._outputs: dict[str, list[Tensor]] = {}
        self._step: int | None = None
        """The step that is listened to."""
        self._hooks: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for part, name in self.names.items():
            if name not in modules:
                raise choices(part, name, (known for known in modules if known))
            self._hooks.append(modules[name].register_forward_hook(self._hook(part)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, step: int) -> None:
        """Listen to the passes of this step if it is to be checked."""
        self._step, self._outputs = step if self.monitor.due(step) else None, {part: [] for part in self.names}

    def end(self, *, loss: Tensor | float = 0.0) -> None:
        """Judge what was heard; a warning says so when the run has become unhealthy."""
        step, self._step, before = self._step, None, self.monitor.verdict
        views = {
            part: {str(number): rows for number, rows in enumerate(outputs, 1)}
            for part, outputs in self._outputs.items()
        }
        self._outputs = {}
        if step is None or not views["projector"]:
            return
        now = self.monitor.check(step, views["projector"], predictions=views.get("predictor"), loss=loss)
        if now.status != before.status and now.reason:
            warnings.warn("\n".join(now.lines()), stacklevel=2)

    def _hook(self, part: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._step is not None and module.training:
                self._outputs[part].append(output.detach())

        return keep
