"""Pictures of an embedding: images in the plane by their features, the neighbours of some, and the maps of runs."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor

from dssl import rng
from dssl.data import Quarantine, Subset
from dssl.errors import DsslError
from dssl.evaluation.knn import neighbours
from dssl.report.figures import COLORS
from dssl.report.pictures import to_pillow
from dssl.report.run_data import RunData
from dssl.training.prepare import open_test_data
from dssl.types import Image
from dssl.weights.load import open_weights

CELL = 36
"""Pixels of a side of a cell of the map."""

_Positions = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Positions in the plane, and the name of the method that found them."""

    name: str
    points: _Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """An image and the images nearest to it, by their index in the source, with their similarities."""

    query: int
    nearest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMap:
    """Test images of one run in the plane of the two main axes of their features."""

    run: str
    points: _Positions
    labels: NDArray[np.int64]
    variance: float
    """The share of the features' variance that the plane shows."""


def pca(features: Tensor, *, dimensions: int = 2) -> _Positions:
    """The main axes of the normalised, centred features; signs are fixed, so that the same features give the same map."""
    centred = _centred(features)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    axes = axes[:, -min(dimensions, axes.shape[1]) :].flip(1)
    largest = axes.abs().argmax(dim=0)
    points = centred @ (axes * axes[largest, torch.arange(axes.shape[1])].sign())
    return points.numpy() if points.shape[1] >= 2 else np.pad(points.numpy(), ((0, 0), (0, 1)))


def layouts(features: Tensor, *, seed: int) -> list[Layout]:
    """PCA always; t-SNE where scikit-learn is installed and there are enough images for it."""
    flat = [Layout(name="PCA", points=pca(features))]
    if len(features) < 50:
        return flat
    reduced = pca(features, dimensions=50)
    if not np.isfinite(reduced).all() or np.ptp(reduced, axis=0).max() == 0:
        return flat  # one point for all images: scikit-learn's t-SNE would take the process with it
    state = rng.key(seed, "map") % 2**31
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other libraries
        try:
            from sklearn.manifold import TSNE
        except ImportError:
            return flat
        points = TSNE(random_state=state, init="pca", perplexity=min(30, len(features) // 4)).fit_transform(reduced)
        return [*flat, Layout(name="t-SNE", points=np.asarray(points, np.float64))]


def map_picture(
    layout: Layout, thumbnails: list[Pillow.Image], *, cells: tuple[int, int] = (29, 20), side: int = CELL
) -> Pillow.Image:
    """Thumbnails of ``map_thumbnail`` at their positions, on a grid so that none hides another; the first in a cell wins."""
    columns, rows = cells
    canvas = Pillow.new("RGB", (columns * side, rows * side), COLORS["sunken"])
    # outliers would squeeze the rest into a corner: the outermost hundredth is moved to the rim
    low, high = np.quantile(layout.points, 0.01, axis=0), np.quantile(layout.points, 0.99, axis=0)
    place = np.clip((layout.points - low) / np.where(high > low, high - low, 1.0), 0, 1)
    taken: set[tuple[int, int]] = set()
    for (x, y), thumbnail in zip(place, thumbnails, strict=True):
        cell = round(x * (columns - 1)), round((1 - y) * (rows - 1))
        if cell not in taken:
            taken.add(cell)
            canvas.paste(thumbnail, (cell[0] * side + 1, cell[1] * side + 1))
    return canvas


def map_thumbnail(image: Image, *, side: int = CELL) -> Pillow.Image:
    """An image that fits into a cell of the map: of 1,500 decoded photos only this can be kept in memory."""
    whole = to_pillow(image).convert("RGB")
    scale = (side - 2) / max(whole.size)
    size = max(1, round(whole.width * scale)), max(1, round(whole.height * scale))
    return whole.resize(size, Pillow.Resampling.BILINEAR)


def retrieve(features: Tensor, rows: NDArray[np.int64], *, queries: int, count: int, seed: int) -> list[Retrieval]:
    """Some images, chosen by the seed, with their nearest neighbours among all others."""
    if len(features) < 2:
        return []
    chosen = rng.sample(rng.key(seed, "retrieval"), len(features), queries)
    similarities, indices = neighbours(features, features[torch.from_numpy(chosen)], k=count + 1)
    sheets = []
    for place, values, nearest in zip(chosen.tolist(), similarities.tolist(), indices.tolist(), strict=True):
        others = [(int(rows[row]), value) for row, value in zip(nearest, values, strict=True) if row != place]
        sheets.append(Retrieval(query=int(rows[place]), nearest=tuple(others[:count])))
    return sheets


def embedding_maps(runs: Sequence[RunData], *, images: int) -> tuple[list[EmbeddingMap], tuple[str, ...], list[str]]:
    """The maps of the runs that can be mapped, the classes, and the reasons why the others cannot.

    All maps on a page show the same images, so runs on other data than the first are left out.
    """
    maps: list[EmbeddingMap] = []
    problems: list[str] = []
    classes: tuple[str, ...] = ()
    first: str | None = None
    for run in runs:
        try:
            encoder = open_weights(run.path)
            source = open_test_data(run.config, value_range=encoder.value_range)
            if source is None or source.labels is None or source.classes is None:
                raise DsslError(f"{run.config.data} has no labelled test images")
            if first is not None and source.fingerprint != first:
                raise DsslError("its test images differ from those of the first run")
            chosen = rng.sample(rng.key(0, "report", "map"), len(source), images)
            mapped = Subset(source, chosen)
            features = encoder.features(mapped, quarantine=Quarantine(mapped, max_share=1.0))
        except (DsslError, OSError) as error:
            problems.append(f"{run.name}: no map: {error}")
            continue
        first, classes = source.fingerprint, source.classes
        points = pca(features.values)
        total = float(_centred(features.values).square().sum())
        share = float(np.square(points).sum()) / total if total > 0 else 0.0
        labels = source.labels[chosen][features.rows]
        maps.append(EmbeddingMap(run=run.name, points=points, labels=labels, variance=share))
    return maps, classes, problems


def _centred(features: Tensor) -> Tensor:
    unit = F.normalize(features.double(), dim=1)
    return unit - unit.mean(dim=0)
