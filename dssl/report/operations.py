"""Each operation of a table alone, over its magnitudes: what it looks like and how much it changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dssl.augment import ViewMaker, parse, show
from dssl.augment.policy import (
    AtMagnitude,
    Chain,
    Choose,
    Maybe,
    Policy,
    RandAugment,
    Resize,
    TrivialAugment,
    UniformAugment,
    table,
)
from dssl.graph import View
from dssl.report import strength
from dssl.report.trend import Trend, trend
from dssl.types import Image

MAGNITUDES = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStrip:
    """One operation: at each magnitude the mean change over the probes, and what it makes of one of them."""

    name: str
    changes: tuple[float, ...]
    images: tuple[Image, ...]
    trend: Trend
    blank_from: float | None
    """The first magnitude at which at least half of the probes come out nearly flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """The strips of all operations of one table."""

    name: str
    magnitudes: tuple[float, ...]
    operations: tuple[OperationStrip, ...]


def operation_table(name: str, probes: Sequence[Image], *, seed: int) -> OperationTable:
    """Apply every operation of a table to the probes, which are square and of one size, and show it on the liveliest of them."""
    batch = np.stack(probes)
    shown = int(strength.spread(batch).argmax())
    strips = []
    for row in table(name):
        views = [
            View(name=f"m{number}", policy=show(Chain((Resize(), AtMagnitude(row.operation, magnitude, name)))))
            for number, magnitude in enumerate(MAGNITUDES)
        ]
        maker = ViewMaker(views, size=batch.shape[1], seed=seed, channels=batch.shape[3])
        out = maker.allocate(len(batch))
        plan = maker.plan(np.arange(len(batch), dtype=np.int64), epoch=0)
        for place, image in enumerate(batch):
            maker.apply(plan, place, image, out, place)
        changes = tuple(float(strength.change(out[view.name], batch).mean()) for view in views)
        images = tuple(out[view.name][shown] for view in views)
        blank = [
            m for m, view in zip(MAGNITUDES, views, strict=True) if strength.nearly_flat(out[view.name]).mean() >= 0.5
        ]
        strips.append(
            OperationStrip(
                name=row.operation,
                changes=changes,
                images=images,
                trend=trend(MAGNITUDES, changes),
                blank_from=min(blank, default=None),
            )
        )
    return OperationTable(name=name, magnitudes=MAGNITUDES, operations=tuple(strips))


def tables_of(policies: Sequence[str]) -> tuple[str, ...]:
    """The tables from which the policies draw at a magnitude that someone chose; without such, all their tables."""
    parts = [part for text in policies for part in _parts(parse(text))]
    chosen = [part.table for part in parts if isinstance(part, RandAugment | AtMagnitude)]
    drawn = [part.table for part in parts if isinstance(part, UniformAugment | TrivialAugment)]
    return tuple(dict.fromkeys(chosen or drawn))


def known_table(name: str) -> str:
    """The name itself; refuses one that no table has."""
    table(name)
    return name


def _parts(policy: Policy) -> Iterator[Policy]:
    """A policy and all policies inside it."""
    yield policy
    inside: Sequence[Policy] = ()
    if isinstance(policy, Chain):
        inside = policy.steps
    elif isinstance(policy, Choose):
        inside = policy.policies
    elif isinstance(policy, Maybe):
        inside = (policy.policy,)
    for part in inside:
        yield from _parts(part)
