"""Training of classifiers: updates by hand, freezing, seeds, shares of labels."""

import copy
import dataclasses
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dssl.augment import CIFAR10
from dssl.data import UnreadableImage
from dssl.data.shapes import Shapes
from dssl.errors import DsslError, Stopped
from dssl.evaluation import classifier
from dssl.evaluation.classifier import Training
from dssl.optim import build_optimizer
from dssl.weights.encoder import Encoder, weights_hash


@pytest.fixture
def small(encoder: nn.Module) -> Encoder:
    return Encoder(network=encoder, name="small", image_size=32, normalization=CIFAR10, threads=1)


def reference_sgd(w: np.ndarray, g: np.ndarray, v: np.ndarray, *, rate: float, training: Training) -> None:
    """One step by the formula: g + decay w, momentum, Nesterov."""
    g = g + training.weight_decay * w
    v *= training.momentum
    v += g
    w -= rate * (g + training.momentum * v if training.nesterov else v)


def reference_lars(w: np.ndarray, g: np.ndarray, v: np.ndarray, *, rate: float, training: Training) -> None:
    """One step by the formula of You, Gitman and Ginsburg; biases keep the plain rate and do not decay."""
    if w.ndim > 1:
        g = g + training.weight_decay * w
        g = g * (0.001 * np.linalg.norm(w) / np.linalg.norm(g))
    v *= training.momentum
    v += g
    w -= rate * v


def test_an_unreadable_image_is_replaced_by_one_of_its_class(small: Encoder, memory: type[Any]) -> None:
    """Every image is one colour, which is its class."""

    class Broken(memory):
        def image(self, index: int) -> np.ndarray:
            if index in (3, 17):
                raise UnreadableImage(f"{index}.png", "cut short")
            return super().image(index)

    labels = np.arange(40) % 4
    images = np.ones((40, 32, 32, 3), np.uint8) * (60 * labels).astype(np.uint8)[:, None, None, None]
    source = Broken(images, labels.tolist(), ("a", "b", "c", "d"))
    head = nn.Linear(256, 4)
    training = dataclasses.replace(classifier.SUPERVISED, epochs=3, batch_size=8, policy="crop(0.99,1)")
    task = classifier._Fitting(small, head, source, labels, training, seed=0, freeze=True)
    seen = set()
    with task.batches(0) as batches:
        for batch in batches:
            pixels, told = task.to_device(batch)
            colours = pixels[:, 0, 0, 0] * CIFAR10.std[0] + CIFAR10.mean[0]
            assert (colours * 255 / 60).round().long().tolist() == told.tolist()
            seen |= set(batch.indices.tolist())
    assert {3, 17} <= seen


@pytest.mark.parametrize(
    ("training", "reference"),
    [
        (classifier.LINEAR_CIFAR_SGD, reference_sgd),
        (classifier.LINEAR_IMAGENET_SGD, reference_sgd),
        (classifier.FINETUNE, reference_sgd),
        (classifier.SUPERVISED, reference_sgd),
        (classifier.LINEAR_LARS, reference_lars),
        (dataclasses.replace(classifier.LINEAR_LARS, weight_decay=0.01), reference_lars),
    ],
)
def test_updates_equal_the_formula_for_several_steps(training: Training, reference: Any) -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 4).double()
    features, labels = torch.randn(6, 8, 5, dtype=torch.float64), torch.randint(4, (6, 8))
    arrays = [one.detach().numpy().copy() for one in head.parameters()]
    velocities = [np.zeros_like(one) for one in arrays]
    settings = classifier.optimizer_of(training, peak=0.3)
    optimizer = build_optimizer(head, settings, nesterov=training.nesterov)
    for step in range(6):
        rate = classifier.rate_at(step, peak=0.3, total=6, decay=training.decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(head(features[step]), labels[step]).backward()
        optimizer.step()
        # the gradient of softmax regression, by hand
        x, (w, b) = features[step].numpy(), arrays
        logits = x @ w.T + b
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        error = (share - np.eye(4)[labels[step].numpy()]) / 8
        for array, gradient, velocity in zip(arrays, (error.T @ x, error.sum(0)), velocities, strict=True):
            reference(array, gradient, velocity, rate=rate, training=training)
        for parameter, array in zip(head.parameters(), arrays, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=1e-10, atol=1e-12)


def test_rates_fall_to_zero() -> None:
    cosine = [classifier.rate_at(step, peak=2, total=4, decay="cosine") for step in range(5)]
    assert cosine == pytest.approx([2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0])
    assert [classifier.rate_at(step, peak=2, total=4, decay="linear") for step in range(5)] == [2, 1.5, 1, 0.5, 0]


def test_the_papers_settings() -> None:
    assert (classifier.LINEAR_LARS.rate * 4096 / 256, classifier.LINEAR_LARS.epochs) == (1.6, 90)
    assert (classifier.LINEAR_LARS.decay, classifier.LINEAR_IMAGENET_SGD.decay) == ("cosine", "linear")
    cifar = classifier.LINEAR_CIFAR_SGD
    assert (cifar.rate, cifar.batch_size, cifar.epochs, cifar.weight_decay) == (30, 256, 100, 0)


def quick(**changes: Any) -> Training:
    return dataclasses.replace(Training(rate=0.5, batch_size=64, epochs=3, decay="cosine"), **changes)


def copied(encoder: Encoder, network: nn.Module | None = None) -> Encoder:
    return dataclasses.replace(encoder, network=copy.deepcopy(network or encoder.network))


def trained(
    small: Encoder, *, freeze: bool, seed: int = 3, network: nn.Module | None = None
) -> tuple[nn.Linear, nn.Module]:
    source, own = Shapes(128), copied(small, network)
    head = classifier.new_head(256, 10, seed=seed)
    assert source.labels is not None
    classifier.train_classifier(own, head, source, labels=source.labels, training=quick(), seed=seed, freeze=freeze)
    return head, own.network


def test_a_frozen_backbone_stays_and_a_trained_one_moves(encoder: nn.Module, small: Encoder) -> None:
    head, own = trained(small, freeze=True)
    assert weights_hash(own) == weights_hash(encoder)
    assert weights_hash(head) != weights_hash(classifier.new_head(256, 10, seed=3))
    _, own = trained(small, freeze=False)
    assert weights_hash(own) != weights_hash(encoder)
    assert not own.training


def test_the_same_seed_gives_the_same_bits_and_another_does_not(small: Encoder) -> None:
    first, again, other = (trained(small, freeze=True, seed=seed)[0] for seed in (3, 3, 4))
    assert weights_hash(first) == weights_hash(again)
    assert weights_hash(first) != weights_hash(other)


class Drifting(nn.Module):
    """A backbone that claims to be frozen and changes a buffer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return self.encoder(images)


def test_a_backbone_that_is_not_frozen_is_refused(encoder: nn.Module, small: Encoder) -> None:
    with pytest.raises(DsslError, match="hash"):
        trained(small, freeze=True, network=Drifting(encoder))


@pytest.mark.parametrize("freeze", [True, False])
def test_a_training_that_was_stopped_resumes_to_the_bit(small: Encoder, freeze: bool, tmp_path: Path) -> None:
    source = Shapes(128)
    assert source.labels is not None

    def train(stop_at: int | None, folder: Path | None) -> tuple[nn.Linear, nn.Module]:
        steps = itertools.count(1)

        def count(*_: object) -> None:
            if next(steps) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        own, head = copied(small), classifier.new_head(256, 10, seed=3)
        head.register_forward_hook(count)
        classifier.train_classifier(
            own, head, source, labels=source.labels, training=quick(), seed=3, freeze=freeze, folder=folder
        )
        return head, own.network

    whole = train(None, None)
    with pytest.raises(Stopped, match=r"signal 15$"):  # without a folder nothing is saved
        train(3, None)
    with pytest.raises(Stopped, match="signal 15"):
        train(3, tmp_path)  # in the second epoch of two steps each
    assert len(list(tmp_path.glob("training-*/checkpoints/step-000000003.safetensors"))) == 1
    resumed = train(None, tmp_path)
    assert [weights_hash(one) for one in resumed] == [weights_hash(one) for one in whole]
    assert list(tmp_path.iterdir()) == []  # nothing is left of a training that has ended


def test_a_rate_that_explodes_is_one_line(small: Encoder) -> None:
    source = Shapes(128)
    assert source.labels is not None
    with pytest.raises(DsslError, match=r"1e\+30"):
        classifier.train_classifier(
            copied(small), classifier.new_head(256, 10, seed=0), source, labels=source.labels,
            training=quick(rate=1e30), seed=3, freeze=False,
        )  # fmt: skip
