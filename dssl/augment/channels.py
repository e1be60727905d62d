"""Which policies are defined for images whose channels are not colours: all but those that mix or turn colours."""

import dataclasses

from dssl.augment.kinds import KINDS
from dssl.augment.operations import OPERATIONS
from dssl.augment.policy import Chain, Choose, Corruption, Maybe, Policy
from dssl.augment.primitives import Jitter, Single
from dssl.augment.randaugment import AtMagnitude, RandAugment, TrivialAugment, UniformAugment, named_table
from dssl.augment.tables import COLOURLESS
from dssl.augment.text import show
from dssl.errors import DsslError

_NOTHING = Single("identity", 0)


def check_channels(policy: Policy, channels: int) -> None:
    """Refuse a policy that needs red, green and blue for images of other channels, and name the one to use instead."""
    if channels in (1, 3):
        return
    what = colour_operation(policy)
    if what is not None:
        raise DsslError(
            f"policy {show(policy)!r} uses {what}, which needs colour, and the images have {channels} channels: "
            f"use {show(without_colour(policy))!r}"
        )


def colour_operation(policy: Policy) -> str | None:
    """The first part of a policy that needs red, green and blue; None where all of it is defined for any channels."""
    match policy:
        case Chain():
            return next(filter(None, map(colour_operation, policy.steps)), None)
        case Choose():
            return next(filter(None, map(colour_operation, policy.policies)), None)
        case Maybe():
            return colour_operation(policy.policy)
        case Jitter():
            return "the saturation of jitter" if policy.saturation else "the hue of jitter" if policy.hue else None
        case Single() | AtMagnitude():
            return policy.operation if OPERATIONS[policy.operation].needs_colour else None
        case Corruption():
            return show(policy) if KINDS[policy.kind].needs_colour else None
        case RandAugment() | UniformAugment() | TrivialAugment():
            found = (row.operation for row in named_table(policy.table) if OPERATIONS[row.operation].needs_colour)
            return next((f"{name} of the table {policy.table}" for name in found), None)
        case _:
            return None


def without_colour(policy: Policy) -> Policy:
    """The policy without the operations that need red, green and blue."""
    if colour_operation(policy) is None:
        return policy
    match policy:
        case Chain():
            steps = [step for step in map(without_colour, policy.steps) if step != _NOTHING]
            return Chain(tuple(steps)) if len(steps) > 1 else steps[0] if steps else _NOTHING
        case Choose():
            return dataclasses.replace(policy, policies=tuple(map(without_colour, policy.policies)))
        case Maybe():
            inside = without_colour(policy.policy)
            return _NOTHING if inside == _NOTHING else dataclasses.replace(policy, policy=inside)
        case Jitter():
            return dataclasses.replace(policy, saturation=0.0, hue=0.0)
        case RandAugment() | UniformAugment() | TrivialAugment():
            return dataclasses.replace(policy, table=COLOURLESS[policy.table])
        case _:
            return _NOTHING
