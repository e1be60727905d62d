"""Recipes: an experiment of the paper at one of three scales becomes a full configuration."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from dssl import recipes
from dssl.config import OptimizerConfig, RunConfig
from dssl.errors import choices
from dssl.evaluate.classifier import SUPERVISED, Training
from dssl.presets import named_graph
from dssl.reproduce.paper import Experiment

NO_HEAVY = "ra(2,5)"
"""The heavy policy of a graph without heavy views: one value, so that equal runs are seen to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One setting for all cells: what is trained on what, for how long, and how the result is measured."""

    name: str
    meaning: str
    differs: tuple[str, ...]
    """Why the numbers are not those of the paper even if everything is right."""
    settings: Callable[[str, str], RunConfig]
    """From a data set and a method."""
    training: Callable[[str], Training]
    """Of the supervised rows, from a data set."""
    linear: Callable[[str, str], str]
    """The protocol of dssl.evaluate that gives the linear accuracy, from a data set and a method."""


def recipe(experiment: Experiment, scale: Scale, *, seed: int) -> RunConfig:
    """The configuration of a cell. Its data is the data set's bare name: where the images are is no part of a recipe.

    For supervised training only data, size, encoder and seed count; ``scale.training`` says the rest.
    """
    method = "simsiam" if experiment.method == "supervised" else experiment.method
    config = dataclasses.replace(scale.settings(experiment.data, method), data=experiment.data, seed=seed)
    if experiment.method == "supervised":
        return dataclasses.replace(config, graph="standard", heavy=NO_HEAVY)
    heavy = any(view.policy == "heavy" for view in named_graph(experiment.graph).made)
    return dataclasses.replace(
        config,
        graph=experiment.graph,
        heavy=experiment.heavy if heavy else NO_HEAVY,
        standard=experiment.standard or config.standard,
    )


def _paper(data: str, method: str) -> RunConfig:
    return recipes.recipe(data, method=method)


def _paper_linear(data: str, method: str) -> str:
    return "linear-sgd" if data == "cifar10" or method == "simclr" else "linear-lars"


def _paper_training(data: str) -> Training:
    if data == "cifar10":
        return SUPERVISED
    # the usual ImageNet schedule; the paper names the result of others and no settings
    return dataclasses.replace(SUPERVISED, epochs=90, weight_decay=1e-4, policy="crop(0.08,1) > flip")


def _small(data: str, method: str, *, limit: int | None, epochs: int, batch_size: int, warmup: float) -> RunConfig:
    """The small encoder with the heads that suit it, and one optimiser for all three methods: a peak rate of 0.06."""
    return dataclasses.replace(
        recipes.recipe("shapes", method=method),
        normalization=data,
        limit=limit,
        epochs=epochs,
        batch_size=batch_size,
        knn_every=3,
        optimizer=OptimizerConfig(name="sgd", rate=0.06 * 256 / batch_size, weight_decay=5e-4, warmup_epochs=warmup),
    )


def _cpu(data: str, method: str) -> RunConfig:
    # steps teach more than images do at this length: a batch of 64 makes 1,872 of them in the time that one of 256 needs for 468
    return _small(data, method, limit=10_000, epochs=12, batch_size=64, warmup=1)


def _day(data: str, method: str) -> RunConfig:
    return _small(data, method, limit=None if data == "cifar10" else 50_000, epochs=100, batch_size=256, warmup=5)


_SMALL_DIFFERS = (
    "a small encoder (1.2 million weights, stride-2 stem) instead of ResNet-18, with narrower heads",
    "SGD with one rate for all methods; BYOL's moving average starts at 0.99",
    "ImageNet's images at 32 px",
    "the linear accuracy is a logistic regression solved to its optimum on features of unaugmented images",
)
SCALES: dict[str, Scale] = {
    "paper": Scale(
        name="paper",
        meaning="the paper's settings to the letter: GPUs",
        differs=(
            "the last epoch on the whole test set; the published code picks the best epoch on the test set and "
            "drops its last batch",
        ),
        settings=_paper,
        training=_paper_training,
        linear=_paper_linear,
    ),
    "day": Scale(
        name="day",
        meaning="all of CIFAR-10, small encoder, 100 epochs: a cell takes some two hours on two cores",
        differs=("100 epochs instead of 800 (ImageNet: 50,000 images)", *_SMALL_DIFFERS),
        settings=_day,
        training=lambda data: dataclasses.replace(SUPERVISED, epochs=100),
        linear=lambda data, method: "probe",
    ),
    "cpu": Scale(
        name="cpu",
        meaning="10,000 images, small encoder, 12 epochs: a cell takes some four minutes on two cores",
        differs=("10,000 images and 12 epochs, 1,872 steps (the paper: 50,000 and 800, 77,600)", *_SMALL_DIFFERS),
        settings=_cpu,
        training=lambda data: dataclasses.replace(SUPERVISED, epochs=12),
        linear=lambda data, method: "probe",
    ),
}


def named_scale(name: str) -> Scale:
    if name not in SCALES:
        raise choices("scale", name, SCALES)
    return SCALES[name]
