"""Intervals, counting, and the proof that a backbone was frozen."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dssl.errors import DsslError
from dssl.evaluation import Result, frozen, wilson
from dssl.weights.encoder import weights_hash


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_solves_the_score_equation(total: int, share: float) -> None:
    correct = round(share * total)
    low, high = wilson(correct, total)
    observed = correct / total
    assert 0 <= low <= observed <= high <= 1
    # the ends are the shares from which the observed one is just 1.96 deviations away
    for end in (low, high):
        if 0 < end < 1:
            assert abs(observed - end) == pytest.approx(
                1.959964 * math.sqrt(end * (1 - end) / total), rel=1e-4, abs=1e-9
            )


def test_wilson_at_the_edges() -> None:
    assert wilson(0, 1) == pytest.approx((0, 0.7935), abs=1e-4)
    assert wilson(1, 1) == pytest.approx((0.2065, 1), abs=1e-4)


def test_result_in_percent() -> None:
    result = Result(name="x", correct=9213, total=10_000, protocol={})
    assert result.accuracy == 92.13
    assert result.interval == pytest.approx((91.587, 92.642), abs=2e-3)
    assert result.plain()["interval_95"] == list(result.interval)


def test_a_backbone_that_moves_voids_the_number(encoder: nn.Module) -> None:
    with frozen(encoder) as digest:
        encoder(torch.zeros(2, 3, 32, 32))
    assert digest == weights_hash(encoder)
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for change in (lambda: layer[0].weight.data[0, 0].add_(1e-6), lambda: layer(torch.randn(4, 2))):
        with pytest.raises(DsslError, match="hash"), frozen(layer):
            change()
