"""Each operation of a table alone, over its magnitudes: what it looks like and how much it changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dssl.augment import KINDS, SEVERITIES, ViewMaker, parse, show
from dssl.augment.policy import (
    AtMagnitude,
    Chain,
    Corruption,
    Policy,
    RandAugment,
    Resize,
    TrivialAugment,
    UniformAugment,
    named_table,
    parts,
)
from dssl.graph import View
from dssl.report.survey import change, contrast_of_pixels, nearly_flat
from dssl.types import Image

CORRUPTIONS = "corruptions"
"""The table of all kinds of corruption, whose magnitudes are the five severities."""

SHOWN_MAGNITUDES = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStrip:
    """One operation: at each magnitude the mean change over the probes, and its effect on one of them."""

    name: str
    changes: tuple[float, ...]
    images: tuple[Image, ...]
    blank_from: float | None
    """The first magnitude at which at least half of the probes come out nearly flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """The strips of all operations of one table."""

    name: str
    magnitudes: tuple[float, ...]
    operations: tuple[OperationStrip, ...]


def operation_table(name: str, probes: Sequence[Image], *, seed: int) -> OperationTable:
    """Apply every operation of a table to the probes, square and of one size, and show it on the one with most contrast."""
    batch = np.stack(probes)
    shown = int(contrast_of_pixels(batch).argmax())
    magnitudes, operations = _operations(name, channels=batch.shape[3])
    strips = []
    for operation, policies in operations.items():
        views = [
            View(name=f"m{number}", policy=show(Chain((Resize(), policy)))) for number, policy in enumerate(policies)
        ]
        maker = ViewMaker(views, size=batch.shape[1], seed=seed, channels=batch.shape[3])
        out = maker.allocate(len(batch))
        plan = maker.plan(np.arange(len(batch), dtype=np.int64), epoch=0)
        for place, image in enumerate(batch):
            maker.apply_many(plan, place, [image], out, place)
        made = [out[view.name] for view in views]
        changes = tuple(float(change(views_of, batch).mean()) for views_of in made)
        blank = [m for m, views_of in zip(magnitudes, made, strict=True) if nearly_flat(views_of).mean() >= 0.5]
        strips.append(
            OperationStrip(
                name=operation,
                changes=changes,
                images=tuple(views_of[shown] for views_of in made),
                blank_from=min(blank, default=None),
            )
        )
    return OperationTable(name=name, magnitudes=magnitudes, operations=tuple(strips))


def _operations(name: str, *, channels: int) -> tuple[tuple[float, ...], dict[str, list[Policy]]]:
    """The magnitudes that are shown, or severities, and each operation of a table at all of them."""
    if name == CORRUPTIONS:
        kinds = [kind.name for kind in KINDS.values() if channels in (1, 3) or not kind.needs_colour]
        return SEVERITIES, {kind: [Corruption(kind, severity) for severity in SEVERITIES] for kind in kinds}
    names = [row.operation for row in named_table(name)]
    return SHOWN_MAGNITUDES, {
        operation: [AtMagnitude(operation, magnitude, name) for magnitude in SHOWN_MAGNITUDES] for operation in names
    }


def tables_of(policies: Sequence[str]) -> tuple[str, ...]:
    """The tables from which the policies draw at a chosen magnitude, or else all their tables; corruptions if there are any."""
    found = [part for text in policies for part in parts(parse(text))]
    chosen = [part.table for part in found if isinstance(part, RandAugment | AtMagnitude)]
    drawn = [part.table for part in found if isinstance(part, UniformAugment | TrivialAugment)]
    corruptions = [CORRUPTIONS for part in found if isinstance(part, Corruption)]
    return tuple(dict.fromkeys([*(chosen or drawn), *corruptions]))
