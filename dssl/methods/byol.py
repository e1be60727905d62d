"""BYOL: the target is a moving average of the online network (Grill et al., NeurIPS 2020)."""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dssl.errors import DsslError
from dssl.graph import ViewGraph
from dssl.methods.heads import mlp
from dssl.methods.losses import narrowness, squared_distance
from dssl.methods.method import Cost, Declaration, Defaults, Prediction, WithPredictor, pairs
from dssl.settings import LARGEST, MethodSettings, between, finite, require
from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, kw_only=True)
class BYOLConfig(MethodSettings):
    """BYOL's heads and moving average."""

    hidden: int = 4096
    """Width of the hidden layers of projector and predictor."""
    output: int = 256
    """Width of the projection."""
    momentum: float = 0.996
    """Momentum of the target at the start; it grows to 1 along a cosine."""
    predictor: Literal["shared", "per-kind"] = "shared"
    """One predictor for all views, or one for standard and one for heavy views (per-kind)."""
    guard: float = 0.0
    """Weight of a variance term that keeps every view's projections apart, against collapse with any graph; 1 is a good start."""

    def __post_init__(self) -> None:
        for name in ("hidden", "output"):
            between(f"method.{name}", getattr(self, name), LARGEST["head"])
        require(0 <= self.momentum <= 1, "method.momentum", self.momentum, "a number between 0 and 1")
        finite("method.guard", self.guard)


class BYOL(WithPredictor):
    """The same heads on CIFAR-10 and ImageNet.

    The moving average is over parameters. Buffers (BatchNorm's running statistics) are the target's own: in training it
    normalises by the batch that it sees, as the original does, and its statistics follow from that; they are never copied.
    """

    own_target_network = True

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int,
        hidden: int = 4096,
        output: int = 256,
        momentum: float = 0.996,
        predictor: Literal["shared", "per-kind"] = "shared",
        guard: float = 0.0,
    ) -> None:
        if not 0 <= momentum <= 1:
            raise DsslError(f"BYOL's momentum is {momentum}, expected a number between 0 and 1")
        projector = mlp(feature_dim, hidden, output)
        super().__init__(encoder, projector, lambda: mlp(output, hidden, output), per_kind=predictor == "per-kind")
        self.target_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.momentum = momentum
        self.guard = guard

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """The target network has no gradient, so the online forward of the same view is of no use to it."""
        with torch.no_grad():
            projection: Embedding = self.target_projector(self.target_encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return squared_distance(prediction.prediction, target)

    def regularise(self, prediction: Prediction) -> "Scalar | None":
        return self.guard * narrowness(prediction.projection) if self.guard else None

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        """target = momentum * target + (1 - momentum) * online, all tensors in one call; the momentum grows to 1."""
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        target: list[Tensor] = [*self.target_encoder.parameters(), *self.target_projector.parameters()]
        momentum = 1 - (1 - self.momentum) * (math.cos(math.pi * step / total) + 1) / 2
        torch._foreach_lerp_(target, online, 1 - momentum)


def cost(graph: ViewGraph) -> Cost:
    """The online network sees the views that predict, the momentum network those that are a target."""
    return Cost(len(graph.predictors), len(graph.targets), pairs(quadratic=0, linear=len(graph.active_edges)))


METHOD = Declaration(
    name="byol",
    build=BYOL,
    settings=BYOLConfig,
    cost=cost,
    # the predictor learns the mean of its targets first and the images later: healthy predictions start out as one
    predictions_judged_from=1000,
    recipes={"shapes": Defaults(settings={"hidden": 512, "output": 128, "momentum": 0.99})},
)
