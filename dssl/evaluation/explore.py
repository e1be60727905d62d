"""What images show without labels: their neighbours, near-duplicates, outliers, and clusters with their medoids."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dssl import rng
from dssl.errors import DsslError
from dssl.evaluation.knn import neighbours

NEAREST = 10
"""Neighbours of each image, at most."""
CLOSE = 0.2
"""Near-duplicates are closer than this share of the median distance to the last of these neighbours."""
_SAME = 1e-5
"""Cosine distance within which two features are equal, up to rounding."""
_ITERATIONS, _SEEDING, _BLOCK = 25, 20_000, 8_192
"""Of Lloyd's algorithm at most; images among which it starts; rows that are compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Every number is a row of the features, every array has an entry for each row unless it says otherwise."""

    nearest: NDArray[np.int64]
    """The nearest other rows, nearest first: N x k."""
    similarity: NDArray[np.float32]
    """Their cosines."""
    threshold: float
    """The cosine from which on two images are near-duplicates."""
    duplicates: tuple[NDArray[np.int64], ...]
    """Groups that near-duplicates connect, the largest first."""
    cluster: NDArray[np.int64]
    """Cluster 0 is the largest."""
    members: tuple[NDArray[np.int64], ...]
    """Of each cluster, the nearest to its centre first: the first is the medoid."""

    @property
    def isolation(self) -> NDArray[np.float32]:
        """The mean cosine distance to the nearest others: large for outliers."""
        mean: NDArray[np.float32] = self.similarity.mean(axis=1)
        return 1 - mean

    @property
    def medoids(self) -> NDArray[np.int64]:
        """One row for each cluster: the member with the least mean distance to the others."""
        return np.array([members[0] for members in self.members], np.int64)


def explore(
    features: Tensor,
    *,
    clusters: int,
    seed: int,
    threshold: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exploration:
    """Compare every row with every other (exactly) and cluster them; ``threshold`` replaces the measured one."""
    if len(features) < 2:
        raise DsslError(f"{len(features)} image: expected at least 2, since images are compared with each other")
    if not 1 <= clusters <= len(features):
        raise DsslError(f"{clusters:,} clusters of {len(features):,} images: expected 1 to {len(features):,}")
    unit = F.normalize(features.float(), dim=1)
    similarity, nearest = nearest_others(unit, k=min(NEAREST, len(unit) - 1), progress=progress)
    if threshold is None:
        # how far apart neighbours are depends on the encoder and the images; the last one is no copy even if all have some
        threshold = 1 - max(CLOSE * float(np.median(1 - similarity[:, -1])), _SAME)
    close = similarity >= threshold
    pairs = np.stack([np.nonzero(close)[0], nearest[close]])
    members = k_means(unit, clusters, seed=seed)
    cluster = np.empty(len(unit), np.int64)
    for number, rows in enumerate(members):
        cluster[rows] = number
    return Exploration(
        nearest=nearest, similarity=similarity, threshold=threshold, duplicates=connected(len(unit), pairs),
        cluster=cluster, members=members,
    )  # fmt: skip


def nearest_others(
    unit: Tensor, *, k: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cosines and indices of the ``k`` nearest other rows of each row, nearest first: N x k each."""
    similarity, nearest = np.empty((len(unit), k), np.float32), np.empty((len(unit), k), np.int64)
    for begin in range(0, len(unit), _BLOCK):
        found, places = neighbours(unit, unit[begin : begin + _BLOCK], k=k + 1)
        others = places != torch.arange(begin, begin + len(places))[:, None]
        others[others.all(dim=1), -1] = False  # more than k copies of this row are ahead of it
        similarity[begin : begin + len(places)] = found[others].view(-1, k)
        nearest[begin : begin + len(places)] = places[others].view(-1, k)
        progress(begin + len(places), len(unit))
    return similarity, nearest


def connected(count: int, pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """The groups of more than one among 0 .. count-1 that pairs (2 x M) connect, the largest first."""
    group = np.arange(count)
    while True:
        lowest = group.copy()
        for one, other in (pairs, pairs[::-1]):
            np.minimum.at(lowest, group[one], group[other])
            np.minimum.at(lowest, one, group[other])
        lowest = lowest[lowest]
        if np.array_equal(lowest, group):
            break
        group = lowest
    return tuple(rows for rows in _by_size(group) if len(rows) > 1)


def k_means(unit: Tensor, clusters: int, *, seed: int) -> tuple[NDArray[np.int64], ...]:
    """The rows of each cluster by spherical k-means, the largest cluster first, in each the nearest to the centre first.

    No cluster is empty. For vectors of length one the nearest to the mean has the least mean squared distance to the
    members, so that it is the medoid.
    """
    centres = _start(unit, clusters, seed=seed)
    before = None
    for _ in range(_ITERATIONS):
        similarity, cluster = _assign(unit, centres)
        if before is not None and np.array_equal(cluster, before):
            break
        before = cluster
        sums = torch.zeros_like(centres).index_add_(0, torch.from_numpy(cluster), unit)
        centres = F.normalize(sums, dim=1)
    owner = torch.from_numpy(cluster)
    for begin in range(0, len(unit), _BLOCK):  # to the means of the last assignment
        rows = slice(begin, begin + _BLOCK)
        similarity[rows] = (unit[rows] * centres[owner[rows]]).sum(dim=1).numpy()
    return tuple(rows[np.argsort(-similarity[rows], kind="stable")] for rows in _by_size(cluster))


def _start(unit: Tensor, clusters: int, *, seed: int) -> Tensor:
    """Of k-means++: rows far from each other, drawn by their squared distance to those before."""
    stream = rng.key(seed, "clusters")
    sample = unit[torch.from_numpy(rng.sample(stream, len(unit), max(_SEEDING, 4 * clusters)))]
    draws = rng.uniforms(stream, np.arange(clusters, dtype=np.int64), 1)[:, 0]
    chosen = [int(draws[0] * len(sample))]
    distance = torch.full((len(sample),), torch.inf, dtype=torch.float64)
    for draw in draws[1:]:
        distance = torch.minimum(distance, (1 - sample @ sample[chosen[-1]]).clamp(min=0).double())
        total = distance.cumsum(0)
        chosen.append(min(int(torch.searchsorted(total, draw * total[-1], right=True)), len(sample) - 1))
    return sample[chosen]


def _assign(unit: Tensor, centres: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The cosine to the nearest centre of each row, and its number; an empty cluster gets a row that fits its own worst."""
    parts = [(unit[begin : begin + _BLOCK] @ centres.T).max(dim=1) for begin in range(0, len(unit), _BLOCK)]
    similarity = torch.cat([part.values for part in parts]).numpy()
    cluster = torch.cat([part.indices for part in parts]).numpy()
    sizes = np.bincount(cluster, minlength=len(centres))
    worst = iter(np.argsort(similarity, kind="stable"))
    for empty in np.flatnonzero(sizes == 0):
        row = next(row for row in worst if sizes[cluster[row]] > 1)
        sizes[cluster[row]] -= 1
        cluster[row], sizes[empty] = empty, 1
    return similarity, cluster


def _by_size(group: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows of each group, the largest group first."""
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    return sorted(parts, key=len, reverse=True)
