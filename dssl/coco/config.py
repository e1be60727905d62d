"""A fine-tuning run on COCO as one frozen dataclass: the 1x schedule, and its linear scaling with the batch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dssl.config import CheckpointConfig, Precision
from dssl.errors import DsslError
from dssl.settings import require

SCRATCH = "scratch"
ITERATIONS, BATCH, WARMUP = 90_000, 16, 500
"""The 1x schedule: so many steps of so many images, the first of them with a growing rate."""
DROPS = (60_000, 80_000)
"""Where the 1x schedule divides its rate by ten."""


@dataclass(frozen=True, kw_only=True)
class CocoConfig:
    """Fine-tuning of Mask R-CNN with a feature pyramid."""

    HARMLESS: ClassVar[tuple[str, ...]] = ("threads", "round", "save_minutes", "keep", "look_every", "pictures")
    """Settings that a run may change half-way, since no weight and no score depends on them."""

    weights: str
    """The folder of a run, a checkpoint or export of dssl, torchvision's weights file, or the word scratch."""
    data: Path
    """A folder in COCO's layout: annotations/instances_SPLIT.json, and the images in SPLIT."""
    train: str = "train2017"
    """The split to train on."""
    test: str = "val2017"
    """The split to score."""
    train_images: int | None = None
    """Train on the first so many images that have an object, by their ids."""
    test_images: int | None = None
    """Score the first so many images that have an object, by their ids."""
    encoder: str | None = None
    """resnet18, resnet50 or another ResNet of torchvision: for scratch (resnet50), or where the file does not say it."""

    schedule: float = 1.0
    """1 is the 1x schedule: 90,000 steps at batch 16, with the rate divided by ten at 60,000 and 80,000."""
    steps: int | None = None
    """Train for so many steps instead; the rate falls at the same shares of them."""
    batch_size: int = 16
    """Images in a step over all processes; rate and schedule follow it linearly."""
    rate: float = 0.02
    """Learning rate at batch 16."""
    warmup: int | None = None
    """Steps of linear warm-up; by default 500 at batch 16, scaled with the batch, and at most a tenth of the run."""
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None
    """Clip the norm of the gradient to this value."""
    norm: Literal["auto", "frozen", "sync"] = "auto"
    """BatchNorm of the encoder: frozen with the weights' statistics, or trained on the batch of all processes together; auto
    is frozen with weights and sync from scratch."""

    sizes: tuple[int, ...] = (640, 672, 704, 736, 768, 800)
    """The shorter side of a training image is one of these, by chance."""
    test_size: int = 800
    """The shorter side of a scored image."""
    max_size: int = 1333
    """The longer side is never longer than this."""
    flip: bool = True
    """Mirror half of the training images."""
    anchors: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side of the anchors on each of the five levels of the pyramid; smaller images want smaller ones."""
    proposals: int = 2000
    """Boxes that the first stage hands on from a training image; half as many from a scored one."""
    samples: int = 512
    """Proposals an image that the second stage is trained on, a quarter of them on objects at most."""

    seed: int = 0
    precision: Precision = "fp32"
    """fp32, bf16, or auto: measured."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    threads: int | None = None
    """Threads that decode and resize images; as many as there are cores by default."""
    look_every: int = 20
    """Write a line to metrics.jsonl every so many steps; a loss that is no number stops the run there."""
    round: int = 1000
    """Say how it goes and save every so many steps."""
    save_minutes: float = 15.0
    """Save also when this many minutes have passed since the last time."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    pictures: int = 12
    """Images with their detections in the report."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "test_size", "max_size", "proposals", "samples", "look_every", "round", "keep"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("train_images", "test_images", "steps", "threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        for name in ("schedule", "rate", "save_minutes"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, value, "a number above 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "a number from 0 to below 1")
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more"
        )
        require(self.warmup is None or self.warmup >= 0, "warmup", self.warmup, "0 or more")
        require(self.clip is None or self.clip > 0, "clip", self.clip, "a number above 0")
        require(self.pictures >= 0, "pictures", self.pictures, "0 or more")
        require(len(self.sizes) > 0 and min(self.sizes) >= 32, "sizes", self.sizes, "one or more of at least 32 pixels")
        require(
            max(*self.sizes, self.test_size) <= self.max_size, "max_size", self.max_size, "at least every other size"
        )
        require(
            len(self.anchors) == 5 and min(self.anchors) >= 1, "anchors", self.anchors, "five sides of at least 1 pixel"
        )
        require(self.precision != "fp64", "precision", self.precision, "fp32, bf16, fp16 or auto")
        if self.weights == SCRATCH and self.norm == "frozen":
            raise DsslError(
                "norm is frozen and weights is scratch: there are no statistics to freeze; take --norm sync"
            )

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.steps or max(1, round(ITERATIONS * self.schedule * BATCH / self.batch_size))

    @property
    def drops(self) -> tuple[int, ...]:
        """The steps from which on the rate is ten times lower."""
        return tuple(self.total * drop // ITERATIONS for drop in DROPS)

    @property
    def frozen(self) -> bool:
        return self.norm == "frozen" or (self.norm == "auto" and self.weights != SCRATCH)

    @property
    def checkpoint(self) -> CheckpointConfig:
        return CheckpointConfig(every_epochs=1, every_minutes=self.save_minutes, keep=self.keep)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then a tenth after each drop."""
        peak = self.rate * self.batch_size / BATCH
        warmup = min(round(WARMUP * BATCH / self.batch_size), self.total // 10) if self.warmup is None else self.warmup
        grown = min(1.0, (step + 1) / warmup) if warmup else 1.0
        return float(peak * grown * 0.1 ** sum(step >= drop for drop in self.drops))
