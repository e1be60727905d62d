"""Quality of features without labels: effective rank, alignment, uniformity, spread."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import rng
from dssl.augment import Normalization, ViewMaker
from dssl.data import Quarantine, Source, Subset
from dssl.data.loader import Batches
from dssl.evaluation.probe import Problem
from dssl.graph import View
from dssl.methods.losses import effective_rank, spread
from dssl.models import evaluating, forward

if TYPE_CHECKING:
    from dssl.evaluation.protocols import Task

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
    norms = unit.square().sum(dim=1)  # 1, or 0 for a feature of zeros
    count = len(unit)
    total = 0.0
    for start in range(0, count, block):
        part = unit[start : start + block]
        squared = (norms[start : start + block, None] + norms - 2 * part @ unit.T).clamp(min=0)
        total += float((-2 * squared).exp().sum())
    # a row paired with itself has distance zero and does not count
    return math.log((total - count) / (count * (count - 1)))


def retrieval(first: Tensor, second: Tensor) -> float:
    """The share of images of whose first view the nearest second view is their own: 1 / N by chance, 1 at best."""
    nearest = (F.normalize(first.double(), dim=1) @ F.normalize(second.double(), dim=1).T).argmax(dim=1)
    return float((nearest == torch.arange(len(first), device=nearest.device)).double().mean())


class Turned(nn.Module):
    """An encoder of the four quarter turns of an image: their features, one after the other."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.encoder(images.rot90(turns, (2, 3))) for turns in range(4)], dim=1)


def rotation_accuracy(features: Tensor, *, strength: float = 1e-4) -> float:
    """Of ``Turned``: how many turns of the images of the second half a linear probe on the first half gets right.

    The images have been put in random order.
    """
    turned = features.reshape(len(features), 4, -1)
    half = len(turned) // 2
    turns = torch.arange(4).repeat(len(turned), 1)
    probe = Problem(turned[:half].flatten(0, 1), turns[:half].flatten(), classes=4).solve(
        strength, tolerance=2e-5, most=100
    )
    return float((probe.predict(turned[half:].flatten(0, 1)) == turns[half:].flatten()).double().mean())


def quality(task: "Task", *, policy: str | None = None) -> Quality:
    """All measures; alignment is over two views by ``policy`` (crop and flip where none is named)."""
    features = task.store.of(task.test, allow_unreadable=False).values
    policy = policy or "crop(0.2,1) > flip"
    count = min(SAMPLE, len(task.test))
    count -= count % min(_BATCH, count)  # whole batches, so that none of the chosen is left over
    chosen = rng.sample(rng.key(task.seed, "quality"), len(task.test), count)
    loaded, pairs = task.loaded, None
    if len(chosen) >= 2:
        pairs = two_views(
            loaded.encoder, Subset(task.test, chosen), policies=(policy, policy), size=loaded.image_size,
            channels=loaded.channels, normalization=loaded.normalization, seed=task.seed, threads=task.store.threads,
            autocast=task.store.autocast,
        )  # fmt: skip
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


def two_views(
    encoder: nn.Module,
    source: Source,
    *,
    policies: tuple[str, str],
    size: int,
    channels: int,
    normalization: Normalization,
    seed: int,
    threads: int | None,
    autocast: torch.dtype | None,
    quarantine: Quarantine | None = None,
) -> tuple[Tensor, Tensor]:
    """The features of two views of each image, by two policies; a few images are left out where batches do not divide them."""
    names = ("one", "two")
    views = [View(name=name, policy=policy) for name, policy in zip(names, policies, strict=True)]
    maker = ViewMaker(views, size=size, seed=seed, channels=channels, normalization=normalization)
    made: dict[str, list[Tensor]] = {name: [] for name in names}
    batch_size = len(source) // math.ceil(len(source) / _BATCH)
    batches = Batches(source, maker, batch_size=batch_size, seed=seed, epochs=1, threads=threads, quarantine=quarantine)
    with batches, evaluating(encoder):
        for batch in batches:
            for name in names:
                made[name].append(forward(encoder, batch.views[name], autocast=autocast))
    return torch.cat(made["one"]), torch.cat(made["two"])
