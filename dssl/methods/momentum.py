"""BYOL's moving average: the schedule and the step."""

import math

import torch
from torch import Tensor


def momentum_at(step: int, total: int, *, base: float) -> float:
    """1 - (1 - base) (cos(pi k / K) + 1) / 2: from ``base`` to 1."""
    return 1 - (1 - base) * (math.cos(math.pi * step / total) + 1) / 2


@torch.no_grad()
def move_average(average: list[Tensor], towards: list[Tensor], *, momentum: float) -> None:
    """average = momentum * average + (1 - momentum) * towards, in place, all tensors in one call."""
    torch._foreach_lerp_(average, towards, 1 - momentum)
