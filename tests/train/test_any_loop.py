"""``dssl.HealthMonitor`` in somebody else's loop: the rules of dssl's runs on embeddings alone."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dssl
from dssl.errors import DsslError
from dssl.training.health import COLLAPSED, PARTIAL
from tests.rejecting import rejects


def embeddings(spread: float, *, rows: int = 64, width: int = 32) -> Tensor:
    """Unit vectors around one point, of about this spread: sqrt(1 - length of their mean squared)."""
    generator = torch.Generator().manual_seed(0)
    noise = F.normalize(torch.randn(rows, width, generator=generator), dim=1)
    return spread * noise + (1 - spread**2) ** 0.5 * F.normalize(torch.ones(width), dim=0)


@pytest.mark.parametrize(
    ("spread", "status"),
    [(1.0, "healthy"), ((PARTIAL + COLLAPSED) / 2, "partial collapse"), (COLLAPSED / 2, "collapsed")],
)
def test_tensors_and_arrays_get_the_verdict_of_their_spread(spread: float, status: str) -> None:
    for z in (embeddings(spread), embeddings(spread).numpy(), embeddings(spread).double().requires_grad_()):
        verdict = dssl.HealthMonitor(patience=0).check(0, {"z1": embeddings(1.0), "z2": z})
        assert verdict.status == status
        if status != "healthy":
            assert (verdict.view, verdict.edge) == ("z2", "")
            assert len(verdict.remedies) == 3
            assert not any("--" in text or "dssl" in text for text in (verdict.reason, *verdict.remedies))


def test_a_low_rank_is_a_partial_collapse_whatever_the_spread() -> None:
    two_points = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).sign() * torch.ones(64, 64)
    assert dssl.HealthMonitor(patience=0).check(0, {"z": two_points}).status == "partial collapse"


def test_predictions_count_from_the_step_that_was_named() -> None:
    monitor = dssl.HealthMonitor(patience=0, every=1, predictions_from=10)
    z, p = embeddings(1.0), embeddings(0.05)
    assert monitor.check(9, {"z": z}, predictions={"z": p}).status == "healthy"
    for step in range(10, 13):
        verdict = monitor.check(step, {"z": z}, predictions={"z": p})
    assert verdict.status == "collapsed"
    assert verdict.reason.startswith("predictions of view z")


def test_a_loss_or_embeddings_that_are_no_numbers_are_a_divergence() -> None:
    z = embeddings(1.0)
    for given, loss in ((z, torch.tensor(float("nan"))), (torch.full_like(z, float("inf")), 1.0)):
        verdict = dssl.HealthMonitor().check(0, {"z": given}, loss=loss)
        assert verdict.status == "diverged"
        assert verdict.edge == ""
        assert not any("--" in text for text in verdict.remedies)


def test_calls_between_two_checks_keep_the_verdict() -> None:
    monitor = dssl.HealthMonitor(patience=0, every=20)
    assert monitor.check(3, {"z": embeddings(1.0)}).status == "healthy"
    assert [step for step in range(3, 45) if monitor.due(step)] == list(range(23, 45))
    for step in range(4, 23):
        assert monitor.check(step, {"z": embeddings(0.0)}) == monitor.verdict
    assert monitor.verdict.step == 3
    assert monitor.due(0)  # a loop that started again


def test_its_memory_survives_a_checkpoint() -> None:
    first = dssl.HealthMonitor(patience=0, every=1)
    for step in range(6):
        first.check(step, {"z": embeddings(0.1)})
    second = dssl.HealthMonitor(patience=0, every=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for monitor in (first, second):
        for step in range(6, 14):
            verdict = monitor.check(step, {"z": embeddings(1.0)})
        assert verdict.status == "partial collapse"  # spread again, but collapsed at 6 to 9 of 14 checks
        assert "steps 0 and" in verdict.reason


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"z": torch.zeros(4, 2, 2)}, "(4, 2, 2)"),
        ({"z": torch.zeros(1, 8)}, "(1, 8)"),
        ({"z": np.zeros((4, 8), np.uint8)}, "uint8"),
        ({}, "empty"),
    ],
)
def test_what_is_no_embedding_is_named(given: dict[str, Tensor], fact: str) -> None:
    with pytest.raises(DsslError) as caught:
        dssl.HealthMonitor().check(0, given)
    assert fact in str(caught.value)
    with rejects("'z3'", "z1"):
        dssl.HealthMonitor().check(0, {"z1": embeddings(1.0)}, predictions={"z3": embeddings(1.0)})
    with rejects("every 0", 1):
        dssl.HealthMonitor(every=0)


def train(*, weight: float) -> dssl.HealthMonitor:
    """VICReg's invariance and variance on vectors, as a plain loop of PyTorch."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=2.0, momentum=0.9)
    monitor, data = dssl.HealthMonitor(patience=100, every=10), torch.randn(512, 32)
    for step in range(150):
        images = data[torch.randint(512, (64,))]
        z1, z2 = (encoder(images + 0.5 * torch.randn_like(images)) for _ in range(2))
        loss = F.mse_loss(z1, z2) + weight * sum(F.relu(1 - z.std(dim=0)).mean() for z in (z1, z2))
        monitor.check(step, {"z1": z1, "z2": z2}, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return monitor


def test_a_plain_loop() -> None:
    assert train(weight=1.0).verdict.status == "healthy"
    collapsed = train(weight=0.0).verdict
    assert collapsed.status in ("partial collapse", "collapsed")
