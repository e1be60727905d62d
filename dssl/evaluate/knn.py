"""Weighted k-nearest-neighbour classification: cosine similarity, votes of weight exp(similarity / temperature)."""

from collections.abc import Iterator, Sequence
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl.errors import DsslError

_BLOCK, _TRAIN_BLOCK = 512, 65_536
"""Test and training rows that are compared at a time: 134 MB of similarities."""


@torch.no_grad()
def neighbours(
    train_features: Tensor, test_features: Tensor, *, k: int, block: int = _BLOCK, train_block: int = _TRAIN_BLOCK
) -> tuple[Tensor, Tensor]:
    """Cosine similarities and indices of the ``k`` nearest training rows of each test row, nearest first: M x k each.

    Features need not be normalised. At most ``block`` x ``train_block`` similarities exist at a time. With fewer than
    ``k`` training rows all of them are neighbours.
    """
    _check(train_features, test_features, k=k)
    k = min(k, len(train_features))
    train = _normalised(train_features)
    similarities = torch.empty(len(test_features), k, dtype=train.dtype, device=train.device)
    indices = torch.empty(len(test_features), k, dtype=torch.int64, device=train.device)
    # one piece of memory for all blocks: to be given a new one costs more than to choose the neighbours
    room = train.new_empty(min(block, len(test_features)) * min(train_block, len(train)))
    for start in range(0, len(test_features), block):
        test = _normalised(test_features[start : start + block].to(train.device))
        blocks = _per_train_block(train, test, room, k=k, train_block=train_block)
        best, place = next(blocks)
        for value, index in blocks:
            best, order = torch.cat([best, value], dim=1).topk(min(k, best.shape[1] + value.shape[1]), dim=1)
            place = torch.cat([place, index], dim=1).gather(1, order)
        similarities[start : start + block], indices[start : start + block] = best, place
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
    k: int | Sequence[int],
    temperature: float,
    classes: int,
    block: int = _BLOCK,
) -> Tensor | list[Tensor]:
    """Predicted classes of the test rows; a list of predictions for several ``k``, which share one search."""
    if len(train_labels) != len(train_features):
        raise DsslError(
            f"there are {len(train_features)} training features and {len(train_labels)} labels: expected equal numbers"
        )
    counts = [k] if isinstance(k, int) else list(k)
    similarities, indices = neighbours(train_features, test_features, k=max(counts), block=block)
    labels = train_labels.to(indices.device)[indices]
    predictions = [
        vote(similarities[:, :count], labels[:, :count], temperature=temperature, classes=classes) for count in counts
    ]
    return predictions[0] if isinstance(k, int) else predictions


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: int,
    temperature: float,
    classes: int,
    block: int = _BLOCK,
) -> float:
    """The share of test rows that get their own label, from 0 to 1; with fewer than ``k`` training rows all of them vote."""
    if len(test_labels) != len(test_features) or len(test_labels) == 0:
        raise DsslError(
            f"there are {len(test_features)} test features and {len(test_labels)} labels: expected equal numbers, at least 1"
        )
    predicted = knn_predict(
        train_features, train_labels, test_features, k=k, temperature=temperature, classes=classes, block=block
    )
    assert isinstance(predicted, Tensor)
    return int((predicted == test_labels.to(predicted.device)).sum()) / len(test_labels)


def _per_train_block(
    train: Tensor, test: Tensor, room: Tensor, *, k: int, train_block: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(train), train_block):
        part = train[start : start + train_block]
        found = room[: len(test) * len(part)].view(len(test), len(part))
        value, index = largest(torch.mm(test, part.T, out=found), min(k, len(part)))
        yield value, index + start


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row and their columns, largest first: ``topk``, with less to sort where k is a small part.

    The columns are dealt out to groups. The largest are all in the k groups with the largest maxima, since each of the others
    has k groups, and so k values, before it.
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


def _check(train: Tensor, test: Tensor, *, k: int) -> None:
    if k < 1:
        raise DsslError(f"k is {k}: expected at least 1 neighbour")
    if len(train) == 0 or len(test) == 0:
        raise DsslError(f"kNN needs at least one training and one test image, not {len(train)} and {len(test)}")
    if train.dim() != 2 or test.dim() != 2 or train.shape[1] != test.shape[1]:
        raise DsslError(
            f"features of shapes {tuple(train.shape)} and {tuple(test.shape)} cannot be compared: expected rows of one length"
        )
    for name, features in (("training", train), ("test", test)):
        if not bool(torch.isfinite(features).all()):
            raise DsslError(
                f"the {name} features hold NaN or infinite values: the encoder is broken; check its training"
            )
