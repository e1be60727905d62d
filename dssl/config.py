"""Everything that defines a run, as frozen dataclasses: the docstring under a field is its help, nonsense is refused here.

``dssl train RECIPE`` starts from a recipe's full configuration; each field is a flag of the same name.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dssl.errors import DsslError

Precision = Literal["auto", "bf16", "fp32", "fp64"]


def _require(condition: bool, name: str, given: object, expected: str) -> None:
    if not condition:
        raise DsslError(f"{name} is {given}, expected {expected}")


LARGEST = {"image_size": 4096, "epochs": 1_000_000, "threads": 1024, "head": 65_536}
"""Above these a value is a slip of the finger, and the machine would fail in a less polite way."""


def _finite(name: str, value: float, *, least: float = 0.0, strictly: bool = False) -> None:
    enough = value > least if strictly else value >= least
    _require(
        math.isfinite(value) and enough, name, value, f"a number {'above' if strictly else 'of at least'} {least:g}"
    )


def _between(name: str, value: int, largest: int) -> None:
    _require(value >= 1, name, value, "at least 1")
    _require(value <= largest, name, value, f"at most {largest:,}")


@dataclass(frozen=True, kw_only=True)
class SimSiamConfig:
    """SimSiam's heads; the defaults are those of CIFAR-10."""

    projector_layers: Literal[2, 3] = 2
    """Layers of the projector: 2 on CIFAR-10, 3 on ImageNet."""
    hidden: int = 2048
    """Width of the projector's hidden layers."""
    output: int = 2048
    """Width of the projection."""
    bottleneck: int = 512
    """Width of the predictor's hidden layer."""

    def __post_init__(self) -> None:
        for name in ("hidden", "output", "bottleneck"):
            _between(f"method.{name}", getattr(self, name), LARGEST["head"])


@dataclass(frozen=True, kw_only=True)
class BYOLConfig:
    """BYOL's heads and moving average."""

    hidden: int = 4096
    """Width of the hidden layers of projector and predictor."""
    output: int = 256
    """Width of the projection."""
    momentum: float = 0.996
    """Momentum of the target at the start; it grows to 1 along a cosine."""

    def __post_init__(self) -> None:
        for name in ("hidden", "output"):
            _between(f"method.{name}", getattr(self, name), LARGEST["head"])
        _require(0 <= self.momentum <= 1, "method.momentum", self.momentum, "a number between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class SimCLRConfig:
    """SimCLR's head and temperature."""

    output: int = 128
    """Width of the projection."""
    temperature: float = 0.5
    """0.5 on CIFAR-10, 0.1 on ImageNet."""

    def __post_init__(self) -> None:
        _between("method.output", self.output, LARGEST["head"])
        _finite("method.temperature", self.temperature, strictly=True)


MethodConfig = SimSiamConfig | BYOLConfig | SimCLRConfig
METHOD_CONFIGS: dict[str, type[SimSiamConfig] | type[BYOLConfig] | type[SimCLRConfig]] = {
    "simsiam": SimSiamConfig,
    "byol": BYOLConfig,
    "simclr": SimCLRConfig,
}


def method_name(config: MethodConfig) -> str:
    return next(name for name, kind in METHOD_CONFIGS.items() if isinstance(config, kind))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser and its schedule: linear warm-up, then a cosine to zero."""

    name: Literal["sgd", "lars", "adamw"] = "sgd"
    """SGD with momentum, LARS (large batches), or AdamW (vision transformers)."""
    rate: float = 0.03
    """Base learning rate; the real one is this times batch size / 256."""
    momentum: float = 0.9
    """Momentum of SGD and LARS; the first beta of AdamW."""
    weight_decay: float = 5e-4
    decay_norms_and_biases: bool = True
    """Apply weight decay to norms and biases too, as SimSiam does; LARS then also adapts their rate only if this is on."""
    fixed_predictor_rate: bool = False
    """Keep the predictor's rate constant, as SimSiam's ImageNet code does; the paper does not."""
    warmup_epochs: float = 10.0
    """Epochs of linear warm-up."""
    clip: float | None = None
    """Clip the norm of the gradient to this value."""

    def __post_init__(self) -> None:
        _finite("optimizer.rate", self.rate, strictly=True)
        _require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "a number from 0 to below 1")
        _finite("optimizer.weight_decay", self.weight_decay)
        _finite("optimizer.warmup_epochs", self.warmup_epochs)
        if self.clip is not None:
            _finite("optimizer.clip", self.clip, strictly=True)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run saves itself, and what it keeps. None of this changes a result."""

    every_epochs: int = 1
    """Save at the end of every so many epochs; the last epoch is always saved."""
    every_minutes: float = 15.0
    """Save in the middle of an epoch too, when this many minutes have passed since the last time."""
    keep: int = 2
    """How many of the newest to keep."""
    keep_every: int | None = None
    """Keep those of every so many epochs for ever."""

    def __post_init__(self) -> None:
        _require(self.every_epochs >= 1, "checkpoint.every_epochs", self.every_epochs, "at least 1")
        _finite("checkpoint.every_minutes", self.every_minutes, strictly=True)
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        if self.keep_every is not None:
            _require(self.keep_every >= 1, "checkpoint.keep_every", self.keep_every, "at least 1")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """The watch over a run."""

    stop: bool = False
    """Stop the run when it has collapsed; a NaN always stops it."""
    every: int = 20
    """Look every so many steps."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, "health.every", self.every, "at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pretraining run."""

    data: str = "shapes"
    """Images: shapes, shapes:2000, cifar10:FOLDER, a folder of images, or a text file that lists them."""
    limit: int | None = None
    """Use only so many of the images, chosen by the seed."""
    image_size: int = 32
    """Width and height of a view, in pixels."""
    channels: Literal[1, 3] = 3
    """1 for gray images, 3 for colour."""
    normalization: str = "cifar10"
    """What the pixels are normalised by: cifar10, imagenet, or measure (mean and deviation of one's own data)."""
    bad_share: float = 0.01
    """Stop when more than this share of the images cannot be read; up to it they are replaced and named in quarantine.txt."""

    encoder: str = "small"
    """What is trained: small, resnet18-cifar, any classifier of torchvision by name, or timm:NAME."""
    init: Path | None = None
    """Start the encoder from these weights: a file of dssl, torchvision or timm."""
    method: MethodConfig = field(default_factory=SimSiamConfig)
    """simsiam, byol or simclr."""
    graph: str = "dssl"
    """The view graph: a preset such as dssl, standard2 or heavy, or its text (see dssl graph)."""
    standard: str = "standard-cifar"
    """The policy of standard views."""
    heavy: str = "ra(2,5)"
    """The policy of heavy views."""

    epochs: int = 100
    batch_size: int = 256
    """Images in a step over all processes together."""
    accumulate: int = 1
    """Refused above 1: accumulating gradients would not give what the larger batch gives."""
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    precision: Precision = "auto"
    """auto measures whether bf16 is faster here, and says what it chose."""
    compile: bool = False
    """Use torch.compile."""
    tf32: bool = False
    """Allow TF32 on GPUs that have it."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    threads: int | None = None
    """Threads that decode images and make views; as many as there are cores by default."""
    batchnorm_across_ranks: bool = True
    """With several processes, let BatchNorm see the whole batch, so that the number of processes changes nothing."""

    knn_every: int = 5
    """Measure kNN accuracy every so many epochs, where the data has labels and a test split; 0 never."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)

    def __post_init__(self) -> None:
        from dssl.augment import parse
        from dssl.presets import named_graph

        for name in ("image_size", "epochs"):
            _between(name, getattr(self, name), LARGEST[name])
        _require(self.batch_size >= 2, "batch_size", self.batch_size, "at least 2: BatchNorm needs more than one image")
        _require(self.limit is None or self.limit >= 2, "limit", self.limit, "at least 2")
        _require(0 <= self.bad_share < 1, "bad_share", self.bad_share, "a number from 0 to below 1")
        _require(self.knn_every >= 0, "knn_every", self.knn_every, "0 or more")
        if self.threads is not None:
            _between("threads", self.threads, LARGEST["threads"])
        _require(
            self.normalization in ("cifar10", "imagenet", "measure"),
            "normalization", self.normalization, "cifar10, imagenet or measure",
        )  # fmt: skip
        if self.accumulate != 1:
            raise DsslError(
                f"accumulate is {self.accumulate}: BatchNorm in the heads (and SimCLR's negatives) would see the small "
                "batches, so the result would not be that of the large one; lower batch_size and the rate follows it"
            )
        graph = named_graph(self.graph)
        parse(self.standard)
        parse(self.heavy)
        for view in graph.views:
            if view.policy not in ("standard", "heavy"):
                parse(view.policy)
        if self.optimizer.warmup_epochs > self.epochs:
            raise DsslError(
                f"optimizer.warmup_epochs is {self.optimizer.warmup_epochs:g}, "
                f"expected at most the {self.epochs} epochs of the run"
            )
