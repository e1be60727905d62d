"""A run is measured against its own start, weights from elsewhere or an untrained encoder: before, during and after.

Drift needs no labels: 1 - mean cosine of an image's features before and now. Where the images have labels, kNN and a linear
probe on a part of the training images that is held out say whether it did good or harm. Without labels it is judged by how often
a view finds its image: among those of the test split where there is one, which is read for nothing else here.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dssl import rng
from dssl.config import RunConfig
from dssl.data import Quarantine, Source, Subset
from dssl.evaluation.comparison import mcnemar
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import Problem, choose_strength
from dssl.evaluation.quality import cosine_between, retrieval, two_views
from dssl.methods import MatchConfig
from dssl.methods.losses import effective_rank
from dssl.run import RunFolder
from dssl.state import Verdict
from dssl.training.prepare import images_to_measure
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder, Features

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
        self, config: RunConfig, source: Source, encoder: Encoder, folder: RunFolder, *, header: Mapping[str, Any],
        new: bool,
    ) -> None:  # fmt: skip
        """Called by a new run before its first step, when the start is written down, and by one that resumes, which finds it.

        What a run that was killed before its first checkpoint wrote is not believed: the file of weights may be another now.
        """
        self.config, self.encoder, self._source = config, encoder, source
        start = encoder
        if new:
            tensors = {f"method.encoder.{name}": value for name, value in encoder.network.state_dict().items()}
            checkpoint.write(folder.start_file, {**header, "step": 0, "epoch": 0}, tensors)
        else:
            start = replace(encoder, network=deepcopy(encoder.network))
            start.network.load_state_dict(checkpoint.read(folder.start_file).part("method.encoder"), strict=True)
        self.weights = {
            name: value.detach().clone() for name, value in start.network.named_parameters() if value.requires_grad
        }
        self._rows = np.sort(rng.permutation(rng.key(config.seed, "start"), len(source))[:SAMPLE])
        self._quarantine = Quarantine(source, max_share=1.0)
        self._features = self._measured(start)
        self.apart = max(1 - cosine_between(self._features.values), 1e-6)
        """1 - mean cosine of two different images: what a drift is to be compared with."""
        self._split = _split(source, self._features.rows)
        self._finders = None if self._split is not None else _finders(config, source)
        self._strength: float | None = None
        self._right_before: dict[str, NDArray[np.bool_]] = {}
        self.start = self.latest = self._compare(start, self._features.values)

    def drift(self) -> float:
        return self._drift(self._as_before())

    def measure(self) -> Comparison:
        """The encoder as it is now."""
        self.latest = self._compare(self.encoder, self._as_before())
        return self.latest

    def _as_before(self) -> Tensor:
        """Features of the same images as at the start; one that can no longer be read counts as unchanged."""
        now, before = self._measured(self.encoder), self._features
        features = before.values.clone()
        features[torch.from_numpy(np.searchsorted(before.rows, now.rows))] = now.values
        return features

    def judge(self, step: int, best: str) -> Verdict | None:
        """Whether the run is below where it started; ``best`` says which weights to take instead."""
        now = self.latest
        before = self.start.held_out
        changes = {name: now.held_out[name] - before[name] for name in now.p_values}
        sure = {name: changes[name] for name, p in now.p_values.items() if p < SURE}
        if now.held_out:
            if not sure or max(sure.values()) > 0:
                return None
            worse = ", ".join(f"{name} {before[name]:.1f} -> {now.held_out[name]:.1f}%" for name in sure)
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
            start = f" (start {self.start.held_out[name]:.1f})" if now.p_values else ""
            parts.append(f"held-out {name} {value:.1f}%{start}")
        if now.retrieval is not None:
            parts.append(f"a view finds its image {now.retrieval:.1f}%")
        return ", ".join(parts)

    def progress(self, *, finished: bool) -> str:
        """How the encoder compares with the start, such as "better than untrained (kNN 44.3 -> 51.0%)"; empty if unknown."""
        now, changes = self.latest, {}
        if now.held_out:
            values = {name: (self.start.held_out[name], value) for name, value in now.held_out.items()}
            changes = {name: values[name][1] - values[name][0] for name, p in now.p_values.items() if p < LIKELY}
        elif now.retrieval is not None and self.start.retrieval is not None and self._finders is not None:
            name, before, after = "a view finds its image", self.start.retrieval, now.retrieval
            values = {name: (before, after)}
            error = math.sqrt(sum(share * (100 - share) for share in (before, after)) / len(self._finders))
            changes = {name: after - before} if abs(after - before) > 2 * error else {}
        else:
            return ""
        start = "untrained" if self.config.init is None else "its start"
        stays = isinstance(self.config.method, MatchConfig)
        """Whether it means to stay where it was on clean images: what it gains, it gains elsewhere."""
        if stays and now.held_out:
            start += " on clean images"
        numbers = ", ".join(f"{name} {before:.1f} -> {after:.1f}%" for name, (before, after) in values.items())
        if changes and min(changes.values()) > 0:
            return f"better than {start} ({numbers})"
        if changes and max(changes.values()) < 0:
            return f"worse than {start} ({numbers})"
        if stays:
            return f"level with {start} ({numbers})"
        return f"no better than {start}{'' if finished else ' yet'} ({numbers})"

    def _compare(self, encoder: Encoder, features: Tensor) -> Comparison:
        """With the start, which is the first to be measured."""
        right, before = self._right(features), self._right_before
        self._right_before = before or right
        return Comparison(
            drift=self._drift(features),
            feature_rank=effective_rank(features),
            held_out={name: 100 * float(now.mean()) for name, now in right.items()},
            p_values={
                name: mcnemar(int((right[name] & ~then).sum()), int((then & ~right[name]).sum()))
                for name, then in before.items()
            },
            retrieval=None if self._finders is None else self._found(encoder, self._finders),
        )

    def _found(self, encoder: Encoder, finders: Source) -> float:
        """How often a heavy view of an image finds it: the same views at every call."""
        standard = self.config.standard
        augmented = f"({standard}) > {REFERENCE}" if self.config.channels == 3 else standard  # it changes colours
        quarantine = Quarantine(finders, max_share=1.0)
        policies, seed = (augmented, standard), self.config.seed
        return 100 * retrieval(*two_views(encoder, finders, policies=policies, seed=seed, quarantine=quarantine))

    def _drift(self, features: Tensor) -> float:
        return max(0.0, 1 - float(F.cosine_similarity(features, self._features.values).mean()))

    def _measured(self, encoder: Encoder) -> Features:
        return encoder.features(self._source, indices=self._rows, quarantine=self._quarantine)

    def _right(self, features: Tensor) -> dict[str, NDArray[np.bool_]]:
        """Which held-out images kNN and a probe get right; those of the start that cannot be read are in no measurement."""
        if self._split is None:
            return {}
        labels, bank, queries = self._split
        learned, classes = (features[bank], labels[bank]), len(self._source.classes or ())
        (neighbours,) = knn_predict(
            *learned, features[queries], k=[NEIGHBOURS], temperature=TEMPERATURE, classes=classes
        )
        if self._strength is None:  # the start's: one choice for all
            self._strength = choose_strength(*learned, classes=classes, seed=self.config.seed).strength
        probe = Problem(*learned, classes=classes).solve(self._strength)
        predicted = {"kNN": neighbours, "probe": probe.predict(features[queries])}
        return {name: (answers == labels[queries]).numpy() for name, answers in predicted.items()}


def _finders(config: RunConfig, source: Source) -> Source | None:
    """Images without labels to be found among each other."""
    source = images_to_measure(config, source)
    if len(source) < 10:
        return None
    return Subset(source, rng.sample(rng.key(config.seed, "finders"), len(source), FINDERS))


def _split(source: Source, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Labels of the rows, which to learn from and which to hold out, as many of every class; None where that cannot be done."""
    if source.labels is None:
        return None
    labels = source.labels[rows]
    # the rows are in the order of the source, often by class
    held = [np.flatnonzero(labels == label)[HELD_OUT - 1 :: HELD_OUT] for label in np.unique(labels)]
    queries = np.sort(np.concatenate(held))
    bank = np.setdiff1d(np.arange(len(labels)), queries)
    if len(queries) < 10 or len(np.unique(labels[bank])) < 2:
        return None
    return torch.from_numpy(labels), torch.from_numpy(bank), torch.from_numpy(queries)
