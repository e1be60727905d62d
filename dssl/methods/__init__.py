"""What can be known of a method without torch: its name, what a step of it costs, and its settings.

A class of settings belongs to one method, a file of its name in this package. Commands that train nothing read only this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dssl.errors import LARGEST, require, within
from dssl.graph import ViewGraph
from dssl.graph.schedule import Cost, Step, cost, schedule

WIDTH = f"[1, {LARGEST['head']}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How a method departs from a recipe's defaults, as plain settings."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The settings of a method, its flags under ``--method.``; each method derives its own."""

    name: ClassVar[str] = ""
    targets_learn: ClassVar[bool] = True
    """Whether gradient flows into a target that its edge does not detach; SimSiam and BYOL: never."""
    own_target_network: ClassVar[bool] = False
    """Whether targets share no module with predictions: they are then computed first, and a step needs the memory of one view."""
    compares_all_pairs: ClassVar[bool] = False
    """Whether S compares every image of the batch with every other."""
    predictions_checked_from: ClassVar[int | None] = None
    """The step from which the health check looks at the predictions, too; None: never."""
    recipes: ClassVar[Mapping[str, Defaults]] = {}
    """By the name of the recipe."""

    def check(self, interval: str, *names: str) -> None:
        """Refuse values outside an interval.

        Args:
            interval: Such as ``[0, 1)``.
            *names: The settings that have these values.
        """
        for name in names:
            within(f"method.{name}", vars(self)[name], interval)

    def loss_of_guessing(self) -> float | None:
        """The similarity of a prediction that is the same for every image, if it is one number; the health check asks."""
        return None

    @classmethod
    def schedule(cls, graph: ViewGraph) -> tuple[Step, ...]:
        """What a training step does, in order.

        Args:
            graph: Of the views.
        """
        return schedule(graph, targets_learn=cls.targets_learn, own_target_network=cls.own_target_network)

    @classmethod
    def cost(cls, graph: ViewGraph) -> Cost:
        """What a training step costs.

        Args:
            graph: Of the views.
        """
        own, squares = cls.own_target_network, cls.compares_all_pairs
        return cost(graph, cls.schedule(graph), own_target_network=own, compares_all_pairs=squares)


def _lars(rate: float, weight_decay: float) -> dict[str, Any]:
    return {
        "name": "lars", "rate": rate, "weight_decay": weight_decay, "decay_norms_and_biases": False, "warmup_epochs": 10.0
    }  # fmt: skip


_ADAMW: dict[str, Any] = {"name": "adamw", "rate": 4e-3, "weight_decay": 0.05}


@dataclass(frozen=True, kw_only=True)
class SimSiamConfig(MethodSettings):
    """SimSiam's heads; the defaults are those of CIFAR-10."""

    name = "simsiam"
    targets_learn = False
    # a last BatchNorm keeps the projections apart whatever they carry; a collapse shows in the predictions
    predictions_checked_from = 0
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 256, "output": 128, "bottleneck": 64}),
        "imagenet": Defaults(settings={"projector_layers": 3}),
    }

    projector_layers: Literal[2, 3] = 2
    """Layers of the projector: 2 on CIFAR-10, 3 on ImageNet."""
    hidden: int = 2048
    """Width of the projector's hidden layers."""
    output: int = 2048
    """Width of the projection."""
    bottleneck: int = 512
    """Width of the predictor's hidden layer."""
    predictor: Literal["shared", "per-kind"] = "shared"
    """One predictor for all views, or with per-kind one for standard and one for heavy views."""
    guard: float = 0.0
    """Weight of a variance term that keeps every view's predictions apart, against collapse with any graph; 1 is a good start.
    Also --guard."""

    def __post_init__(self) -> None:
        require(self.projector_layers in (2, 3), "method.projector_layers", self.projector_layers, "2 or 3")
        self.check(WIDTH, "hidden", "output", "bottleneck")
        self.check("[0, inf)", "guard")


@dataclass(frozen=True, kw_only=True)
class BYOLConfig(MethodSettings):
    """BYOL's heads and moving average."""

    name = "byol"
    targets_learn = False
    own_target_network = True
    # the predictor learns the mean of its targets first and the images later: healthy predictions start out as one
    predictions_checked_from = 1000
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512, "output": 128, "momentum": 0.99})
    }

    hidden: int = 4096
    """Width of the hidden layers of projector and predictor."""
    output: int = 256
    """Width of the projection."""
    momentum: float = 0.996
    """Momentum of the target at the start; it grows to 1 along a cosine."""
    predictor: Literal["shared", "per-kind"] = "shared"
    """One predictor for all views, or with per-kind one for standard and one for heavy views."""
    guard: float = 0.0
    """Weight of a variance term that keeps every view's projections apart, against collapse with any graph; 1 is a good start.
    Also --guard."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "hidden", "output")
        self.check("[0, 1]", "momentum")
        self.check("[0, inf)", "guard")


@dataclass(frozen=True, kw_only=True)
class SimCLRConfig(MethodSettings):
    """SimCLR's head and temperature."""

    name = "simclr"
    compares_all_pairs = True
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "cifar10": Defaults(optimizer=_lars(1.0, 1e-6)),
        "adapt": Defaults(settings={"temperature": 0.2}),
        "folder": Defaults(settings={"temperature": 0.2}, optimizer={"rate": 0.4}),  # LARS is for large batches
        "imagenet": Defaults(settings={"temperature": 0.1}, optimizer=_lars(0.3, 1e-6)),
    }

    output: int = 128
    """Width of the projection."""
    temperature: float = 0.5
    """0.5 on CIFAR-10, 0.1 on ImageNet."""
    decoupled: bool = False
    """Leave the other view of the same image out of the denominator (DCL), which helps with small batches."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "output")
        self.check("(0, inf)", "temperature")


@dataclass(frozen=True, kw_only=True)
class MoCoConfig(MethodSettings):
    """MoCo v3's heads, temperature and moving average."""

    name = "moco"
    targets_learn = False
    own_target_network = True
    compares_all_pairs = True
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512, "output": 128}),
        # as solo-learn has it for CIFAR-10
        "cifar10": Defaults(optimizer=_lars(0.3, 1e-6)),
        "folder": Defaults(optimizer=_ADAMW),
        # the authors' for 100 epochs of ResNet-50
        "imagenet": Defaults(settings={"temperature": 1.0}, optimizer=_lars(0.6, 1e-6)),
    }

    hidden: int = 4096
    """Width of the hidden layers of projector and predictor."""
    output: int = 256
    """Width of the projection."""
    temperature: float = 0.2
    """0.2 on CIFAR-10, 1 with ResNet-50 on ImageNet."""
    momentum: float = 0.99
    """Momentum of the target at the start; it grows to 1 along a cosine."""
    predictor: Literal["shared", "per-kind"] = "shared"
    """One predictor for all views, or with per-kind one for standard and one for heavy views."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "hidden", "output")
        self.check("(0, inf)", "temperature")
        self.check("[0, 1]", "momentum")


@dataclass(frozen=True, kw_only=True)
class VICRegConfig(MethodSettings):
    """VICReg's expander and the weights of its three terms."""

    name = "vicreg"
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512, "output": 512}),
        "cifar10": Defaults(optimizer=_lars(0.3, 1e-4)),
        "imagenet": Defaults(settings={"hidden": 8192, "output": 8192}, optimizer=_lars(0.2, 1e-6)),
    }

    hidden: int = 2048
    """Width of the expander's two hidden layers."""
    output: int = 2048
    """Width of the expander's output."""
    invariance: float = 25.0
    """Weight of the squared distance between views: the loss of an edge."""
    variance: float = 25.0
    """Weight of what a view's standard deviations lack to 1."""
    covariance: float = 1.0
    """Weight of a view's squared covariances."""
    regularize: Literal["similarity", "all"] = "similarity"
    """Which views get the variance and covariance terms: those that predict along a similarity edge, or all that predict."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "hidden", "output")
        self.check("[0, inf)", "invariance", "variance", "covariance")


@dataclass(frozen=True, kw_only=True)
class BarlowTwinsConfig(MethodSettings):
    """Barlow Twins' projector and the weight of its second term."""

    name = "barlowtwins"
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512, "output": 512}),
        "cifar10": Defaults(optimizer=_lars(0.3, 1e-4)),
        "imagenet": Defaults(settings={"hidden": 8192, "output": 8192, "scale": 0.024}, optimizer=_lars(0.2, 1.5e-6)),
    }

    hidden: int = 2048
    """Width of the projector's two hidden layers."""
    output: int = 2048
    """Width of the projection."""
    redundancy: float = 0.0051
    """Weight of the squared correlations between different dimensions."""
    scale: float = 0.1
    """The loss is multiplied by this; it grows with the width of the projection."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "hidden", "output")
        self.check("[0, inf)", "redundancy")
        self.check("(0, inf)", "scale")


@dataclass(frozen=True, kw_only=True)
class LeJEPAConfig(MethodSettings):
    """LeJEPA's projector, and what keeps the embeddings of a view apart."""

    name = "lejepa"
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512}),
        # the authors' for ResNets: AdamW, 5e-4 and a decay of 5e-4, whatever the batch; a rate here is for 256 images
        "cifar10": Defaults(optimizer=_ADAMW | {"rate": 2.5e-4, "weight_decay": 5e-4}),
        "folder": Defaults(optimizer=_ADAMW | {"rate": 1e-3, "weight_decay": 5e-4}),
        "imagenet": Defaults(settings={"slices": 1024}, optimizer=_ADAMW | {"rate": 2.5e-4, "weight_decay": 5e-4}),
    }

    hidden: int = 2048
    """Width of the projector's two hidden layers."""
    output: int = 64
    """Width of the projection."""
    weight: float = 0.02
    """Weight of the regularizer; the distance between views has 1 minus this. For visreg 0.6 (small data) to 0.9."""
    slices: int = 256
    """Random directions along which the embeddings are compared with a Gaussian, new ones in each step."""
    regularizer: Literal["sigreg", "visreg"] = "sigreg"
    """LeJEPA's sketched Gaussian test, or VISReg's mean, variance and sliced distance to a Gaussian."""

    def __post_init__(self) -> None:
        self.check(WIDTH, "hidden", "output", "slices")
        self.check("[0, 1]", "weight")


@dataclass(frozen=True, kw_only=True)
class PrototypesConfig(MethodSettings):
    """What SwAV and DINO have in common: a projector, prototypes, and how targets are balanced and sharpened."""

    targets_learn = False

    projector_layers: Literal[2, 3] = 2
    """Layers of the projector."""
    hidden: int = 2048
    """Width of the projector's hidden layers."""
    output: int = 128
    """Width of the projection."""
    prototypes: int = 512
    """Number of prototypes: more for more images and larger batches."""
    temperature: float = 0.1
    """Of the predictions."""
    target_temperature: float = 0.03
    """Of the targets, at the start; lower is sharper, and what is too soft fades to equal scores."""
    final_target_temperature: float = 0.03
    """Of the targets, after the first 30% of the run."""
    balance: Literal["sinkhorn", "center"] = "sinkhorn"
    """What keeps all images from going to one prototype: equal shares of the batch, or a centre that moves with the targets."""

    def __post_init__(self) -> None:
        require(self.projector_layers in (2, 3), "method.projector_layers", self.projector_layers, "2 or 3")
        self.check(WIDTH, "hidden", "output", "prototypes")
        self.check("(0, inf)", "temperature", "target_temperature", "final_target_temperature")

    def loss_of_guessing(self) -> float:
        return math.log(self.prototypes)


@dataclass(frozen=True, kw_only=True)
class SwAVConfig(PrototypesConfig):
    """SwAV: balanced assignments of the batch itself are the targets."""

    name = "swav"
    recipes: ClassVar[Mapping[str, Defaults]] = {
        "shapes": Defaults(settings={"hidden": 512, "prototypes": 128}, optimizer=_ADAMW),
        # as solo-learn has it for CIFAR-10, without its queue
        "cifar10": Defaults(settings={"prototypes": 3000}, optimizer=_lars(0.6, 1e-6)),
        "folder": Defaults(optimizer=_ADAMW),
        # the authors': 4.8 for 4,096 images
        "imagenet": Defaults(settings={"prototypes": 3000}, optimizer=_lars(0.3, 1e-6)),
    }


@dataclass(frozen=True, kw_only=True)
class DINOConfig(PrototypesConfig):
    """DINO: a moving average makes the targets."""

    name = "dino"
    own_target_network = True
    recipes: ClassVar[Mapping[str, Defaults]] = {
        # short runs at four times this rate collapsed
        "shapes": Defaults(
            settings={"hidden": 512, "output": 128, "prototypes": 128, "momentum": 0.99},
            optimizer=_ADAMW | {"rate": 2e-3},
        ),
        # as solo-learn has it for CIFAR-10
        "cifar10": Defaults(settings={"prototypes": 4096, "momentum": 0.9995}, optimizer=_lars(0.3, 1e-6)),
        "folder": Defaults(optimizer=_ADAMW | {"rate": 1e-3}),
        # the authors' for ResNet-50
        "imagenet": Defaults(settings={"prototypes": 65536}, optimizer={"rate": 0.03}),
    }

    projector_layers: Literal[2, 3] = 3
    output: int = 256
    target_temperature: float = 0.04
    final_target_temperature: float = 0.04
    balance: Literal["sinkhorn", "center"] = "center"
    momentum: float = 0.996
    """Momentum of the target network at the start; it grows to 1 along a cosine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("[0, 1]", "momentum")


@dataclass(frozen=True, kw_only=True)
class RelationConfig:
    """Relation edges, such as h1->s1[relation], of whatever method."""

    temperature: float = 0.1
    """Temperature of the predictions of relation edges."""
    target_temperature: float = 0.04
    """Temperature of their targets; lower is sharper."""
    queue: int = 0
    """Also relate images to this many targets of earlier steps; 0: only to the other images of the batch."""

    def __post_init__(self) -> None:
        for name in ("temperature", "target_temperature"):
            within(f"relation.{name}", vars(self)[name], "(0, inf)")
        within("relation.queue", self.queue, f"[0, {LARGEST['queue']}]")


@dataclass(frozen=True, kw_only=True)
class MatchConfig(MethodSettings):
    """Matching has no settings: features are compared with those of a frozen copy of the start."""

    name = "match"
    targets_learn = False
    own_target_network = True


METHODS: dict[str, type[MethodSettings]] = {
    settings.name: settings
    for settings in (
        SimSiamConfig, BYOLConfig, MoCoConfig, SimCLRConfig, VICRegConfig, BarlowTwinsConfig, LeJEPAConfig, SwAVConfig,
        DINOConfig, MatchConfig,
    )
}  # fmt: skip
"""By name; a method of a plugin adds its own."""
