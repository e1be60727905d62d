"""How far corruptions move the features of a user's own images: before a run and at its end, without labels."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import rng
from dssl.augment import KINDS, corrupt_images, kinds_seen
from dssl.config import RunConfig
from dssl.data import Quarantine, Source
from dssl.data.loader import EvaluationBatches
from dssl.data.pipeline import thread_count
from dssl.data.source import InMemory
from dssl.evaluation.quality import cosine_between
from dssl.log import Log
from dssl.loop import Hook
from dssl.run import Run
from dssl.state import Verdict
from dssl.training.health import RunMonitor
from dssl.training.prepare import images_to_measure
from dssl.weights import load
from dssl.weights.encoder import Encoder

IMAGES, SEVERITY = 100, 3


def squares(encoder: Encoder, source: Source, *, seed: int) -> NDArray[np.uint8]:
    """Up to ``IMAGES`` images of a source, chosen by the seed, as the encoder takes them: N x side x side x channels."""
    rows = rng.sample(rng.key(seed, "stability"), len(source), IMAGES)
    with EvaluationBatches(
        source, size=encoder.image_size, channels=encoder.channels, indices=rows, threads=encoder.threads,
        quarantine=Quarantine(source, max_share=1.0),
    ) as batches:  # fmt: skip
        return np.concatenate([batch.images.permute(0, 2, 3, 1).numpy() for batch in batches])


def corrupted_features(encoder: Encoder, images: NDArray[np.uint8], kinds: Iterable[str]) -> dict[str, Tensor]:
    """The features of the images as they are, under the name "clean", and of the same images under each kind of corruption."""

    def features(pixels: NDArray[np.uint8]) -> Tensor:
        source = InMemory(
            pixels, labels=np.zeros(len(pixels), np.int64), classes=("",), name="", caption="", fingerprint=""
        )
        return encoder.features(source).values

    indices, threads = np.arange(len(images)), thread_count(encoder.threads)
    return {"clean": features(images)} | {
        kind: features(corrupt_images(images, kind, SEVERITY, seed=0, indices=indices, threads=threads))
        for kind in kinds
    }


def stability(features: Mapping[str, Tensor]) -> dict[str, float]:
    """By kind of corruption: 1 if it leaves features as they are, 0 if it takes them as far as those of another image."""
    between = cosine_between(features["clean"])
    own = {kind: float(F.cosine_similarity(features["clean"], values).mean()) for kind, values in features.items()}
    return {kind: (own[kind] - between) / max(1e-6, 1 - between) for kind in own if kind != "clean"}


def head_agreement(head: nn.Linear, after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, float]:
    """Shares of images that a classifier gives the class that it gave the clean image before: clean ones and corrupted ones."""

    def agrees(features: Tensor) -> float:
        return float((head(features).argmax(dim=1) == classes).float().mean())

    classes = head(before["clean"]).argmax(dim=1)
    kinds = [kind for kind in before if kind != "clean"]
    return {
        "clean": agrees(after["clean"]),
        "corrupted": float(np.mean([agrees(after[kind]) for kind in kinds])),
        "corrupted_before": float(np.mean([agrees(before[kind]) for kind in kinds])),
    }


class Stability(Hook):
    """Measures the first weights and the last under every kind of corruption; a run that did not help says so."""

    def __init__(
        self, config: RunConfig, source: Source, encoder: Encoder, monitor: RunMonitor, *, run: Run, total: int
    ) -> None:
        self.config, self.encoder, self.monitor, self.run, self.total = config, encoder, monitor, run, total
        familiar = kinds_seen([config.standard, config.heavy])
        self.kinds = [kind for kind in KINDS if KINDS[kind].group != "geometry"]
        self.new_kinds = [kind for kind in self.kinds if familiar[kind] != "seen"]
        self.images: NDArray[np.uint8] | None = None
        """Of the first process: images of the test split if there is one, else of the training images."""
        if run.world.first and run.first_step < total:
            self.images = squares(encoder, images_to_measure(config, source), seed=config.seed)

    def begin(self, log: Log) -> None:
        if self.images is not None and self.run.first_step == 0:
            self._measure(0, log)

    def after_round(self, step: int, log: Log) -> None:
        if step == self.total and (verdict := self.run.world.from_first(lambda: self._compare(step, log))) is not None:
            self.monitor.compare_with_start(verdict)

    def _measure(self, step: int, log: Log) -> tuple[dict[str, Tensor], dict[str, float]]:
        assert self.images is not None
        features = corrupted_features(self.encoder, self.images, self.kinds)
        values = stability(features)
        log.write({"step": step, "stability": values})
        return features, values

    def _compare(self, step: int, log: Log) -> Verdict | None:
        """What became of the features under corruptions that the run has not seen; a verdict if they are less stable."""
        if self.images is None or self.run.folder is None:
            return None
        records = [record["stability"] for record in self.run.folder.metrics() if "stability" in record]
        features, after = self._measure(step, log)
        if not records:
            return None
        before, now = (float(np.mean([values[kind] for kind in self.new_kinds])) for values in (records[0], after))
        seen = [kind for kind in self.kinds if kind not in self.new_kinds]
        log.say(
            f"under {len(self.new_kinds)} corruptions that it has not seen, features are {before:.0%} stable before and "
            f"{now:.0%} after (0% is another image, 100% is no change)"
        )
        if seen:
            first, last = (float(np.mean([values[kind] for kind in seen])) for values in (records[0], after))
            log.say(f"under the {len(seen)} that it has seen: {first:.0%} before, {last:.0%} after")
        self._compare_head(features, step, log)
        gained = f"features {before:.0%} -> {now:.0%} stable under corruptions not seen"
        self.monitor.progress = ", ".join(filter(None, (gained, self.monitor.progress)))
        ended: dict[str, Any] = {"progress": self.monitor.progress}
        verdict = None
        if now <= before:
            reason = f"features are no more stable under corruptions than at the start ({before:.0%}, now {now:.0%})"
            remedies = (
                "train for more epochs, or on more images",
                "lower --optimizer.rate by half",
                f"take the weights of the start: {self.run.folder.start_file}",
            )
            verdict = Verdict("below where it started", step, reason=reason, remedies=remedies)
            ended["below"] = {"reason": reason, "remedies": remedies}
        log.write({"step": step, "ended": ended})
        return verdict

    def _compare_head(self, features: Mapping[str, Tensor], step: int, log: Log) -> None:
        """If the weights came with a classifier: how often it gives an image the class that it gave the clean one before."""
        folder, init, width = self.run.folder, self.config.init, features["clean"].shape[1]
        given = self.config.starts_as_given  # no file could hold a classifier
        head = None if init is None or given else load.linear_head(init, self.config.encoder, width=width)
        if head is None or folder is None or self.images is None:
            return
        start = replace(self.encoder, network=load.open_weights(folder.start_file).network.to(self.encoder.device))
        before = corrupted_features(start, self.images, self.new_kinds)
        agreement = head_agreement(head, features, before)
        log.write({"step": step, "head": agreement})
        log.say(
            f"the classifier that came with the weights gives {agreement['clean']:.0%} of the clean images the class that it "
            f"gave them before; under corruptions not seen, {agreement['corrupted']:.0%} of the images keep the class of the "
            f"clean one ({agreement['corrupted_before']:.0%} before)"
        )
