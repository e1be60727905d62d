"""Evaluation you can trust: every number with its protocol, every sample counted, the backbone verified frozen."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dssl.errors import DsslError
from dssl.weights.encoder import weights_hash

_NORMAL_95 = 1.959963984540054


def wilson(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score), from 0 to 1; valid also for one image, or when none is right."""
    if not 0 <= correct <= total or total < 1:
        raise DsslError(f"{correct} correct of {total}: expected a count from 0 to the total, which is at least 1")
    share, z2 = correct / total, _NORMAL_95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _NORMAL_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    low = 0.0 if correct == 0 else max(0.0, middle - half)
    return low, 1.0 if correct == total else min(1.0, middle + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Top-1 accuracy on a whole test set under one protocol."""

    name: str
    correct: int
    total: int
    protocol: dict[str, Any]
    predicted: Tensor | None = field(default=None, repr=False, compare=False)
    """The class of every test image, in order; None where only their number is known."""

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, in percent."""
        low, high = wilson(self.correct, self.total)
        return 100 * low, 100 * high

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "name": self.name,
            "accuracy": self.accuracy,
            "interval_95": list(self.interval),
            "correct": self.correct,
            "total": self.total,
            "protocol": self.protocol,
        }


def count_correct(predicted: Tensor, labels: Tensor) -> int:
    """The number of correct predictions; there must be one for each label."""
    if predicted.shape != labels.shape:
        raise DsslError(f"{len(predicted)} predictions for {len(labels)} test images: samples were dropped or repeated")
    return int((predicted.cpu() == labels.cpu()).sum())


@contextmanager
def frozen(network: nn.Module) -> Iterator[str]:
    """Hash the weights before and after; if they differ, what was measured is invalid. Gives the hash."""
    before = weights_hash(network)
    yield before
    if weights_hash(network) != before:
        raise DsslError(
            "the backbone changed while it was evaluated (its weights or running statistics have another hash): "
            "it was not frozen, so the number is invalid"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Published numbers from one source under one protocol."""

    data: str
    kind: str
    """The family of protocols with which it may be compared: linear, knn or supervised."""
    encoder: str
    where: str
    protocol: str
    accuracies: tuple[tuple[str, float], ...]
    """Method and top-1 accuracy in percent."""


_PAPER = "Bai et al., CVPR 2022 (DSSL)"
_SIMSIAM = "Chen and He, CVPR 2021 (SimSiam)"
_MAXIMUM = "maximum of kNN over the epochs, so not comparable with a last-epoch number"

REFERENCES: tuple[Reference, ...] = (
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where=_PAPER,
        protocol="800 epochs, batch 512; its code picks the epoch on the test set and drops the last test batch",
        accuracies=(
            ("simclr", 91.5), ("byol", 92.2), ("simsiam", 92.1),
            ("simclr dssl", 93.2), ("byol dssl", 94.7), ("simsiam dssl", 94.5),
        ),
    ),
    Reference(
        data="imagenet", kind="linear", encoder="resnet50", where=_PAPER,
        protocol="100 epochs, batch 512; linear classifier of 90 epochs, centre crop 224",
        accuracies=(
            ("simclr", 59.5), ("byol", 67.8), ("simsiam", 67.4),
            ("simclr dssl", 60.3), ("byol dssl", 68.3), ("simsiam dssl", 68.6),
        ),
    ),
    Reference(
        data="cifar10", kind="supervised", encoder="resnet18-cifar", where=_PAPER, protocol="settings not given",
        accuracies=(("supervised", 93.02),),
    ),
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where=_SIMSIAM, protocol="800 epochs",
        accuracies=(("simclr", 91.1), ("simsiam", 91.8)),
    ),
    Reference(
        data="cifar10", kind="knn", encoder="resnet18-cifar", where="lightly's documentation",
        protocol=f"200 epochs, batch 128; {_MAXIMUM}",
        accuracies=(("simclr", 84.7), ("byol", 86.9), ("simsiam", 81.9)),
    ),
    Reference(
        data="cifar10", kind="knn", encoder="resnet18-cifar", where="lightly's documentation",
        protocol=f"800 epochs, batch 512; {_MAXIMUM}",
        accuracies=(("simclr", 87.9), ("byol", 91.0), ("simsiam", 90.4)),
    ),
    Reference(
        data="cifar10", kind="linear", encoder="resnet18-cifar", where="solo-learn's documentation",
        protocol="1000 epochs; online linear classifier, trained along with the encoder",
        accuracies=(("simclr", 90.7), ("byol", 92.6), ("simsiam", 90.5)),
    ),
)  # fmt: skip


def references_for(*, data: str, kinds: set[str]) -> list[Reference]:
    """The published numbers for a data set (cifar10, imagenet) and kinds of protocols; none for other data."""
    return [reference for reference in REFERENCES if reference.data == data and reference.kind in kinds]
