"""Optimisers, their parameter groups and schedules, and their state under the names of the parameters."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dssl.config import OptimizerConfig

_TRUST = 1e-3
"""LARS's coefficient."""


class LARS(torch.optim.Optimizer):
    """SGD whose step is scaled by |w| / |g + decay w| for each tensor (You, Gitman, Ginsburg 2017).

    g' = trust (g + decay w), with trust = coefficient |w| / |g + decay w| where the group adapts and both norms are positive,
    else 1; v = momentum v + g'; w = w - rate v.
    """

    def __init__(
        self, parameters: Iterable[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapt": True}
        super().__init__(list(parameters), defaults)

    @torch.no_grad()
    # torch's two overloads are for closures, which nobody here uses
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not weights:
                continue
            # one kernel for all tensors where a loop would launch one for each
            updates = torch._foreach_add([weight.grad for weight in weights], weights, alpha=group["weight_decay"])
            if group["adapt"]:
                size, slope = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates))
                trust = torch.where((size > 0) & (slope > 0), _TRUST * size / slope, 1.0)
                torch._foreach_mul_(updates, list(trust.unbind()))
            for weight in weights:
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            velocities = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, updates)
            torch._foreach_sub_(weights, velocities, alpha=group["lr"])


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, *, nesterov: bool = False, shares: Mapping[str, float] | None = None,
    first_step: int = 0,
) -> torch.optim.Optimizer:  # fmt: skip
    """One group for each combination of decay and rate; ``set_learning_rate`` reads what the groups say of their rate.

    ``shares`` are the rates of some parameters as shares of the scheduled one; before ``first_step`` these do not learn.
    """
    shares = shares or {}
    groups: dict[tuple[bool, bool, float | None], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            small = parameter.dim() <= 1
            fixed = config.fixed_predictor_rate and name.startswith(("predictor.", "heavy_predictor."))
            groups.setdefault((small, fixed, shares.get(name)), []).append(parameter)
    described: list[dict[str, Any]] = [
        {
            "params": parameters,
            "fixed_rate": fixed,
            "rate_share": 1.0 if share is None else share,
            "first_step": 0 if share is None else first_step,
            "weight_decay": config.weight_decay if config.decay_norms_and_biases or not small else 0.0,
        }
        for (small, fixed, share), parameters in groups.items()
    ]
    if config.name == "lars":
        for group, (small, *_) in zip(described, groups, strict=True):
            group["adapt"] = config.decay_norms_and_biases or not small
        return LARS(described, lr=config.rate, momentum=config.momentum, weight_decay=config.weight_decay)
    if config.name == "adamw":
        return torch.optim.AdamW(described, lr=config.rate, betas=(config.momentum, 0.999), fused=True)
    return torch.optim.SGD(described, lr=config.rate, momentum=config.momentum, nesterov=nesterov, fused=True)


def learning_rate(step: int, *, peak: float, total: int, warmup: int) -> float:
    """Linear warm-up to the peak over ``warmup`` steps, then half a cosine to zero at ``total``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def peak_rate(base: float, batch_size: int) -> float:
    """The linear scaling rule: base rate x batch / 256."""
    return base * batch_size / 256


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, *, fixed: float, step: int = 0) -> None:
    """The scheduled rate, or the fixed one for the groups that keep it, times a group's share; zero before its first step."""
    for group in optimizer.param_groups:
        own = fixed if group.get("fixed_rate") else rate
        group["lr"] = own * group.get("rate_share", 1.0) if step >= group.get("first_step", 0) else 0.0


def optimizer_tensors(optimizer: torch.optim.Optimizer, method: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state as ``<parameter name>.<slot>``."""
    return {
        f"{name}.{slot}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in method.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, method: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what ``optimizer_tensors`` gave, on the device and in the memory layout of the parameters."""
    parameters = dict(method.named_parameters())
    for key, value in tensors.items():
        name, _, slot = key.rpartition(".")
        parameter = parameters[name]
        if value.shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        # AdamW's count of steps too: a fused optimiser wants it where the parameter is
        optimizer.state[parameter][slot] = value.to(parameter.device)
