"""kNN accuracy while training: the curve of the paper's first figure."""

from typing import Any

import torch

from dssl import rng
from dssl.config import RunConfig
from dssl.data import Quarantine, Source, Subset
from dssl.errors import DsslError
from dssl.evaluation.knn import knn_accuracy
from dssl.evaluation.protocols import aligned_labels
from dssl.log import Log
from dssl.loop import Hook
from dssl.training.prepare import open_test_data
from dssl.weights.encoder import Encoder

BANK, QUERIES = 20_000, 10_000
"""Upper limits of training and test images: the curve is for monitoring, `dssl evaluate` for the record."""
NEIGHBOURS, TEMPERATURE = 200, 0.1


def knn_due(config: RunConfig, epoch: int) -> bool:
    """Whether the encoder is measured after this epoch."""
    return config.knn_every > 0 and (epoch % config.knn_every == 0 or epoch in (1, config.epochs))


class OnlineKnn(Hook):
    """Measures the encoder as it is; says nothing if the data has no labels or no test split."""

    doing = "measuring kNN accuracy"

    def __init__(
        self, config: RunConfig, source: Source, encoder: Encoder, *, steps_per_epoch: int, at_start: bool
    ) -> None:
        """``at_start`` also measures before the first step: of weights from elsewhere."""
        self.config, self.encoder = config, encoder
        self._steps_per_epoch, self._at_start = steps_per_epoch, at_start
        self._splits: tuple[Source, Source] | None = None
        self.obstacle = ""
        """Why there is no curve, where labels and a test split seem to be there: no reason to refuse a run."""
        if config.knn_every and source.labels is not None:
            try:
                self._open(source)
            except DsslError as error:
                self.obstacle = f"no kNN accuracy while training: {error}"

    def _open(self, source: Source) -> None:
        test = open_test_data(self.config, value_range=source.value_range)
        if test is not None:
            labels, of_test, self._classes = aligned_labels(source, test)
            stream = rng.key(self.config.seed, "knn")
            bank, queries = rng.sample(stream, len(source), BANK), rng.sample(stream, len(test), QUERIES)
            self._labels = labels[bank], of_test[queries]
            self._splits = Subset(source, bank), Subset(test, queries)

    def begin(self, log: Log) -> None:
        if self.obstacle:
            log.say(self.obstacle)
        if self._at_start:
            self.after_round(0, log)

    def after_round(self, step: int, log: Log) -> None:
        if self._splits is not None and knn_due(self.config, step // self._steps_per_epoch):
            log.knn(step, self.measure(*self._splits))

    def measure(self, *splits: Source) -> dict[str, Any]:
        """Accuracy in percent, with its protocol."""
        bank, queries = (
            # a curve is no reason to stop a run
            self.encoder.features(split, quarantine=Quarantine(split, max_share=1.0))
            for split in splits
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
            device=self.encoder.device,
        )
        sizes = {"bank": len(bank.rows), "queries": len(queries.rows)}
        return {"knn": accuracy, "knn_protocol": {"k": NEIGHBOURS, "temperature": TEMPERATURE, **sizes}}
