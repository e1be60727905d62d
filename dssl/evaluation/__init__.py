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
    """The 95% interval of a share (Wilson's score), from 0 to 1; valid also for one image, or when none is right."""
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
        """95%, in percent."""
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
