"""Policies: steps one after the other, maybe, or one of several; each decision is drawn per image."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dssl.augment.operations import Floats
from dssl.augment.primitives import Blur, Crop, Flags, Flip, Jigsaw, Jitter, Resize, Sheet, Single, check_number
from dssl.augment.randaugment import AtMagnitude, RandAugment, TrivialAugment, UniformAugment, table
from dssl.errors import DsslError

__all__ = [
    "AtMagnitude",
    "Blur",
    "Chain",
    "Choose",
    "Crop",
    "Flip",
    "Jigsaw",
    "Jitter",
    "Maybe",
    "Policy",
    "RandAugment",
    "Resize",
    "Single",
    "TrivialAugment",
    "UniformAugment",
    "sizing",
    "table",
]


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    steps: tuple["Policy", ...]

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise DsslError("a chain needs at least two policies")

    def widths(self) -> tuple[int, ...]:
        return tuple(width for step in self.steps for width in step.widths())

    def slots(self) -> int:
        return sum(step.slots() for step in self.steps)

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        used = 0
        for policy in self.steps:
            policy.draw(draws[:, used : used + policy.slots()], sheet, step, active)
            used += policy.slots()
            step += len(policy.widths())


@dataclass(frozen=True, slots=True)
class Maybe:
    """A policy that happens with a probability, drawn per image."""

    policy: "Policy"
    probability: float

    def __post_init__(self) -> None:
        check_number("a probability", self.probability, 0, 1)

    def widths(self) -> tuple[int, ...]:
        return self.policy.widths()

    def slots(self) -> int:
        return 1 + self.policy.slots()

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        self.policy.draw(draws[:, 1:], sheet, step, active & (draws[:, 0] < self.probability))


@dataclass(frozen=True, slots=True)
class Choose:
    """One of several policies, drawn per image with probability weight / sum of weights."""

    weights: tuple[float, ...]
    policies: tuple["Policy", ...]

    def __post_init__(self) -> None:
        if len(self.policies) < 2 or len(self.weights) != len(self.policies):
            raise DsslError("a choice needs at least two policies and as many weights")
        for weight in self.weights:
            check_number("a weight", weight, 0, 1e6)
        if not 0 < math.fsum(self.weights) < math.inf:
            raise DsslError("the weights of a choice are all zero; at least one must be positive")

    def widths(self) -> tuple[int, ...]:
        columns = itertools.zip_longest(*(policy.widths() for policy in self.policies), fillvalue=0)
        return tuple(max(column) for column in columns)

    def slots(self) -> int:
        return 1 + max(policy.slots() for policy in self.policies)

    def draw(self, draws: Floats, sheet: Sheet, step: int, active: Flags) -> None:
        edges = np.cumsum(self.weights) / math.fsum(self.weights)
        edges[-1] = 1.0
        chosen = np.searchsorted(edges, draws[:, 0], side="right")
        for index, policy in enumerate(self.policies):
            policy.draw(draws[:, 1 : 1 + policy.slots()], sheet, step, active & (chosen == index))


Policy: TypeAlias = (
    Crop | Resize | Flip | Jitter | Blur | Jigsaw | Single
    | RandAugment | UniformAugment | TrivialAugment | AtMagnitude
    | Chain | Maybe | Choose
)  # fmt: skip

Sizing: TypeAlias = Literal["first", "never", "unsure"]


def sizing(policy: Policy) -> Sizing:
    """Whether a policy begins by bringing any image to the size of the views."""
    if isinstance(policy, Crop | Resize):
        return "first"
    if isinstance(policy, Chain):
        kinds = [sizing(step) for step in policy.steps]
        return "first" if kinds[0] == "first" else ("never" if set(kinds) == {"never"} else "unsure")
    if isinstance(policy, Choose):
        kinds = [sizing(branch) for branch in policy.policies]
        return kinds[0] if len(set(kinds)) == 1 else "unsure"
    if isinstance(policy, Maybe):
        return "never" if sizing(policy.policy) == "never" else "unsure"
    return "never"
