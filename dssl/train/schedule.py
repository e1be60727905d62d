"""Learning rate as a pure function of the step."""

import math


def learning_rate(step: int, *, peak: float, total: int, warmup: int) -> float:
    """Linear warm-up to the peak over ``warmup`` steps, then half a cosine to zero at ``total``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def peak_rate(base: float, batch_size: int) -> float:
    """The linear scaling rule: base rate x batch / 256."""
    return base * batch_size / 256
