"""From targets, a scale and seeds to jobs: one for each different run, however many cells it serves."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dssl import config_io
from dssl.config import RunConfig
from dssl.evaluate.classifier import Training
from dssl.methods import declaration_of
from dssl.presets import named_graph
from dssl.recipes import PAPER_HEAVY
from dssl.reproduce.paper import Experiment, Target
from dssl.reproduce.scales import Scale, recipe

_IMAGES = {"cifar10": 50_000, "imagenet": 1_281_167}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run to make and measure."""

    name: str
    """Of its run folder and its result; equal for equal settings, on any machine."""
    scale: str
    config: RunConfig
    """Its data is the data set's bare name."""
    training: Training | None
    """Set for supervised training, where of the configuration only data, size, encoder and seed count."""
    protocols: tuple[str, ...]
    fingerprint: str

    @property
    def work(self) -> float:
        """How long it takes compared with others: images through the encoder, a backward pass counted as two forward ones."""
        images = min(self.config.limit or 10**9, _IMAGES.get(self.config.data, 10**9))
        if self.training is not None:
            return 3.0 * images * self.training.epochs
        passes = declaration_of(self.config.method).cost(named_graph(self.config.graph))
        return float(images * self.config.epochs * (3 * passes.with_gradient + passes.without_gradient))


def job(experiment: Experiment, scale: Scale, *, seed: int) -> Job:
    """The job of an experiment."""
    config = recipe(experiment, scale, seed=seed)
    supervised = experiment.method == "supervised"
    training = scale.training(experiment.data) if supervised else None
    protocols = ("supervised",) if supervised else ("knn", scale.linear(experiment.data, experiment.method))
    plain: dict[str, Any] = {"run": config_io.fingerprint(config), "protocols": protocols}
    if training is not None:
        plain["training"] = dataclasses.asdict(training)
    fingerprint = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    words = [experiment.data, experiment.method, experiment.graph]
    if any(view.policy == "heavy" for view in named_graph(config.graph).made):
        words.append("heavy" if config.heavy == PAPER_HEAVY else config.heavy)
    slug = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")
    return Job(
        name=f"{slug}-seed{seed}-{fingerprint[:6]}",
        scale=scale.name,
        config=config,
        training=training,
        protocols=protocols,
        fingerprint=fingerprint,
    )


def plan(targets: Iterable[Target], scale: Scale, *, seeds: Sequence[int]) -> list[Job]:
    """Every different job of the targets; the first seed of all of them comes first."""
    found: dict[str, Job] = {}
    cells = [cell for target in targets for cell in target.cells if cell.experiment is not None]
    for seed in seeds:
        for cell in cells:
            assert cell.experiment is not None
            one = job(cell.experiment, scale, seed=seed)
            found.setdefault(one.name, one)
    return list(found.values())
