"""Everything that defines a run, as frozen dataclasses: the docstring under a field is its help, invalid values are errors here.

``dssl train RECIPE`` starts from a recipe's full configuration; each field is a flag of the same name.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dssl.errors import LARGEST, LEAST, DsslError, InvalidSetting, require, within
from dssl.methods import MethodSettings, RelationConfig, SimSiamConfig

if TYPE_CHECKING:
    from dssl.graph import ViewGraph

Precision = Literal["auto", "bf16", "fp16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser and its schedule: linear warm-up, then a cosine to zero."""

    name: Literal["sgd", "lars", "adamw"] = "sgd"
    """SGD with momentum, LARS (large batches), or AdamW (vision transformers)."""
    rate: float = 0.03
    """Base learning rate, also --lr; the peak rate is this times batch size / 256."""
    momentum: float = 0.9
    """Momentum of SGD and LARS; the first beta of AdamW."""
    weight_decay: float = 5e-4
    """Weight decay."""
    decay_norms_and_biases: bool = True
    """Also decay norms and biases, as SimSiam does; LARS adapts their rate only with this on."""
    fixed_predictor_rate: bool = False
    """Keep the predictor's rate constant, as SimSiam's ImageNet code does; the paper does not."""
    warmup_epochs: float = 10.0
    """Epochs of linear warm-up."""
    clip: float | None = None
    """Clip the norm of the gradient to this value."""

    def __post_init__(self) -> None:
        within("optimizer.rate", self.rate, "(0, inf)")
        within("optimizer.momentum", self.momentum, "[0, 1)")
        within("optimizer.weight_decay", self.weight_decay, "[0, inf)")
        within("optimizer.warmup_epochs", self.warmup_epochs, "[0, inf)")
        within("optimizer.clip", self.clip, "(0, inf)")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run saves itself, and what it keeps. None of this changes a result."""

    every_epochs: int = 1
    """Save every N epochs; the last epoch is always saved."""
    every_minutes: float = 15.0
    """Also save within an epoch when this many minutes have passed since the last save."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep the checkpoint of every N-th epoch permanently."""

    def __post_init__(self) -> None:
        within("checkpoint.every_epochs", self.every_epochs, "[1, inf)")
        within("checkpoint.every_minutes", self.every_minutes, "(0, inf)")
        within("checkpoint.keep", self.keep, "[1, inf)")
        within("checkpoint.keep_every", self.keep_every, "[1, inf)")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """The health check of a run."""

    stop: bool = False
    """Stop the run when it has collapsed; a NaN always stops it."""
    every: int = 20
    """Check for collapse every N steps."""
    compare_with_start: bool = True
    """Measure the encoder before the first step and whenever kNN is measured, to see whether it has become better."""

    def __post_init__(self) -> None:
        within("health.every", self.every, "[1, inf)")


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """Continued pretraining: an encoder that starts from good weights keeps most of them."""

    head_epochs: int = 5
    """Train only the heads for the first N epochs: the gradients of random heads would damage the encoder."""
    trained_blocks: int | None = 2
    """Train only the last N blocks of the encoder; none trains all of them."""
    encoder_rate: float = 1.0
    """The encoder's learning rate as a fraction of the heads' rate."""
    layer_decay: float = 1.0
    """Layer-wise decay: the rate of a block is this times the rate of the next block towards the output."""
    average: float = 0.25
    """Average the encoder over this final fraction of the steps in which it learns; 0 takes the last weights."""
    max_drift: float | None = 0.2
    """Move from the start towards the average only until features drift by this much (1 - mean cosine); none: all the way."""
    evaluation_size: int = 128
    """Size at which whole images are measured and embedded; larger than the views, because crops enlarge what they show.
    Transformers, which are built for one size, keep the size of the views."""

    def __post_init__(self) -> None:
        within("adapt.head_epochs", self.head_epochs, "[0, inf)")
        blocks = self.trained_blocks
        require(blocks is None or blocks >= 1, "adapt.trained_blocks", blocks, "at least 1, or none for all")
        within("adapt.encoder_rate", self.encoder_rate, "(0, inf)")
        within("adapt.layer_decay", self.layer_decay, "(0, 1]")
        within("adapt.average", self.average, "[0, 1]")
        within("adapt.max_drift", self.max_drift, "(0, inf)")
        within("adapt.evaluation_size", self.evaluation_size, f"[1, {LARGEST['image_size']}]")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A pretraining run."""

    HARMLESS: ClassVar[tuple[str, ...]] = (
        "checkpoint.", "health.", "threads", "torch_threads", "minutes", "knn_every", "bad_share", "checkpoint_activations",
    )  # fmt: skip
    """Settings that a resumed run may change, since no weight depends on them."""

    data: str = "shapes"
    """Images: shapes, shapes:2000, cifar10:FOLDER, a folder of images, a text file that lists them, or shards (tar, Parquet)."""
    limit: int | None = None
    """Use only N of the images, chosen by the seed."""
    shuffle: Literal["images", "shards"] | None = None
    """images: random over all images, the default; shards: a few shards at a time, for slow disks and for Parquet."""
    window: int | None = None
    """With --shuffle shards: how many shards are mixed at a time; 16 by default."""
    image_size: int = 32
    """Width and height of a view, in pixels."""
    channels: int = 3
    """1 for gray images, 3 for colour; any other number for TIFF, PNG and NPY files with that many channels."""
    range: str | None = None
    """For images that are not photographs: the values that become black and white, such as 0,4095, or percentiles to measure,
    such as 1%,99% (the default if channels is neither 1 nor 3); a pair for each channel: 0,4095;0,10000."""
    normalization: str = "cifar10"
    """Pixel normalisation: cifar10, imagenet (with --init, what the weights need), or measure, which takes the mean and
    deviation of your images."""
    bad_share: float = 0.01
    """Stop if more than this share of the images is unreadable; up to it, other images replace them, and quarantine.txt lists
    them."""

    encoder: str = "small"
    """The network to train: whitened, whitened-quadrants or small (for CPUs), resnet18-cifar, any torchvision classifier, or
    timm:NAME."""
    init: Path | None = None
    """Start from these weights: imagenet (torchvision's or timm's), or a file of dssl, torchvision or timm."""
    teacher: Path | None = None
    """Weights of the frozen teacher of edges such as s1->teacher(s1): a run, or a file of dssl, torchvision or timm."""
    teacher_encoder: str | None = None
    """The teacher's encoder, if its file does not name it: resnet50, resnet18-cifar-padding2 or timm:NAME."""
    method: MethodSettings = field(default_factory=SimSiamConfig)
    """The method: simsiam, byol, moco, simclr, vicreg, barlowtwins, lejepa, swav, dino or match."""
    relation: RelationConfig = field(default_factory=RelationConfig)
    graph: str = "dssl"
    """The view graph: a preset such as dssl, standard2 or heavy, or its text; dssl graph shows it."""
    standard: str = "standard-cifar"
    """The policy of standard views; dssl views shows policies on your images."""
    heavy: str = "ra(2,5)"
    """The policy of heavy views."""

    epochs: int = 100
    """Passes over the images. A finished run continues if you give it more."""
    minutes: float | None = None
    """Fit the run to this time: its speed is measured, and the number of epochs follows. On a CPU the recipe folder also chooses
    the encoder and the image size."""
    schedule_from: int = 0
    """The epoch at which warm-up and cosine begin again; dssl sets it when you give a finished run more epochs."""
    batch_size: int = 256
    """Images per step, over all processes."""
    seed: int = 0
    """Determines the first weights, the order of the images and their views."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    precision: Precision = "auto"
    """auto measures whether bf16 is faster here and reports its choice; fp16 scales the loss, for GPUs without bf16."""
    checkpoint_activations: bool = False
    """Keep only the input of each encoder block and recompute the rest: less memory, about a third more time."""
    compile: bool = False
    """Use torch.compile."""
    tf32: bool = False
    """Allow TF32 on GPUs that support it."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto: CUDA, else Apple's GPU, else the CPU."""
    threads: int | None = None
    """Threads that decode images and make views; by default the node's cores, divided among its processes."""
    torch_threads: int | None = None
    """Threads that compute on a CPU; by default torch's choice, or the faster of one and all if the speed is measured."""
    batchnorm_across_ranks: bool = True
    """With several processes, BatchNorm sees the global batch, so that results do not depend on their number."""

    knn_every: int = 5
    """Measure kNN accuracy every N epochs if the data has labels and a test split; 0 for never."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    adapt: AdaptConfig | None = None
    """How an encoder that starts from weights is adapted; the recipes adapt and robust have it."""

    @cached_property
    def view_graph(self) -> "ViewGraph":
        """The graph that the text stands for."""
        from dssl.graph import named_graph

        return named_graph(self.graph)

    @property
    def python_objects(self) -> tuple[str, ...]:
        """Which of data and encoder were objects of a Python program, so that only its call can give them again."""
        return tuple(name for name in ("data", "encoder") if vars(self)[name].startswith("python:"))

    @property
    def starts_as_given(self) -> bool:
        """Whether the encoder is a module of Python whose own weights are those of the start."""
        return self.init is not None and str(self.init) == self.encoder

    @property
    def head_epochs(self) -> int:
        """Epochs at the beginning in which the encoder does not learn."""
        return 0 if self.adapt is None else self.adapt.head_epochs

    def __post_init__(self) -> None:
        from dssl.augment import check_channels, meanings_of, parse
        from dssl.data.scale import MAX_CHANNELS, parse_range

        for name in ("image_size", "epochs", "threads"):
            within(name, vars(self)[name], f"[{LEAST.get(name, 1)}, {LARGEST[name]}]")
        within("torch_threads", self.torch_threads, f"[1, {LARGEST['threads']}]")
        within("minutes", self.minutes, "(0, inf)")
        within("schedule_from", self.schedule_from, f"[0, {self.epochs})")
        require(self.batch_size >= 2, "batch_size", self.batch_size, "at least 2: BatchNorm needs more than one image")
        within("limit", self.limit, "[2, inf)")
        within("window", self.window, "[1, inf)")
        within("bad_share", self.bad_share, "[0, 1)")
        within("knn_every", self.knn_every, "[0, inf)")
        within("channels", self.channels, f"[1, {MAX_CHANNELS}]")
        require(self.window is None or self.shuffle == "shards", "window", self.window, "none without --shuffle shards")
        require(
            self.normalization in ("cifar10", "imagenet", "measure"),
            "normalization", self.normalization, "cifar10, imagenet or measure",
        )  # fmt: skip
        if self.compile and self.checkpoint_activations:
            raise DsslError("compile and checkpoint_activations do not work together: choose one")
        graph = self.view_graph
        taught = next((edge.name for edge in graph.active_edges if edge.is_taught), None)
        if taught is not None and self.teacher is None:
            raise DsslError(f"the graph has the edge {taught}: give the teacher's weights with --teacher")
        if taught is None and (self.teacher or self.teacher_encoder) is not None:
            problem = (
                "but no edge of the graph ends at a teacher: add one such as s1->teacher(s1), or leave the teacher out"
            )
            raise InvalidSetting("teacher", f"is {self.teacher or self.teacher_encoder}, {problem}")
        if self.relation != RelationConfig() and not any(edge.kind == "relation" for edge in graph.active_edges):
            raise InvalidSetting(
                "relation", "has settings, but no edge of the graph is a relation: add one such as h1->s1[relation]"
            )
        parse_range(self.range, channels=self.channels)
        require(
            self.channels in (1, 3) or self.normalization == "measure",
            "normalization", self.normalization, f"measure for images of {self.channels} channels",
        )  # fmt: skip
        meanings = meanings_of({"standard": self.standard, "heavy": self.heavy})
        for policy in ("standard", "heavy", *(view.policy for view in graph.views)):
            check_channels(parse(policy, names=meanings), self.channels)
        if self.adapt is not None and self.init is None:
            raise DsslError("adapt starts from weights, and none are given: name them, as in --init imagenet")
        if self.head_epochs >= self.epochs:
            problem = f"is {self.head_epochs}, expected fewer than the {self.epochs} epochs of the run"
            raise InvalidSetting("adapt.head_epochs", problem)
        epochs = self.epochs - max(self.head_epochs, self.schedule_from)
        if self.optimizer.warmup_epochs > epochs:
            left = f"{epochs} epoch{'s' if epochs != 1 else ''} {'of' if epochs == self.epochs else 'that are left in'} the run"
            problem = f"is {self.optimizer.warmup_epochs:g}, expected at most the {left}, such as {epochs / 10:g}"
            raise InvalidSetting("optimizer.warmup_epochs", problem)
