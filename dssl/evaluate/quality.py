"""Quality of features without labels: effective rank, alignment, uniformity, spread."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import rng
from dssl.augment import ViewMaker
from dssl.data import Subset
from dssl.data.loader import Batches
from dssl.graph import View
from dssl.methods.losses import effective_rank, spread
from dssl.models import evaluating, forward

if TYPE_CHECKING:
    from dssl.evaluate.protocols import Task

SAMPLE, _BATCH = 2_048, 256
"""Images on which pairs are compared, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Measures of the test features that need no labels; all but the rank are of unit vectors."""

    effective_rank: float
    """RankMe: exp of the entropy of the singular values; from 1 (collapsed) to ``dimensions``."""
    dimensions: int
    alignment: float | None
    """Mean squared distance of two views of an image: 0 is invariant, 2 is unrelated; None with one image."""
    uniformity: float | None
    """log of the mean of exp(-2 squared distance) over pairs: 0 is collapsed, lower is more even; None with one image."""
    spread: float
    """Deviation of the coordinates times sqrt(dimensions): 1 is healthy, 0 is collapsed."""
    images: int
    """Images that the rank and the spread were measured on."""
    pairs: int
    """Images that alignment and uniformity were measured on."""
    policy: str
    """The policy of the two views."""


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance between the normalised features of two views."""
    return float((F.normalize(first.double(), dim=1) - F.normalize(second.double(), dim=1)).square().sum(dim=1).mean())


def uniformity(features: Tensor, *, block: int = 512) -> float:
    """Wang and Isola's: log of the mean over all pairs of different rows of exp(-2 squared distance)."""
    unit = F.normalize(features.double(), dim=1)
    count = len(unit)
    total = 0.0
    for start in range(0, count, block):
        part = unit[start : start + block]
        squared = (2 - 2 * part @ unit.T).clamp(min=0)
        total += float((-2 * squared).exp().sum())
    # a row paired with itself has distance zero and does not count
    return math.log((total - count) / (count * (count - 1)))


def quality(task: "Task", *, policy: str | None = None) -> Quality:
    """All measures; alignment is over two views by ``policy`` (crop and flip where none is named)."""
    features = task.store.of(task.test, allow_unreadable=False).values
    policy = policy or "crop(0.2,1) > flip"
    count = min(SAMPLE, len(task.test))
    count -= count % min(_BATCH, count)  # whole batches, so that none of the chosen is left over
    chosen = np.sort(rng.permutation(rng.key(task.seed, "quality"), len(task.test))[:count])
    pairs = _two_views(task, chosen, policy) if len(chosen) >= 2 else None
    return Quality(
        effective_rank=effective_rank(features),
        dimensions=features.shape[1],
        alignment=None if pairs is None else alignment(*pairs),
        uniformity=None if pairs is None else uniformity(features[torch.from_numpy(chosen)]),
        spread=float(spread(features.double())),
        images=len(features),
        pairs=0 if pairs is None else len(chosen),
        policy=policy,
    )


def _two_views(task: "Task", chosen: "np.typing.NDArray[np.int64]", policy: str) -> tuple[Tensor, Tensor]:
    maker = ViewMaker(
        [View(name="one", policy=policy), View(name="two", policy=policy)],
        size=task.loaded.image_size,
        seed=task.seed,
        channels=task.loaded.channels,
        normalization=task.loaded.normalization,
    )
    source = Subset(task.test, chosen)
    one: list[Tensor] = []
    two: list[Tensor] = []
    batches = Batches(
        source, maker, batch_size=min(_BATCH, len(source)), seed=task.seed, epochs=1, threads=task.store.threads
    )
    with batches, evaluating(task.loaded.encoder):
        for batch in batches:
            one.append(forward(task.loaded.encoder, batch.views["one"], autocast=task.store.autocast))
            two.append(forward(task.loaded.encoder, batch.views["two"], autocast=task.store.autocast))
    return torch.cat(one), torch.cat(two)
