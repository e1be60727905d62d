"""Weighted k-nearest-neighbour classification: cosine similarity, votes of weight exp(similarity / temperature)."""

from collections.abc import Sequence
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl.errors import DsslError

_BLOCK, _TRAIN_BLOCK = 512, 65_536
"""Test and training rows that are compared at a time: 134 MB of similarities."""


@torch.no_grad()
def neighbours(
    train_features: Tensor,
    test_features: Tensor,
    *,
    k: int,
    block: int = _BLOCK,
    train_block: int = _TRAIN_BLOCK,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine similarities and indices of the ``k`` nearest training rows of each test row, nearest first: M x k each.

    Features need not be normalised. They stay where they are; on the ``device`` (by default that of the training rows) exist at
    a time ``train_block`` training rows, ``block`` test rows, their similarities, and the results. With fewer than ``k``
    training rows all of them are neighbours.
    """
    _check(train_features, test_features, k=k, rows=train_block)
    device = device or train_features.device
    k = min(k, len(train_features))
    kind = torch.float64 if train_features.dtype == torch.float64 else torch.float32
    similarities = torch.empty(len(test_features), k, dtype=kind, device=device)
    indices = torch.empty(len(test_features), k, dtype=torch.int64, device=device)
    # one buffer for all blocks: allocating a new one costs more than choosing the neighbours
    room = torch.empty(
        min(block, len(test_features)) * min(train_block, len(train_features)), dtype=kind, device=device
    )
    count = 0  # neighbours so far
    for begin in range(0, len(train_features), train_block):  # the outer loop: each training row is moved once
        train = _normalised(train_features[begin : begin + train_block].to(device))
        now = min(k, count + len(train))
        for start in range(0, len(test_features), block):
            rows = slice(start, start + block)
            test = _normalised(test_features[rows].to(device))
            between = room[: len(test) * len(train)].view(len(test), len(train))
            best, place = largest(torch.mm(test, train.T, out=between), min(k, len(train)))
            place += begin
            if count:
                best, order = torch.cat([similarities[rows, :count], best], dim=1).topk(now, dim=1)
                place = torch.cat([indices[rows, :count], place], dim=1).gather(1, order)
            similarities[rows, :now], indices[rows, :now] = best, place
        count = now
    return similarities, indices


def vote(similarities: Tensor, labels: Tensor, *, temperature: float, classes: int) -> Tensor:
    """The class with the largest sum of exp(similarity / temperature) over the neighbours' ``labels`` (M x k both)."""
    if temperature <= 0:
        raise DsslError(f"the temperature is {temperature}: expected a number above 0, such as 0.1")
    # relative to the nearest neighbour: the same winner, and no overflow at small temperatures
    weights = ((similarities - similarities[:, :1]) / temperature).exp()
    scores = torch.zeros(len(labels), classes, dtype=weights.dtype, device=weights.device)
    return scores.scatter_add_(1, labels, weights).argmax(dim=1)


def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    *,
    k: Sequence[int],
    temperature: float,
    classes: int,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Predicted classes of the test rows, beside them, for each ``k``: they share one search."""
    if len(train_labels) != len(train_features):
        raise DsslError(
            f"there are {len(train_features)} training features and {len(train_labels)} labels: expected equal numbers"
        )
    similarities, indices = (
        nearest.to(test_features.device)
        for nearest in neighbours(train_features, test_features, k=max(k), device=device)
    )
    labels = train_labels.to(indices.device)[indices]
    return [vote(similarities[:, :count], labels[:, :count], temperature=temperature, classes=classes) for count in k]


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: int,
    temperature: float,
    classes: int,
    device: torch.device | None = None,
) -> float:
    """The share of test rows that get their own label, from 0 to 1; with fewer than ``k`` training rows all of them vote."""
    if len(test_labels) != len(test_features) or len(test_labels) == 0:
        raise DsslError(
            f"there are {len(test_features)} test features and {len(test_labels)} labels: expected equal numbers, at least 1"
        )
    (predicted,) = knn_predict(
        train_features, train_labels, test_features, k=[k], temperature=temperature, classes=classes, device=device
    )
    return int((predicted == test_labels.to(predicted.device)).sum()) / len(test_labels)


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row and their columns, largest first: ``topk``, with less to sort where k is a small part.

    The columns are split into groups. The largest are all in the k groups with the largest maxima, since any other group has
    k groups, and so k values, ahead of it.
    """
    rows, width = values.shape
    depth = isqrt(width // k)  # as much to sort among the maxima as among the members of the groups that are left
    if depth < 2:
        return values.topk(k, dim=1)
    groups = width // depth
    body, rest = values[:, : depth * groups].view(rows, depth, groups), values[:, depth * groups :]
    chosen = body.amax(dim=1).topk(k, dim=1, sorted=False).indices
    members = body.gather(2, chosen[:, None].expand(-1, depth, -1)).flatten(1)
    best, place = torch.cat([members, rest], dim=1).topk(k, dim=1)
    of_group = place // k * groups + chosen.gather(1, place % k)
    return best, torch.where(place < depth * k, of_group, place - depth * k + depth * groups)


def _normalised(features: Tensor) -> Tensor:
    precise = features if features.dtype == torch.float64 else features.float()
    return F.normalize(precise, dim=1)


def _check(train: Tensor, test: Tensor, *, k: int, rows: int) -> None:
    if k < 1:
        raise DsslError(f"k is {k}: expected at least 1 neighbour")
    if len(train) == 0 or len(test) == 0:
        raise DsslError(f"kNN needs at least one training and one test image, not {len(train)} and {len(test)}")
    if train.dim() != 2 or test.dim() != 2 or train.shape[1] != test.shape[1]:
        raise DsslError(
            f"features of shapes {tuple(train.shape)} and {tuple(test.shape)} cannot be compared: expected rows of one length"
        )
    for name, features in (("training", train), ("test", test)):
        if not all(bool(torch.isfinite(features[at : at + rows]).all()) for at in range(0, len(features), rows)):
            raise DsslError(
                f"the {name} features contain NaN or infinite values: the encoder is broken; check its training"
            )
