"""kNN accuracy while training: the curve of the paper's first figure."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dssl import rng
from dssl.config import RunConfig
from dssl.data import Quarantine, Source, Subset
from dssl.errors import DsslError
from dssl.evaluation.knn import knn_accuracy
from dssl.evaluation.protocols import aligned_labels
from dssl.training.prepare import Parts, encoder_of, open_test_data
from dssl.weights.encoder import Encoder

BANK, QUERIES = 20_000, 10_000
"""Upper limits of training and test images: the curve is for monitoring, `dssl evaluate` for the record."""
NEIGHBOURS, TEMPERATURE = 200, 0.1


class OnlineKnn:
    """Measures the encoder as it is; says nothing where the data has no labels or no test split."""

    def __init__(self, config: RunConfig, parts: Parts, *, autocast: torch.dtype | None) -> None:
        self.config, self.parts, self.autocast = config, parts, autocast
        self.last: float | None = None
        self._bank: Source | None = None
        self._queries: Source | None = None
        self.obstacle = ""
        """Why there is no curve, where labels and a test split seem to be there: no reason to refuse a run."""
        if config.knn_every and parts.source.labels is not None:
            try:
                self._open(config, parts.source)
            except DsslError as error:
                self.obstacle = f"no kNN accuracy while training: {error}"

    def _open(self, config: RunConfig, source: Source) -> None:
        test = open_test_data(config, value_range=source.value_range)
        if test is not None:
            labels, of_test, self._classes = aligned_labels(source, test)
            bank, queries = _at_most(len(source), BANK, config.seed), _at_most(len(test), QUERIES, config.seed)
            self._labels = labels[bank], of_test[queries]
            self._bank = source if len(bank) == len(source) else Subset(source, bank)
            self._queries = test if len(queries) == len(test) else Subset(test, queries)

    def due(self, epoch: int) -> bool:
        return self._bank is not None and (epoch % self.config.knn_every == 0 or epoch in (1, self.config.epochs))

    def measure(self, encoder: Encoder | None = None) -> dict[str, Any]:
        """Accuracy in percent of the run's encoder, or of another one, with its protocol."""
        assert self._bank is not None
        assert self._queries is not None
        encoder = encoder or encoder_of(self.config, self.parts, autocast=self.autocast)
        bank, queries = (
            encoder.features(source, quarantine=Quarantine(source, max_share=1.0))  # a curve is no reason to stop a run
            for source in (self._bank, self._queries)
        )
        bank_labels, labels = self._labels
        accuracy = 100 * knn_accuracy(
            bank.values,
            torch.from_numpy(bank_labels[bank.rows]),
            queries.values,
            torch.from_numpy(labels[queries.rows]),
            k=NEIGHBOURS,
            temperature=TEMPERATURE,
            classes=len(self._classes),
            device=encoder.device,
        )
        self.last = accuracy
        return {
            "knn": accuracy,
            "knn_protocol": {
                "k": NEIGHBOURS,
                "temperature": TEMPERATURE,
                "bank": len(bank.rows),
                "queries": len(queries.rows),
            },
        }


def _at_most(images: int, count: int, seed: int) -> NDArray[np.int64]:
    """Which images are used: all, or some of many."""
    return np.arange(images) if images <= count else rng.sample(rng.key(seed, "knn"), images, count)
