"""Every protocol by name: what it does with one encoder and two labelled splits, and the number it gives."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import rng
from dssl.data import Source, Subset
from dssl.errors import DsslError, choices
from dssl.evaluation import classifier
from dssl.evaluation.classifier import Training
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import Problem, choose_strength
from dssl.evaluation.result import Result, count_correct
from dssl.evaluation.store import FeatureStore
from dssl.models import build_encoder, device_of
from dssl.models.for_cpus import WhitenedEncoder
from dssl.weights.load import LoadedEncoder

NEIGHBOURS, TEMPERATURE = (20, 200), 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One encoder, a labelled training split and a labelled test split with the same classes."""

    store: FeatureStore
    train: Source
    test: Source
    train_labels: NDArray[np.int64]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]
    seed: int
    epochs: int | None = None
    """Overrides a protocol's number of epochs, for quick trials."""
    folder: Path | None = None
    """Where a killed training resumes; without a folder it starts over."""
    trainings: list[Path] = field(default_factory=list)
    """Folders of trainings that have ended: they go once all numbers are known, else a later failure would cost them."""

    def features(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training features and labels, test features and labels; unreadable training images are left out."""
        train = self.store.of(self.train, allow_unreadable=True)
        test = self.store.of(self.test, allow_unreadable=False)
        return (
            train.values,
            torch.from_numpy(self.train_labels[train.rows]),
            test.values,
            torch.from_numpy(self.test_labels[test.rows]),
        )

    @property
    def device(self) -> torch.device:
        """Where kNN and the probe compute: on the encoder's GPU, else on the CPU (Apple's GPU has no doubles)."""
        found = device_of(self.loaded.encoder)
        return found if found.type == "cuda" else torch.device("cpu")

    @property
    def loaded(self) -> LoadedEncoder:
        return self.store.loaded

    @property
    def is_small(self) -> bool:
        """CIFAR's settings are for small images, ImageNet's for the rest."""
        return self.loaded.image_size <= 64

    def forget_trainings(self) -> None:
        """Delete what ended trainings have saved."""
        while self.trainings:
            shutil.rmtree(self.trainings.pop(), ignore_errors=True)

    def result(self, name: str, predicted: Tensor, *, used: int, protocol: dict[str, Any]) -> Result:
        """The number with everything it depends on; ``predicted`` covers the whole test set, in order."""
        labels = torch.from_numpy(self.test_labels)
        cropped = self.store.of(self.test, allow_unreadable=False).cropped
        about = {
            "train_images": used,
            "test_images": len(self.test),
            "train_data": self.train.name,
            "test_data": self.test.name,
            "train_fingerprint": self.train.fingerprint,
            "test_fingerprint": self.test.fingerprint,
            "classes": len(self.classes),
            "seed": self.seed,
            "checkpoint": self.loaded.protocol(),
            "crop_ratio": self.store.crop_ratio if cropped else 1.0,
            "cropped_test_images": cropped,
            "precision": self.store.precision,
        }
        correct = count_correct(predicted, labels)
        return Result(
            name=name, correct=correct, total=len(labels), protocol=about | protocol, predicted=predicted.cpu()
        )


_FROZEN = {"backbone": "frozen"}  # the runner verifies it by hash, and only then says so


def _knn(task: Task) -> list[Result]:
    train, train_labels, test, _ = task.features()
    predictions = knn_predict(
        train, train_labels, test, k=NEIGHBOURS, temperature=TEMPERATURE, classes=len(task.classes), device=task.device
    )
    results: dict[int, Result] = {}
    for k, predicted in zip(NEIGHBOURS, predictions, strict=True):
        k = min(k, len(train))  # with fewer training images all of them vote
        protocol = {"kind": "knn", "k": k, "temperature": TEMPERATURE, "similarity": "cosine", **_FROZEN}
        results[k] = task.result(f"knn k={k}", predicted, used=len(train), protocol=protocol)
    return list(results.values())


def _probe(task: Task, share: float) -> list[Result]:
    train, labels, test, _ = task.features()
    if share < 1:
        rows = classifier.share_of_labels(labels.numpy(), share, seed=task.seed)
        train, labels = train[rows], labels[rows]
    choice = choose_strength(train, labels, classes=len(task.classes), seed=task.seed, device=task.device)
    solved = Problem(train, labels, classes=len(task.classes), device=task.device).solve(choice.strength)
    protocol = {
        "kind": "linear",
        "solver": "L-BFGS to the optimum, on features of unaugmented images",
        "labels_share": share,
        "regularisation": choice.strength,
        "chosen_on": f"{choice.held_out} held-out training images" if choice.held_out else "default: too few images",
        "regularisation_tried": [list(one) for one in choice.accuracies],
        "objective": solved.objective,
        "largest_gradient": solved.gradient,
        **_FROZEN,
    }
    name = "linear probe" if share == 1 else f"linear probe, {share:.0%} of the labels"
    return [task.result(name, solved.predict(test), used=len(train), protocol=protocol)]


def _linear(task: Task, optimizer: str) -> list[Result]:
    small, large = {
        "sgd": (classifier.LINEAR_CIFAR_SGD, classifier.LINEAR_IMAGENET_SGD),
        "lars": (classifier.LINEAR_CIFAR_LARS, classifier.LINEAR_IMAGENET_LARS),
    }[optimizer]
    name = f"linear, {optimizer.upper()}, augmented"
    training = small if task.is_small else large
    return _trained(task, task.loaded.encoder, training, name=name, kind="linear", freeze=True)


def _finetune(task: Task, share: float) -> list[Result]:
    encoder = deepcopy(task.loaded.encoder)  # the next protocol gets the weights as they were
    training = classifier.FINETUNE if share > 0.01 else dataclasses.replace(classifier.FINETUNE, epochs=60)
    name = "fine-tuned" if share == 1 else f"fine-tuned, {share:.0%} of the labels"
    return _trained(task, encoder, training, name=name, kind="fine-tuned", share=share)


def untrained(like: LoadedEncoder, *, seed: int, purpose: str) -> nn.Module:
    """The same encoder with random weights; ``purpose`` tells apart what is drawn with one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, purpose) % 2**63)
        encoder = build_encoder(like.name, image_size=like.image_size, channels=like.channels)
    if isinstance(encoder, WhitenedEncoder) and isinstance(like.encoder, WhitenedEncoder):
        # measured before the first step and never trained: with others it would not be what the run began with
        encoder.filters.copy_(like.encoder.filters)
        encoder.shift.copy_(like.encoder.shift)
    return encoder


def supervised(task: Task, share: float = 1.0) -> list[Result]:
    """The encoder of the task with random weights, trained with this share of the labels."""
    encoder = untrained(task.loaded, seed=task.seed, purpose="supervised").to(device_of(task.loaded.encoder))
    name = "supervised from scratch (no pretraining)"
    return _trained(task, encoder, classifier.SUPERVISED, name=name, kind="supervised", share=share)


def _trained(
    task: Task,
    encoder: nn.Module,
    training: Training,
    *,
    name: str,
    kind: str,
    share: float = 1.0,
    freeze: bool = False,
) -> list[Result]:
    """Train a classifier on augmented images, of its head alone (``freeze``) or of everything, and measure it once."""
    source, labels = task.train, task.train_labels
    if share < 1:
        rows = classifier.share_of_labels(labels, share, seed=task.seed)
        source, labels = Subset(source, rows), labels[rows]
    if task.epochs is not None:
        training = dataclasses.replace(training, epochs=task.epochs)
    test = task.store.of(task.test, allow_unreadable=False).values
    head = classifier.new_head(test.shape[1], len(task.classes), seed=task.seed)
    used = classifier.train_classifier(
        encoder, head, source, labels=labels, training=training, store=task.store, seed=task.seed, freeze=freeze,
        folder=task.folder, ended=task.trainings.append,
    )  # fmt: skip
    if not freeze:  # else they are those that every other protocol uses
        test = task.store.compute(task.test, encoder=encoder).values
    predicted = classifier.predict_features(head, test)
    protocol = {"kind": kind, "labels_share": share, "training": dataclasses.asdict(used)}
    about = protocol | (_FROZEN if freeze else {"backbone": "trained"})
    return [task.result(name, predicted, used=len(source), protocol=about)]


PROTOCOLS: dict[str, Callable[[Task], list[Result]]] = {
    "knn": _knn,
    "probe": partial(_probe, share=1.0),
    "probe-1": partial(_probe, share=0.01),
    "probe-10": partial(_probe, share=0.1),
    "linear-sgd": partial(_linear, optimizer="sgd"),
    "linear-lars": partial(_linear, optimizer="lars"),
    "finetune-1": partial(_finetune, share=0.01),
    "finetune-10": partial(_finetune, share=0.1),
    "finetune": partial(_finetune, share=1.0),
    "supervised": supervised,
}
"""The first four need only features; the others train on augmented images, which takes a GPU or patience."""

QUICK = ("knn", "probe", "probe-1", "probe-10")


def chosen_protocols(names: Sequence[str]) -> tuple[str, ...]:
    """Names of protocols in the order of the table; ``quick`` and ``all`` stand for several."""
    wanted: set[str] = set()
    for name in names:
        if name not in (*PROTOCOLS, "quick", "all"):
            raise choices("protocol", name, (*PROTOCOLS, "quick", "all"))
        wanted |= set({"quick": QUICK, "all": tuple(PROTOCOLS)}.get(name, (name,)))
    if not wanted:
        raise DsslError("--protocols is empty: expected names such as knn probe, or quick, or all")
    return tuple(name for name in PROTOCOLS if name in wanted)
