"""Policies: a chain of steps, a step with a probability, or one of several; each decision is drawn per image."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dssl.augment.kernels import codes as code
from dssl.augment.kinds import Corruption
from dssl.augment.primitives import Blur, Crop, Flip, Jigsaw, Jitter, Resize, Script, Single, check_number
from dssl.augment.randaugment import AtMagnitude, RandAugment, TrivialAugment, UniformAugment, named_table
from dssl.errors import DsslError

__all__ = [
    "AtMagnitude", "Blur", "Chain", "Choose", "Corruption", "Crop", "Flip", "Jigsaw", "Jitter", "Maybe", "Policy", "RandAugment",
    "Resize", "Single", "TrivialAugment", "UniformAugment", "named_table", "parts", "sizing",
]  # fmt: skip


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

    def write(self, script: Script, *, step: int, slot: int) -> None:
        for policy in self.steps:
            policy.write(script, step=step, slot=slot)
            slot += policy.slots()
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

    def write(self, script: Script, *, step: int, slot: int) -> None:
        with script.only_if(code.GO_BELOW, slot=slot, number=self.probability):
            self.policy.write(script, step=step, slot=slot + 1)


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

    def write(self, script: Script, *, step: int, slot: int) -> None:
        edges = np.cumsum(self.weights) / math.fsum(self.weights)
        edges[-1] = 1.0
        leaps = []
        for edge, policy in zip(edges.tolist(), self.policies, strict=True):  # the first edge above the draw is it
            with script.only_if(code.GO_BELOW, slot=slot, number=edge):
                policy.write(script, step=step, slot=slot + 1)
                leaps.append(script.add(code.GO))
        for leap in leaps:
            script.lead_here(leap)


Policy: TypeAlias = (
    Crop | Resize | Flip | Jitter | Blur | Jigsaw | Single | Corruption
    | RandAugment | UniformAugment | TrivialAugment | AtMagnitude
    | Chain | Maybe | Choose
)  # fmt: skip


def parts(policy: Policy) -> Iterator[Policy]:
    """A policy and all policies inside it."""
    yield policy
    match policy:
        case Chain():
            inside = policy.steps
        case Choose():
            inside = policy.policies
        case Maybe():
            inside = (policy.policy,)
        case _:
            inside = ()
    for part in inside:
        yield from parts(part)


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
