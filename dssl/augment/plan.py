"""Plans: the parameters of every view of a batch, drawn as arrays before any pixel is touched."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.augment.kernels.codes import CUSTOM
from dssl.augment.operations import Floats
from dssl.augment.policy import Policy
from dssl.augment.primitives import Sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to the images ``indices`` in one epoch: a kernel and its numbers for each step of each view."""

    indices: NDArray[np.int64]
    epoch: int
    codes: NDArray[np.int32]
    values: Floats
    custom: bool
    """Whether an operation of one's own is among the steps."""

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

    @classmethod
    def of(cls, names: Sequence[str], policies: Sequence[Policy], origins: Sequence[int], *, size: int) -> "Program":
        """Lays out the steps of these views one after the other."""
        widths = [policy.widths() for policy in policies]
        stops = np.cumsum([len(part) for part in widths])
        starts = stops - [len(part) for part in widths]
        flat = [width for part in widths for width in part]
        offsets = np.concatenate([[0], np.cumsum(flat)]).astype(np.int64)
        views = np.stack([starts, stops, np.asarray(origins)], axis=1).astype(np.int64)
        return cls(
            names=tuple(names),
            policies=tuple(policies),
            origins=tuple(origins),
            size=size,
            offsets=offsets,
            views=np.ascontiguousarray(views),
        )

    def plan(self, indices: NDArray[np.int64], *, seed: int, epoch: int) -> Plan:
        """Draws every number that these images need; the numbers of an image do not depend on the others."""
        codes = np.zeros((len(indices), len(self.offsets) - 1), np.int32)
        values = np.zeros((len(indices), max(1, int(self.offsets[-1]))))
        sheet = Sheet(codes=codes, values=values, offsets=self.offsets, size=self.size)
        active = np.ones(len(indices), np.bool_)
        for name, policy, first in zip(self.names, self.policies, self.views[:, 0], strict=True):
            draws = rng.uniforms(rng.key(seed, "view", epoch, name), indices, policy.slots())
            policy.draw(draws, sheet, int(first), active)
        return Plan(indices=indices, epoch=epoch, codes=codes, values=values, custom=bool((codes == CUSTOM).any()))
