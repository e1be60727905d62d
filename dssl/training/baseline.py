"""A run is measured against its own start, weights from elsewhere or an untrained encoder: before, during and after.

Drift needs no labels: 1 - mean cosine of an image's features before and now. Where the images have labels, kNN and a linear
probe on a part of the training images that is held out say whether it did good or harm. Without labels it is judged by how often
a view finds its image: among those of the test split where there is one, which is read for nothing else here.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
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
from dssl.data import Quarantine, Source, Subset, open_source
from dssl.errors import DsslError
from dssl.evaluation.comparison import compare
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import Problem, choose_strength
from dssl.evaluation.quality import retrieval, two_views
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
LIKELY = 0.05
"""Below this p-value, or beyond two standard errors, a run is said to be better or worse than its start."""
REFERENCE = "ra(2,9,monotone14)"
"""The policy of the views that must find their image."""
FINDERS = 500
"""Images that are to be found, at most."""
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
    retrieval: float | None = None
    """How often, in percent, an augmented view is nearest to its own image; measured where there are no labels."""


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
        self._finders = None if self._labels is not None else _finders(config, source)
        self.latest = self._compare(self._features, encoder)
        self.retrieval = self.latest.retrieval
        """Of the start."""

    def drift(self, encoder: nn.Module) -> float:
        return self._drift(self._as_before(encoder))

    def measure(self, encoder: nn.Module) -> Comparison:
        self.latest = self._compare(self._as_before(encoder), encoder)
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

    def record(self, verdict: Verdict | None, *, progress: str = "") -> dict[str, Any]:
        """For metrics.jsonl."""
        below = {} if verdict is None else {"below": {"reason": verdict.reason, "remedies": verdict.remedies}}
        said = {"progress": progress} if progress else {}
        return {"start": {**asdict(self.latest), "apart": self.apart, **below, **said}}

    def text(self) -> str:
        """For the progress line."""
        now = self.latest
        parts = [] if self.config.init is None else [f"drift {now.drift:.2f}"]
        for name, value in now.held_out.items():
            parts.append(
                f"held-out {name} {value:.1f}%" + (f" (start {self.before[name]:.1f})" if now.p_values else "")
            )
        if now.retrieval is not None:
            parts.append(f"a view finds its image {now.retrieval:.1f}%")
        return ", ".join(parts)

    def progress(self, *, finished: bool) -> str:
        """How the encoder compares with the start, such as "better than untrained (kNN 44.3 -> 51.0 %)"; empty if unknown."""
        now, changes = self.latest, {}
        if now.held_out:
            values = {name: (self.before[name], value) for name, value in now.held_out.items()}
            changes = {name: values[name][1] - values[name][0] for name, p in now.p_values.items() if p < LIKELY}
        elif now.retrieval is not None and self.retrieval is not None and self._finders is not None:
            name, before, after = "a view finds its image", self.retrieval, now.retrieval
            values = {name: (before, after)}
            error = math.sqrt(sum(share * (100 - share) for share in (before, after)) / len(self._finders))
            changes = {name: after - before} if abs(after - before) > 2 * error else {}
        else:
            return ""
        start = "untrained" if self.config.init is None else "its start"
        numbers = ", ".join(f"{name} {before:.1f} -> {after:.1f} %" for name, (before, after) in values.items())
        if changes and min(changes.values()) > 0:
            return f"better than {start} ({numbers})"
        if changes and max(changes.values()) < 0:
            return f"worse than {start} ({numbers})"
        return f"no better than {start}{'' if finished else ' yet'} ({numbers})"

    def _compare(self, features: Tensor, encoder: nn.Module) -> Comparison:
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
            retrieval=None if self._finders is None else self._found(encoder, self._finders),
        )

    def _found(self, encoder: nn.Module, finders: Source) -> float:
        """How often a heavy view of an image finds it: the same views at every call."""
        standard = self.config.standard
        augmented = f"({standard}) > {REFERENCE}" if self.config.channels == 3 else standard  # it changes colours
        views = two_views(
            encoder_of(self.config, encoder, self.data), finders, policies=(augmented, standard), seed=self.config.seed,
            quarantine=Quarantine(finders, max_share=1.0),
        )  # fmt: skip
        return 100 * retrieval(*views)

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


def _finders(config: RunConfig, source: Source) -> Source | None:
    """Images without labels to be found among each other: of the test split, or of the training images if there is none."""
    with suppress(DsslError):  # there is none, or none that fits the training images
        source = open_source(config.data, split="test", channels=config.channels, value_range=source.value_range)
    if len(source) < 10:
        return None
    return Subset(source, rng.sample(rng.key(config.seed, "finders"), len(source), FINDERS))


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
