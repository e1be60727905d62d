"""Maps of embeddings for a page: features of some test images under the encoder of each run."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F

from dssl import rng
from dssl.data import Subset
from dssl.errors import DsslError
from dssl.evaluate.features import compute_features
from dssl.report.map import pca
from dssl.report.run_data import RunData
from dssl.report.run_figures import EmbeddingMap
from dssl.train.prepare import open_test_data
from dssl.weights.load import open_weights


def embedding_maps(
    runs: Sequence[RunData], *, images: int, seed: int = 0
) -> tuple[list[EmbeddingMap], tuple[str, ...], list[str]]:
    """The maps of the runs that can be mapped, the classes, and for the others why not.

    All maps on a page are of the same images, so runs on another data set than the first one's are left out.
    """
    found: list[EmbeddingMap] = []
    problems: list[str] = []
    classes: tuple[str, ...] = ()
    first: str | None = None
    for run in runs:
        try:
            source = open_test_data(run.config)
            if source is None or source.labels is None or source.classes is None:
                raise DsslError(f"{run.config.data} has no labelled test images")
            if first is not None and source.fingerprint != first:
                raise DsslError("it has other test images than the first run")
            loaded = open_weights(run.path)
        except (DsslError, OSError) as error:
            problems.append(f"{run.name}: no map: {error}")
            continue
        first, classes = source.fingerprint, source.classes
        chosen = np.sort(rng.permutation(rng.key(seed, "report", "map"), len(source))[:images])
        part = Subset(source, chosen)
        features = compute_features(
            loaded.encoder,
            part,
            image_size=loaded.image_size,
            normalization=loaded.normalization,
            channels=loaded.channels,
        )
        points = pca(features.values)
        unit = F.normalize(features.values.double(), dim=1)
        total = float((unit - unit.mean(dim=0)).square().sum())
        share = float(np.square(points).sum()) / total if total > 0 else 0.0
        labels = source.labels[chosen][features.rows]
        found.append(EmbeddingMap(run=run.name, points=points, labels=labels, variance=share))
    return found, classes, problems
