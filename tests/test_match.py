"""Matching against a formula written by hand: features are pulled to a frozen copy of the start, in the graph's direction."""

import copy

import numpy as np
import torch
from torch import nn

from dssl import Objective, ViewGraph
from dssl.methods.match import Match
from dssl.training.stability import corrupted_features, stability
from tests.evaluate.test_features import run


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU()).double()


def test_the_loss_is_the_distance_in_variances_and_the_cosine_and_only_the_source_learns() -> None:
    encoder = _encoder()
    start = copy.deepcopy(encoder)
    method = Match(encoder, feature_dim=8).double()
    with torch.no_grad():
        encoder[1].weight.add_(0.1)  # the run has moved on
    views = {name: torch.randn(6, 3, 2, 2, dtype=torch.float64) for name in ("s1", "h1")}
    objective = Objective(method, ViewGraph.parse("h1->s1, h1 = heavy(s1)"))
    report = objective.backward(views)
    target, feature = start(views["s1"]).detach(), encoder(views["h1"])
    center, variance = target.mean(0), target.var(0).mean()
    z, y = feature - center, target - center
    by_hand = ((z - y).square().mean() / variance) + 1 - nn.functional.cosine_similarity(z, y).mean()
    gradient = torch.autograd.grad(by_hand, encoder[1].weight)[0]
    assert torch.allclose(report.total, by_hand.detach(), rtol=0, atol=1e-12)
    assert torch.allclose(encoder[1].weight.grad, gradient, rtol=0, atol=1e-12)
    assert all(value.grad is None for value in method.target_encoder.parameters())


def test_the_scale_is_that_of_the_first_batch_and_is_saved() -> None:
    method = Match(_encoder(), feature_dim=8).double()
    first, second = torch.randn(2, 6, 3, 2, 2, dtype=torch.float64)
    method.target(first, None, gradient=False)
    scale, center = method.scale.clone(), method.center.clone()
    method.target(5 * second, None, gradient=False)
    assert torch.equal(method.scale, scale)
    assert torch.equal(method.center, center)
    assert {"center", "scale"} <= method.state_dict().keys()


def test_the_target_network_stays_in_evaluation_mode() -> None:
    method = Match(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)), feature_dim=12).train()
    assert method.encoder.training
    assert not method.target_encoder.training


class _Mean(nn.Module):
    """Features that noise hardly moves: the mean colour and a constant."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        colors = images.mean(dim=(2, 3))
        return torch.cat([colors, 0.1 * torch.ones_like(colors[:, :1])], dim=1)


def test_stability_is_one_for_features_that_do_not_move_and_falls_with_what_moves_them() -> None:
    colors = np.random.default_rng(0).integers(40, 215, (40, 1, 1, 3))
    images = np.broadcast_to(colors, (40, 16, 16, 3)).astype(np.uint8).copy()
    encoder = run(_Mean(), image_size=16, threads=1)
    values = stability(corrupted_features(encoder, images, ["gaussian-noise", "gaussian-blur", "contrast"]))
    assert values["gaussian-blur"] > 0.999  # one color, however blurred
    assert 0.9 < values["gaussian-noise"] < 1
    assert values["contrast"] > 0.999  # of one color there is none to lose
