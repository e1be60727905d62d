"""Classifiers trained on augmented images: the paper's linear protocols, fine-tuning, and training with labels from scratch."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import rng
from dssl.augment import Normalization, ViewMaker
from dssl.data import Source
from dssl.data.evaluation import CROP_RATIO, EvaluationBatches
from dssl.data.loader import Batches
from dssl.errors import DsslError
from dssl.evaluate.features import Progress
from dssl.evaluate.result import frozen
from dssl.graph import View
from dssl.models.inference import evaluating, forward
from dssl.optim import LARS


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a classifier is trained; all of it becomes part of the number's protocol."""

    optimizer: Literal["sgd", "lars"] = "sgd"
    rate: float
    """Base rate; the real one is this times batch size / 256."""
    batch_size: int
    """Where there are fewer images, all of them are a batch."""
    epochs: int
    decay: Literal["cosine", "linear"]
    """How the rate falls to zero."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    policy: str = "crop(0.08,1) > flip"
    """Augmentation of the training images; test images are the centre, always."""


LINEAR_CIFAR_SGD = Training(rate=30.0, batch_size=256, epochs=100, decay="cosine")
"""The published code's: rate 30, no weight decay, batch 256, 100 epochs."""
LINEAR_CIFAR_LARS = Training(optimizer="lars", rate=0.1, batch_size=4096, epochs=90, decay="cosine")
"""The paper has no LARS on CIFAR-10: these are its ImageNet settings."""
LINEAR_IMAGENET_SGD = Training(rate=0.1, batch_size=4096, epochs=90, decay="linear")
"""The paper's for SimCLR."""
LINEAR_IMAGENET_LARS = Training(optimizer="lars", rate=0.1, batch_size=4096, epochs=90, decay="cosine")
"""The paper's for SimSiam and BYOL."""
FINETUNE = Training(rate=0.05, batch_size=256, epochs=30, decay="cosine", nesterov=True)
"""SimCLR's for a part of the labels: Nesterov, no weight decay, 30 epochs (60 with 1 %); ours: batch 256, cosine."""
SUPERVISED = Training(
    rate=0.1, batch_size=256, epochs=200, decay="cosine", weight_decay=5e-4, policy="crop(0.2,1) > flip"
)
"""The paper gives the result of its supervised baseline and not its settings: these are usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all trainings on one encoder share."""

    image_size: int
    channels: int
    normalization: Normalization
    seed: int
    crop_ratio: float = CROP_RATIO
    autocast: torch.dtype | None = None
    threads: int | None = None


def build_optimizer(parameters: list[nn.Parameter], training: Training, *, rate: float) -> torch.optim.Optimizer:
    """SGD, or LARS that adapts the rate of matrices and leaves biases and norms alone."""
    if training.optimizer == "lars":
        groups = [
            {"params": [one for one in parameters if (one.dim() > 1) == adapt], "adapt": adapt}
            for adapt in (True, False)
        ]
        return LARS(groups, lr=rate, momentum=training.momentum, weight_decay=training.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        nesterov=training.nesterov,
    )


def rate_at(step: int, *, peak: float, total: int, decay: Literal["cosine", "linear"]) -> float:
    """The learning rate of a step: from the peak at step 0 towards zero after the last."""
    done = step / total
    return peak * (0.5 * (1 + math.cos(math.pi * done)) if decay == "cosine" else 1 - done)


def new_head(dim: int, classes: int, *, seed: int) -> nn.Linear:
    """A linear layer of small normal weights and zero bias that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, "head") % 2**63)
        head = nn.Linear(dim, classes)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
    return head


def train_classifier(
    encoder: nn.Module,
    head: nn.Linear,
    source: Source,
    *,
    labels: NDArray[np.int64],
    training: Training,
    setting: Setting,
    freeze: bool,
    progress: Progress | None = None,
) -> Training:
    """Train the head alone (``freeze``: the backbone stays as it is, verified by its hash) or everything.

    ``labels`` go with the images of ``source``. Returns the settings as they were used.
    """
    if freeze:
        with frozen(encoder):
            return _train(encoder, head, source, labels, training, setting, freeze=True, progress=progress)
    return _train(encoder, head, source, labels, training, setting, freeze=False, progress=progress)


def _train(
    encoder: nn.Module, head: nn.Linear, source: Source, labels: NDArray[np.int64], training: Training, setting: Setting,
    *, freeze: bool, progress: Progress | None,
) -> Training:  # fmt: skip
    if len(labels) != len(source):
        raise DsslError(f"{source.name}: {len(source)} images and {len(labels)} labels: expected as many")
    used = dataclasses.replace(training, batch_size=min(training.batch_size, len(source)))
    weight = next(encoder.parameters(), head.weight)
    head.to(weight.device)
    peak = used.rate * used.batch_size / 256
    parameters = [*head.parameters()] if freeze else [*encoder.parameters(), *head.parameters()]
    optimizer = build_optimizer(parameters, used, rate=peak)
    maker = ViewMaker(
        [View(name="train", policy=used.policy)],
        size=setting.image_size,
        seed=setting.seed,
        channels=setting.channels,
        normalization=setting.normalization,
    )
    batches = Batches(
        source, maker, batch_size=used.batch_size, seed=setting.seed, epochs=used.epochs, threads=setting.threads
    )
    target = torch.from_numpy(labels)
    encoder.train(not freeze)
    with batches:
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(batch.step, peak=peak, total=batches.steps, decay=used.decay)
            images = batch.views["train"].to(weight.device, non_blocking=True)
            with torch.autocast(weight.device.type, dtype=setting.autocast, enabled=setting.autocast is not None):
                with torch.set_grad_enabled(not freeze):
                    feature = encoder(images)
                logits = head(feature)
            loss = F.cross_entropy(logits.float(), target[batch.indices].to(weight.device))
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            if not bool(torch.isfinite(loss)):
                raise DsslError(
                    f"the classifier's loss is {float(loss.detach())} at step {batch.step}: its base rate {used.rate:g} "
                    "is too high for this encoder"
                )
            if progress is not None:
                progress(batch.step + 1, batches.steps)
    encoder.eval()
    return used


def predict(encoder: nn.Module, head: nn.Linear, source: Source, *, setting: Setting) -> Tensor:
    """The class of every image of a source, in order."""
    found: list[Tensor] = []
    batches = EvaluationBatches(
        source,
        size=setting.image_size,
        channels=setting.channels,
        normalization=setting.normalization,
        crop_ratio=setting.crop_ratio,
        threads=setting.threads,
    )
    with batches, evaluating(encoder):
        for batch in batches:
            found.append(predict_features(head, forward(encoder, batch.images, autocast=setting.autocast)))
    predicted = torch.cat(found)
    if len(predicted) != len(source):
        raise DsslError(f"{source.name}: {len(predicted)} predictions for {len(source)} images: samples were dropped")
    return predicted


@torch.no_grad()
def predict_features(head: nn.Linear, features: Tensor) -> Tensor:
    """The class of every row of features."""
    return F.linear(features, head.weight.float().cpu(), head.bias.float().cpu()).argmax(dim=1)


def share_of_labels(labels: NDArray[np.int64], share: float, *, seed: int) -> NDArray[np.int64]:
    """Rows of this share of each class, at least one of each; a larger share contains a smaller one of the same seed."""
    order = rng.permutation(rng.key(seed, "labels"), len(labels))
    chosen = [
        members[: max(1, round(share * len(members)))]
        for label in np.unique(labels)
        if len(members := order[labels[order] == label])
    ]
    return np.sort(np.concatenate(chosen))
