"""Classifiers trained on augmented images: the paper's linear protocols, fine-tuning, and training with labels from scratch."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import loop, rng
from dssl.augment import ViewMaker
from dssl.config import CheckpointConfig, OptimizerConfig
from dssl.data import Source
from dssl.data.loader import CROP_RATIO, Batch, Batches, DeviceTransfer
from dssl.distributed import World
from dssl.errors import DsslError, Stopped
from dssl.evaluation import frozen
from dssl.graph import View
from dssl.optim import build_optimizer, learning_rate, peak_rate
from dssl.run import Run, RunFolder
from dssl.state import Loss, LossMonitor, RunLength
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder, weights_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a classifier is trained; all of it becomes part of the number's protocol."""

    optimizer: Literal["sgd", "lars"] = "sgd"
    rate: float
    """Base rate; the peak rate is this times batch size / 256."""
    batch_size: int
    """With fewer images, all of them form one batch."""
    epochs: int
    decay: Literal["cosine", "linear"]
    """How the rate falls to zero."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    policy: str = "crop(0.08,1) > flip"
    """Augmentation of the training images; test images are always centre crops."""


LINEAR_CIFAR_SGD = Training(rate=30.0, batch_size=256, epochs=100, decay="cosine")
"""The published code's: rate 30, no weight decay, batch 256, 100 epochs."""
LINEAR_IMAGENET_SGD = Training(rate=0.1, batch_size=4096, epochs=90, decay="linear")
"""The paper's for SimCLR."""
LINEAR_LARS = Training(optimizer="lars", rate=0.1, batch_size=4096, epochs=90, decay="cosine")
"""The paper's for SimSiam and BYOL on ImageNet; it has no LARS on CIFAR-10."""
FINETUNE = Training(rate=0.05, batch_size=256, epochs=30, decay="cosine", nesterov=True)
"""SimCLR's for a part of the labels: Nesterov, no weight decay, 30 epochs (60 with 1%); ours: batch 256, cosine."""
SUPERVISED = Training(
    rate=0.1, batch_size=256, epochs=200, decay="cosine", weight_decay=5e-4, policy="crop(0.2,1) > flip"
)
"""The paper gives the result of its supervised baseline but not its settings: these are common ones."""


def optimizer_of(training: Training, *, peak: float) -> OptimizerConfig:
    """The optimiser's settings; LARS adapts the rate of matrices only, and decays nothing else."""
    return OptimizerConfig(
        name=training.optimizer,
        rate=peak,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        decay_norms_and_biases=training.optimizer != "lars",
    )


def rate_at(step: int, *, peak: float, total: int, decay: Literal["cosine", "linear"]) -> float:
    """The learning rate of a step: from the peak at step 0 towards zero after the last."""
    if decay == "cosine":
        return learning_rate(step, peak=peak, total=total, warmup=0)
    return peak * (1 - step / total)


def new_head(dim: int, classes: int, *, seed: int) -> nn.Linear:
    """A linear layer of small normal weights and zero bias that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, "head") % 2**63)
        head = nn.Linear(dim, classes)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
    return head


def train_classifier(
    encoder: Encoder,
    head: nn.Linear,
    source: Source,
    *,
    labels: NDArray[np.int64],
    training: Training,
    seed: int,
    freeze: bool,
    folder: Path | None = None,
    ended: Callable[[Path], None] = shutil.rmtree,
) -> Training:
    """Train the head alone (``freeze``: the backbone stays as it is, verified by its hash) or everything.

    ``labels`` go with the images of ``source``. With a ``folder`` the training resumes there after a kill, bit for bit;
    at the end ``ended`` gets the folder of what it saved and deletes it. Returns the settings as they were used.
    """
    used = dataclasses.replace(training, batch_size=min(training.batch_size, len(source)))
    with frozen(encoder.network) if freeze else nullcontext():
        head.to(encoder.device)
        task = _Fitting(encoder, head, source, labels, used, seed=seed, freeze=freeze)
        _fit(task, folder, ended)
    encoder.network.eval()
    return used


class _Classifier(nn.Module):
    """Encoder, head and the cross-entropy of their output."""

    def __init__(self, encoder: nn.Module, head: nn.Linear, *, freeze: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.freeze = encoder, head, freeze

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Loss:
        images, labels = inputs
        with torch.set_grad_enabled(not self.freeze):
            feature = self.encoder(images)
        return Loss(F.cross_entropy(self.head(feature).float(), labels))


class _Fitting(loop.Task[Batch]):
    """A classifier, as the loop trains it. Accuracy is measured once: choosing a checkpoint would use the test split."""

    name = "classifier"

    def __init__(
        self, encoder: Encoder, head: nn.Linear, source: Source, labels: NDArray[np.int64], training: Training, *,
        seed: int, freeze: bool,
    ) -> None:  # fmt: skip
        self.encoder, self.source, self.training, self.seed = encoder, source, training, seed
        self.device = head.weight.device
        self.transfer = DeviceTransfer(self.device, normalization=encoder.normalization)
        self.peak = peak_rate(training.rate, training.batch_size)
        self.steps_per_epoch = len(source) // training.batch_size
        self.total = self.steps_per_epoch * training.epochs
        self.objective = _Classifier(encoder.network, head, freeze=freeze)
        encoder.network.train(not freeze)
        self.module = head if freeze else self.objective
        self.optimizer = build_optimizer(
            self.module, optimizer_of(training, peak=self.peak), nesterov=training.nesterov
        )
        self.monitor = LossMonitor()
        self.length = RunLength(
            total=self.total, steps_per_epoch=self.steps_per_epoch, round=self.steps_per_epoch, counted="epoch"
        )
        self.batch_size, self.checkpoint = training.batch_size, CheckpointConfig(keep=1)
        self.precision = "bf16" if encoder.autocast is torch.bfloat16 else "fp32"
        self.labels = torch.from_numpy(labels)
        run = {
            "image_size": encoder.image_size, "channels": encoder.channels,
            "normalization": dataclasses.asdict(encoder.normalization), "seed": seed, "crop_ratio": CROP_RATIO,
            "autocast": encoder.autocast, "threads": encoder.threads,
        }  # fmt: skip
        about = [dataclasses.asdict(training), run, freeze, weights_hash(self.objective)]
        text = json.dumps([*about, source.fingerprint, labels.tolist()], default=str)
        self.header = {"fingerprint": hashlib.sha256(text.encode()).hexdigest()}

    def batches(self, start: int) -> AbstractContextManager[Batches]:
        maker = ViewMaker(
            [View(name="train", policy=self.training.policy)],
            size=self.encoder.image_size,
            seed=self.seed,
            channels=self.encoder.channels,
            normalization=None if self.transfer.as_bytes else self.encoder.normalization,
        )
        return Batches(
            self.source, maker, batch_size=self.training.batch_size, seed=self.seed, steps=self.total,
            start_step=start, threads=self.encoder.threads, pinned=self.transfer.as_bytes, labels=self.labels.numpy(),
        )  # fmt: skip

    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.transfer.to_device(batch)["train"], self.labels[batch.indices].to(self.device)

    def rate(self, step: int) -> float:
        return rate_at(step, peak=self.peak, total=self.total, decay=self.training.decay)


def _fit(task: _Fitting, folder: Path | None, ended: Callable[[Path], None]) -> None:
    world = World(0, 1, task.device)
    if folder is None:
        ending = loop.run(task, Run(world=world))
    else:
        # a training that is there may have other weights or images: the name distinguishes them
        kept = RunFolder(folder / f"training-{task.header['fingerprint'][:16]}")
        with kept.locked():
            kept.checkpoints.mkdir(exist_ok=True)
            ending = loop.run(task, Run(world=world, folder=kept, resumed=checkpoint.newest_good(kept.checkpoints)))
        if ending.verdict.status == "diverged":
            shutil.rmtree(kept.path)
        elif ending.signal is None:
            ended(kept.path)
    if ending.verdict.status == "diverged":
        raise DsslError(
            f"the classifier's loss is not a number at step {ending.verdict.step}: its base rate {task.training.rate:g} "
            "is too high for this encoder"
        )
    if ending.signal is not None:
        raise Stopped(ending.signal, saved=folder is not None)


@torch.no_grad()
def predict_features(head: nn.Linear, features: Tensor) -> Tensor:
    """The class of every row of features."""
    return F.linear(features, head.weight.float().cpu(), head.bias.float().cpu()).argmax(dim=1)
