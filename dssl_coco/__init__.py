"""Mask R-CNN on COCO, and the settings of its fine-tuning: the 1x schedule, and its linear scaling with the batch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dssl.config import CheckpointConfig, Precision
from dssl.errors import DsslError, require, within

SCRATCH = "scratch"
ITERATIONS, BATCH, WARMUP = 90_000, 16, 500
"""The 1x schedule: steps, images per step, steps of warm-up."""
DROPS = (60_000, 80_000)
"""The steps at which the 1x schedule divides its rate by ten."""
_COUNTS = ("batch_size", "test_size", "max_size", "proposals", "samples", "health_every", "round", "keep", "train_images",
           "test_images", "steps", "threads")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CocoConfig:
    """Fine-tuning of Mask R-CNN with a feature pyramid."""

    HARMLESS: ClassVar[tuple[str, ...]] = ("threads", "round", "save_minutes", "keep", "health_every", "pictures")
    """Settings that may change when a run resumes, since no weight and no score depends on them."""

    weights: str
    """A run's folder, a checkpoint or export of dssl, a file of torchvision weights, or the word scratch."""
    data: Path
    """A folder in COCO's layout: annotations/instances_SPLIT.json, and the images in SPLIT."""
    train: str = "train2017"
    """The split to train on."""
    test: str = "val2017"
    """The split to score."""
    train_images: int | None = None
    """Train on the first N images with an object, in the order of their ids."""
    test_images: int | None = None
    """Score the first N images with an object, in the order of their ids."""
    encoder: str | None = None
    """A ResNet of torchvision, such as resnet18: for scratch (default: resnet50), or if the file of weights does not name it."""

    schedule: float = 1.0
    """1 is the 1x schedule: 90,000 steps at batch 16, with the rate divided by ten at 60,000 and 80,000."""
    steps: int | None = None
    """Train for N steps instead; the rate drops at the same fractions of the run."""
    batch_size: int = 16
    """Images per step over all processes; rate and schedule scale with it linearly."""
    rate: float = 0.02
    """Learning rate at batch 16."""
    warmup: int | None = None
    """Steps of linear warm-up; by default 500 at batch 16, scaled with the batch, at most a tenth of the run."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Weight decay of SGD."""
    clip: float | None = None
    """Clip the norm of the gradient to this value."""
    norm: Literal["auto", "frozen", "sync"] = "auto"
    """BatchNorm of the encoder: frozen, or trained over all processes (sync); auto is frozen with weights, else sync."""

    sizes: tuple[int, ...] = (640, 672, 704, 736, 768, 800)
    """The shorter side of a training image is drawn from these."""
    test_size: int = 800
    """The shorter side of a scored image."""
    max_size: int = 1333
    """Upper limit of the longer side."""
    flip: bool = True
    """Mirror half of the training images."""
    anchors: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Side of the anchors on each of the five levels of the pyramid; smaller images need smaller ones."""
    proposals: int = 2000
    """Boxes that the first stage passes on from a training image; half as many from a scored one."""
    samples: int = 512
    """Proposals per image that the second stage is trained on, at most a quarter of them on objects."""

    seed: int = 0
    """Determines new weights, the order of the images, and the anchors and proposals to train on."""
    precision: Precision = "fp32"
    """fp32, bf16, fp16, or auto, which measures whether bf16 is faster."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA, else the CPU."""
    threads: int | None = None
    """Threads that decode and resize images; by default one per core."""
    health_every: int = 20
    """Write a line to metrics.jsonl every N steps; a loss that is not a number stops the run there."""
    round: int = 1000
    """Print progress and save every N steps."""
    save_minutes: float = 15.0
    """Also save when this many minutes have passed since the last save."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    pictures: int = 12
    """Images shown with their detections on the page."""

    def __post_init__(self) -> None:
        for interval, names in {
            "[1, inf)": _COUNTS,
            "(0, inf)": ("schedule", "rate", "save_minutes", "clip"),
            "[0, inf)": ("weight_decay", "warmup", "pictures"),
            "[0, 1)": ("momentum",),
        }.items():
            for name in names:
                within(name, vars(self)[name], interval)
        require(len(self.sizes) > 0 and min(self.sizes) >= 32, "sizes", self.sizes, "one or more of at least 32 pixels")
        fits = max(*self.sizes, self.test_size) <= self.max_size
        require(fits, "max_size", self.max_size, "at least as large as every other size")
        five = len(self.anchors) == 5 and min(self.anchors) >= 1
        require(five, "anchors", self.anchors, "five sides of at least 1 pixel")
        require(self.precision != "fp64", "precision", self.precision, "fp32, bf16, fp16 or auto")
        if self.weights == SCRATCH and self.norm == "frozen":
            raise DsslError("norm is frozen and weights is scratch: there are no statistics to freeze; use --norm sync")

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.steps or max(1, round(ITERATIONS * self.schedule * BATCH / self.batch_size))

    @property
    def drops(self) -> tuple[int, ...]:
        """The steps at which the rate is divided by ten."""
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
