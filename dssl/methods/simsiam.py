"""SimSiam: a predictor on one side, a stop-gradient on the other (Chen and He, CVPR 2021)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from dssl.errors import DsslError
from dssl.graph import ViewGraph
from dssl.methods.heads import mlp, simsiam_projector
from dssl.methods.losses import narrowness, negative_cosine
from dssl.methods.method import Cost, Declaration, Defaults, Prediction, WithPredictor, only_targets, pairs
from dssl.settings import LARGEST, MethodSettings, between, finite
from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, kw_only=True)
class SimSiamConfig(MethodSettings):
    """SimSiam's heads; the defaults are those of CIFAR-10."""

    projector_layers: Literal[2, 3] = 2
    """Layers of the projector: 2 on CIFAR-10, 3 on ImageNet."""
    hidden: int = 2048
    """Width of the projector's hidden layers."""
    output: int = 2048
    """Width of the projection."""
    bottleneck: int = 512
    """Width of the predictor's hidden layer."""
    predictor: Literal["shared", "per-kind"] = "shared"
    """One predictor for all views, or one for standard and one for heavy views (per-kind)."""
    guard: float = 0.0
    """Weight of a variance term that keeps every view's predictions apart, against collapse with any graph; 1 is a good start."""

    def __post_init__(self) -> None:
        finite("method.guard", self.guard)
        for name in ("hidden", "output", "bottleneck"):
            between(f"method.{name}", getattr(self, name), LARGEST["head"])


class SimSiam(WithPredictor):
    """Defaults are those of CIFAR-10; ImageNet has ``projector_layers=3``."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int,
        projector_layers: int = 2,
        hidden: int = 2048,
        output: int = 2048,
        bottleneck: int = 512,
        predictor: Literal["shared", "per-kind"] = "shared",
        guard: float = 0.0,
    ) -> None:
        if projector_layers not in (2, 3):
            raise DsslError(f"SimSiam's projector has {projector_layers} layers, expected 2 (CIFAR) or 3 (ImageNet)")
        projector = simsiam_projector(feature_dim, hidden=hidden, output=output, layers=projector_layers)
        super().__init__(encoder, projector, lambda: mlp(output, bottleneck, output), per_kind=predictor == "per-kind")
        self.guard = guard

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y is never given a gradient here, whatever the edge says: that is what keeps SimSiam from collapsing."""
        if prediction is not None:
            return prediction.projection.detach()
        with torch.no_grad():
            projection: Embedding = self.projector(self.encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return negative_cosine(prediction.prediction, target)

    def regularise(self, prediction: Prediction) -> "Scalar | None":
        # not the projections, which the projector's last BatchNorm keeps apart whatever they carry
        return self.guard * narrowness(prediction.prediction) if self.guard else None


def cost(graph: ViewGraph) -> Cost:
    """A view that predicts is its own target; one that is only a target passes without gradient."""
    return Cost(len(graph.predictors), len(only_targets(graph)), pairs(quadratic=0, linear=len(graph.active_edges)))


METHOD = Declaration(
    name="simsiam",
    build=SimSiam,
    settings=SimSiamConfig,
    cost=cost,
    # a last BatchNorm keeps the projections apart whatever they carry; a collapse shows in the predictions
    predictions_judged_from=0,
    recipes={
        "shapes": Defaults(settings={"hidden": 256, "output": 128, "bottleneck": 64}),
        "imagenet": Defaults(settings={"projector_layers": 3}),
    },
)
