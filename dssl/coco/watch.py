"""The watch over fine-tuning: a detector cannot collapse as an encoder can, but it can stop being made of numbers."""

import math
from collections.abc import Mapping
from typing import Any

from dssl.coco.detector import DetectionLoss
from dssl.state import Opinion, Sight

_REMEDIES = (
    "lower --rate by half or more, or lengthen --warmup",
    "set --clip 10",
    "take --norm sync where the frozen statistics do not fit the weights, and --precision fp32",
)


class LossWatch:
    """Names the part of the loss that is no number first."""

    def __init__(self) -> None:
        self.opinion = Opinion("healthy", 0)

    def look(self, step: int, report: DetectionLoss, *, first_bad: int) -> Sight:
        parts = {name: float(value) for name, value in report.parts.items()}
        loss = float(report.total.detach())
        if first_bad >= 0 or not math.isfinite(loss):
            self._diverged(parts, first_bad if first_bad >= 0 else step)
        return Sight(
            step=step,
            loss=loss,
            record={"step": step, "loss": loss, "parts": parts},
            text="  ".join(f"{name} {value:.3f}" for name, value in parts.items()),
            opinion=self.opinion,
        )

    def divergence(self, step: int, report: DetectionLoss, *, first_bad: int) -> None:
        parts = {name: float(value) for name, value in report.parts.items()}
        self._diverged(parts, first_bad if first_bad >= 0 else step)

    def _diverged(self, parts: Mapping[str, float], step: int) -> None:
        broken = [name for name, value in parts.items() if not math.isfinite(value)]
        what = (
            f"the loss is no longer a number ({', '.join(broken)})" if broken else "the weights are no longer numbers"
        )
        self.opinion = Opinion("diverged", step, reason=what, remedies=_REMEDIES)

    def state(self) -> dict[str, Any]:
        """Nothing that a healthy run would have to remember."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.opinion = Opinion("healthy", 0)
