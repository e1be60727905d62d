"""Quality of features without labels: effective rank, alignment, uniformity, spread."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import rng
from dssl.augment import ViewMaker
from dssl.data import Quarantine, Source, Subset
from dssl.data.loader import Batches
from dssl.graph import View
from dssl.methods.losses import effective_rank, spread
from dssl.models import evaluating, forward
from dssl.weights.encoder import Encoder, Features, FeatureStore

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


def cosine_between(features: Tensor) -> float:
    """The mean cosine of two different rows."""
    unit, count = F.normalize(features, dim=1), len(features)
    return (float(unit.sum(dim=0).square().sum()) - count) / max(1, count * (count - 1))


def retrieval(first: Tensor, second: Tensor) -> float:
    """The share of images of whose first view the nearest second view is their own: 1 / N by chance, 1 at best."""
    nearest = (F.normalize(first.double(), dim=1) @ F.normalize(second.double(), dim=1).T).argmax(dim=1)
    return float((nearest == torch.arange(len(first), device=nearest.device)).double().mean())


def quality(store: FeatureStore, test: Source, *, seed: int, policy: str | None = None) -> Quality:
    """All measures; alignment is over two views by ``policy`` (crop and flip if none is named)."""
    features = store.of(test, allow_unreadable=False).values
    policy = policy or "crop(0.2,1) > flip"
    count = min(SAMPLE, len(test))
    count -= count % min(_BATCH, count)  # whole batches, so that none of the chosen is left over
    chosen = rng.sample(rng.key(seed, "quality"), len(test), count)
    pairs = None
    if count >= 2:

        def views() -> Features:
            values = torch.stack(two_views(store.encoder, Subset(test, chosen), policies=(policy, policy), seed=seed))
            return Features(values=values, rows=chosen)

        pairs = store.kept(test, {"views": [policy, seed, count]}, views).values
    return Quality(
        effective_rank=effective_rank(features),
        dimensions=features.shape[1],
        alignment=None if pairs is None else alignment(pairs[0], pairs[1]),
        uniformity=None if pairs is None else uniformity(features[torch.from_numpy(chosen)]),
        spread=float(spread(features.double())),
        images=len(features),
        pairs=0 if pairs is None else count,
        policy=policy,
    )


def two_views(
    encoder: Encoder, source: Source, *, policies: tuple[str, str], seed: int, quarantine: Quarantine | None = None
) -> tuple[Tensor, Tensor]:
    """The features of two views of each image, by two policies; a few images are left out if batches do not divide them."""
    names = ("one", "two")  # the draws depend on them
    maker = ViewMaker(
        [View(name=name, policy=policy) for name, policy in zip(names, policies, strict=True)],
        size=encoder.image_size,
        seed=seed,
        channels=encoder.channels,
        normalization=encoder.normalization,
    )
    features: dict[str, list[Tensor]] = {name: [] for name in names}
    batch_size = len(source) // math.ceil(len(source) / _BATCH)
    batches = Batches(
        source, maker, batch_size=batch_size, seed=seed, steps=len(source) // batch_size, threads=encoder.threads,
        quarantine=quarantine,
    )  # fmt: skip
    with batches, evaluating(encoder.network):
        for batch in batches:
            for name in names:
                features[name].append(forward(encoder.network, batch.views[name], autocast=encoder.autocast))
    return torch.cat(features["one"]), torch.cat(features["two"])
