"""Projection and prediction heads, as in the original papers."""

from itertools import pairwise

from torch import nn


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear, BatchNorm, ReLU for every hidden width, and a last Linear: BYOL's heads, SimSiam's predictor."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after, bias=bias), nn.BatchNorm1d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))


def simsiam_projector(feature_dim: int, *, hidden: int, output: int, layers: int) -> nn.Sequential:
    """Ends in a BatchNorm without scale and shift."""
    head = mlp(feature_dim, *[hidden] * (layers - 1), output)
    return nn.Sequential(*head, nn.BatchNorm1d(output, affine=False))


def simclr_projector(feature_dim: int, *, output: int) -> nn.Sequential:
    """One hidden layer as wide as the feature, no biases, and a last BatchNorm with a scale but no learnt shift."""
    last = nn.BatchNorm1d(output)
    last.bias.requires_grad = False
    return nn.Sequential(*mlp(feature_dim, feature_dim, output, bias=False), last)
