"""A run that starts from weights is measured against them: before, during and after, on its own training images.

Drift needs no labels: 1 - mean cosine of an image's features before and now. Where the images have labels, kNN and a linear
probe on a part of them that is held out say whether it did harm. The test images are never read here.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import rng
from dssl.config import RunConfig
from dssl.data import Quarantine, Source
from dssl.evaluation.comparison import compare
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import Problem, choose_strength
from dssl.methods.losses import effective_rank
from dssl.run import RunFolder
from dssl.state import Verdict
from dssl.training.prepare import TrainingData, encoder_of
from dssl.weights import checkpoint

SAMPLE = 1_000
"""Images that are measured, at most."""
HELD_OUT = 4
"""One of so many labelled images is held out."""
NEIGHBOURS, TEMPERATURE = 20, 0.1
SURE = 0.01
"""Below this p-value of McNemar's test the held-out images have got worse, or better."""
CLOSE = 0.2
"""Up to this drift a checkpoint counts as one to go back to: the measure that needs no labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The encoder's features at one step, beside those of the start."""

    drift: float
    feature_rank: float
    """Effective rank of the features; for looking at, since it rises when features get worse, too."""
    held_out: dict[str, float]
    """Accuracy in percent of kNN and probe on the held-out images; empty without labels."""
    p_values: dict[str, float]
    """McNemar's, against the start; empty at the start."""


class Baseline:
    """The features of the weights that a run started from, and what became of them."""

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        encoder: nn.Module,
        folder: RunFolder,
        *,
        header: Mapping[str, Any],
        new: bool,
    ) -> None:
        """Called by a new run before its first step, when the start is written down, and by one that resumes, which finds it.

        What a run that was killed before its first checkpoint wrote is not believed: the file of weights may be another now.
        """
        self.config, self.data = config, data
        if not new and folder.start_file.is_file():
            encoder = deepcopy(encoder)
            encoder.load_state_dict(checkpoint.read(folder.start_file).part("method.encoder"), strict=True)
        else:
            tensors = {f"method.encoder.{name}": value for name, value in encoder.state_dict().items()}
            checkpoint.write(folder.start_file, {**header, "step": 0, "epoch": 0}, tensors)
        self.weights = {
            name: value.detach().clone() for name, value in encoder.named_parameters() if value.requires_grad
        }
        source = data.source
        self._rows = np.sort(rng.permutation(rng.key(config.seed, "start"), len(source))[:SAMPLE])
        self._quarantine = Quarantine(source, max_share=1.0)
        self._features, rows = self._of(encoder)
        self._readable = rows
        unit = F.normalize(self._features, dim=1)
        count = len(unit)
        cosine = (float(unit.sum(dim=0).square().sum()) - count) / max(1, count * (count - 1))
        self.apart = max(1 - cosine, 1e-6)
        """1 - mean cosine of two different images: what a drift is to be compared with."""
        self._labels = _labels(source, rows)
        self._strength: float | None = None
        self._before = self._predict(self._features)
        self.latest = self._compare(self._features)

    def drift(self, encoder: nn.Module) -> float:
        return self._drift(self._as_before(encoder))

    def measure(self, encoder: nn.Module) -> Comparison:
        self.latest = self._compare(self._as_before(encoder))
        return self.latest

    def _as_before(self, encoder: nn.Module) -> Tensor:
        """Features of the same images as at the start; one that can no longer be read counts as unchanged."""
        values, rows = self._of(encoder)
        if len(rows) == len(self._readable):
            return values
        features = self._features.clone()
        features[torch.from_numpy(np.searchsorted(self._readable, rows))] = values
        return features

    def judge(self, step: int, best: str) -> Verdict | None:
        """Whether the run is below where it started; ``best`` says which weights to take instead."""
        now = self.latest
        changes = {name: now.held_out[name] - self.before[name] for name in now.p_values}
        sure = {name: changes[name] for name, p in now.p_values.items() if p < SURE}
        if now.held_out:
            if not sure or max(sure.values()) > 0:
                return None
            worse = ", ".join(f"{name} {self.before[name]:.1f} -> {now.held_out[name]:.1f} %" for name in sure)
            reason = f"on held-out training images {worse}"
        elif now.drift < self.apart:
            return None
        else:
            reason = "images are no closer to what they were than to other images (there are no labels to measure with)"
        reason += (
            f"; features drifted by {now.drift:.2f} (0 is the start, two different images were {self.apart:.2f} apart)"
        )
        remedies = (
            "take `dssl train adapt`, which trains the last blocks only and bounds the drift"
            if self.config.adapt is None
            else "lower --adapt.max-drift or --optimizer.rate by half, or use milder --standard and --heavy policies",
            "train for fewer epochs, or on more images",
            best,
        )
        return Verdict("below where it started", step, reason=reason, remedies=remedies)

    @property
    def before(self) -> dict[str, float]:
        """Accuracy of the start on the held-out images."""
        return self._accuracies(self._before)

    def record(self, verdict: Verdict | None) -> dict[str, Any]:
        """For metrics.jsonl."""
        below = {} if verdict is None else {"below": {"reason": verdict.reason, "remedies": verdict.remedies}}
        return {"start": {**asdict(self.latest), "apart": self.apart, **below}}

    def text(self) -> str:
        """For the progress line."""
        now, parts = self.latest, [f"drift {self.latest.drift:.2f}"]
        for name, value in now.held_out.items():
            parts.append(f"{name} {value:.1f} %" + (f" (start {self.before[name]:.1f})" if now.p_values else ""))
        return ", ".join(parts)

    def _compare(self, features: Tensor) -> Comparison:
        predicted = self._predict(features)
        p_values = {}
        if self._labels is not None and features is not self._features:
            queries = self._labels.labels[self._labels.queries]
            for name, answers in predicted.items():
                paired = compare(queries, before=self._before[name], after=answers, classes=self._labels.classes)
                assert paired.p_value is not None
                p_values[name] = paired.p_value
        return Comparison(
            drift=self._drift(features),
            feature_rank=effective_rank(features),
            held_out=self._accuracies(predicted),
            p_values=p_values,
        )

    def _drift(self, features: Tensor) -> float:
        return max(0.0, 1 - float(F.cosine_similarity(features, self._features).mean()))

    def _of(self, encoder: nn.Module) -> tuple[Tensor, NDArray[np.int64]]:
        measured = encoder_of(self.config, encoder, self.data)
        features = measured.features(self.data.source, indices=self._rows, quarantine=self._quarantine)
        return features.values, features.rows

    def _predict(self, features: Tensor) -> dict[str, NDArray[np.int64]]:
        """The classes of the held-out images; those of the start that cannot be read are in no measurement."""
        if (split := self._labels) is None:
            return {}
        bank, queries = torch.from_numpy(split.bank), torch.from_numpy(split.queries)
        labels, classes = torch.from_numpy(split.labels)[bank], len(split.classes)
        (neighbours,) = knn_predict(
            features[bank], labels, features[queries], k=[NEIGHBOURS], temperature=TEMPERATURE, classes=classes
        )
        if self._strength is None:  # the start's: one choice for all
            self._strength = choose_strength(features[bank], labels, classes=classes, seed=self.config.seed).strength
        probe = Problem(features[bank], labels, classes=classes).solve(self._strength)
        return {"kNN": neighbours.numpy(), "probe": probe.predict(features[queries]).numpy()}

    def _accuracies(self, predicted: Mapping[str, NDArray[np.int64]]) -> dict[str, float]:
        split = self._labels
        if split is None:
            return {}
        right = split.labels[split.queries]
        return {name: 100 * float((one == right).mean()) for name, one in predicted.items()}


@dataclass(frozen=True, slots=True)
class _Labels:
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    bank: NDArray[np.int64]
    queries: NDArray[np.int64]


def _labels(source: Source, rows: NDArray[np.int64]) -> _Labels | None:
    """Labels of the rows and their split, as many of every class held out; None where there is nothing to tell apart."""
    if source.labels is None or source.classes is None:
        return None
    labels = source.labels[rows]
    # the rows are in the order of the source, often by class: every fourth of each class
    place = np.array([int((labels[:number] == label).sum()) for number, label in enumerate(labels)])
    held = place % HELD_OUT == HELD_OUT - 1
    bank, queries = np.flatnonzero(~held), np.flatnonzero(held)
    if len(queries) < 10 or len(np.unique(labels[bank])) < 2:
        return None
    return _Labels(labels, source.classes, bank, queries)
