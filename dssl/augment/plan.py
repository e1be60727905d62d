"""Plans: the parameters of every view of a batch, drawn as arrays before any pixel is touched."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.augment.operations import Floats
from dssl.augment.policy import Policy
from dssl.augment.primitives import Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to the images ``indices`` in one epoch: a kernel and its numbers for each step of each view."""

    indices: NDArray[np.int64]
    epoch: int
    codes: NDArray[np.int32]
    values: Floats
    custom: bool
    """Whether a custom operation is among the steps."""

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The steps of several views, in the order in which they run, without any numbers yet."""

    names: tuple[str, ...]
    policies: tuple[Policy, ...]
    origins: tuple[int, ...]
    """For each view the position of the view that it is derived from, or -1 for the image."""
    size: int
    offsets: NDArray[np.int64]
    views: NDArray[np.int64]
    """First step, step after the last, and origin of each view."""
    script: NDArray[np.int64]
    numbers: Floats
    operations: Floats
    bounds: NDArray[np.int64]
    """Where the script of each view begins, then where the last one ends."""

    @classmethod
    def of(cls, names: Sequence[str], policies: Sequence[Policy], origins: Sequence[int], *, size: int) -> "Program":
        """Lay out the steps of these views one after the other."""
        widths = [policy.widths() for policy in policies]
        stops = np.cumsum([len(part) for part in widths])
        starts = stops - [len(part) for part in widths]
        flat = [width for part in widths for width in part]
        offsets = np.concatenate([[0], np.cumsum(flat)]).astype(np.int64)
        views = np.stack([starts, stops, np.asarray(origins)], axis=1).astype(np.int64)
        script, bounds = Script(size=size), [0]
        for policy, first in zip(policies, starts.tolist(), strict=True):
            policy.write(script, step=first, slot=0)
            bounds.append(len(script))
        rows, numbers, operations = script.arrays()
        return cls(
            names=tuple(names),
            policies=tuple(policies),
            origins=tuple(origins),
            size=size,
            offsets=offsets,
            views=np.ascontiguousarray(views),
            script=rows,
            numbers=numbers,
            operations=operations,
            bounds=np.array(bounds, np.int64),
        )

    def plan(self, indices: NDArray[np.int64], *, seed: int, epoch: int) -> Plan:
        """Draw every number that these images need; the numbers of an image do not depend on the others."""
        from dssl.augment.kernels.program import load_kernels  # imports numba, which reading policies does not need

        codes = np.zeros((len(indices), len(self.offsets) - 1), np.int32)
        values = np.zeros((len(indices), max(1, int(self.offsets[-1]))))
        streams = np.array([rng.key(seed, "view", epoch, name) for name in self.names], np.uint64)
        own = np.array(indices, np.int64)  # the kernel is compiled for a writable array
        custom = load_kernels().draw(own, streams, self.script, self.numbers, self.operations, self.bounds, self.offsets,
                             self.size, codes, values)  # fmt: skip
        return Plan(indices=indices, epoch=epoch, codes=codes, values=values, custom=custom)
