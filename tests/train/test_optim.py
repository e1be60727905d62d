"""Schedules and optimisers against formulae written by hand."""

import math

import pytest
import torch
from torch import nn

from dssl import BYOL, BYOLConfig
from dssl.config import OptimizerConfig
from dssl.optim import (
    build_optimizer,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    peak_rate,
    set_learning_rate,
)  # fmt: skip


def test_warmup_then_cosine() -> None:
    rates = [learning_rate(step, peak=2.0, total=100, warmup=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert rates[30] == pytest.approx(2.0 * 0.5 * (1 + math.cos(math.pi * 20 / 90)))
    assert learning_rate(0, peak=1.0, total=10, warmup=0) == 1.0
    assert peak_rate(0.03, 512) == pytest.approx(0.06)


def model() -> BYOL:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6))
    return BYOL(encoder, feature_dim=6, settings=BYOLConfig(hidden=8, output=4)).double()


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_updates_equal_a_reference(name: str, decay_all: bool) -> None:
    """Five steps of random gradients, each parameter updated by hand."""
    method = model()
    config = OptimizerConfig(
        name=name, rate=0.1, momentum=0.9, weight_decay=0.01,  # type: ignore[arg-type]
        decay_norms_and_biases=decay_all, fixed_predictor_rate=True,
    )  # fmt: skip
    optimizer = build_optimizer(method, config)
    mine = {key: value.detach().clone() for key, value in method.named_parameters()}
    velocity = {key: torch.zeros_like(value) for key, value in mine.items()}
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        rate = 0.3 / (step + 1)
        set_learning_rate(optimizer, rate, fixed=0.3)
        for key, parameter in method.named_parameters():
            if key.startswith("target_"):
                assert not parameter.requires_grad
                continue
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            small = parameter.dim() <= 1
            gradient = parameter.grad + (0.01 if decay_all or not small else 0.0) * mine[key]
            if name == "lars" and (decay_all or not small):
                weight_norm, gradient_norm = float(mine[key].norm()), float(gradient.norm())
                gradient = gradient * (1e-3 * weight_norm / gradient_norm if weight_norm > 0 else 1.0)
            velocity[key] = 0.9 * velocity[key] + gradient
            mine[key] = mine[key] - (0.3 if key.startswith("predictor.") else rate) * velocity[key]
        optimizer.step()
    for key, parameter in method.named_parameters():
        torch.testing.assert_close(parameter.detach(), mine[key], rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("name", ["sgd", "lars", "adamw"])
def test_state_survives_the_way_through_names(name: str) -> None:
    def steps(method: BYOL, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for parameter in method.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            optimizer.step()

    config = OptimizerConfig(name=name)  # type: ignore[arg-type]
    whole = model()
    steps(whole, build_optimizer(whole, config), range(6))
    first = model()
    optimizer = build_optimizer(first, config)
    steps(first, optimizer, range(3))
    second = model()
    second.load_state_dict(first.state_dict())
    restored = build_optimizer(second, config)
    load_optimizer_tensors(restored, second, optimizer_tensors(optimizer, first))
    steps(second, restored, range(3, 6))
    for ours, expected in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)
