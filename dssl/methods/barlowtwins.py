"""Barlow Twins: a dimension of one view correlates with the same one of the other, and no other (Zbontar et al., ICML 2021)."""

from dataclasses import dataclass

from torch import nn

from dssl.methods.heads import mlp
from dssl.methods.losses import correlation
from dssl.methods.method import Declaration, Defaults, Prediction, WithoutPredictor, attached_cost
from dssl.settings import LARGEST, MethodSettings, between, finite
from dssl.types import Embedding, Scalar


@dataclass(frozen=True, kw_only=True)
class BarlowTwinsConfig(MethodSettings):
    """Barlow Twins' projector and the weight of its second term."""

    hidden: int = 2048
    """Width of the projector's two hidden layers."""
    output: int = 2048
    """Width of the projection."""
    redundancy: float = 0.0051
    """Weight of the squared correlations between different dimensions."""
    scale: float = 0.1
    """The loss is multiplied by this; it grows with the width of the projection."""

    def __post_init__(self) -> None:
        for name in ("hidden", "output"):
            between(f"method.{name}", getattr(self, name), LARGEST["head"])
        finite("method.redundancy", self.redundancy)
        finite("method.scale", self.scale, strictly=True)


class BarlowTwins(WithoutPredictor):
    """On one standard pair this is the original loss. There is no predictor: the prediction is the projection."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int,
        hidden: int = 2048,
        output: int = 2048,
        redundancy: float = 0.0051,
        scale: float = 0.1,
    ) -> None:
        super().__init__(encoder, mlp(feature_dim, hidden, hidden, output, bias=False))
        self.redundancy, self.scale = redundancy, scale

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        matrix = correlation(prediction.projection, target)
        same = matrix.diagonal()
        different = (matrix - same.diag()).square().sum()
        return self.scale * ((1 - same).square().sum() + self.redundancy * different)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The first term alone: a heavy view follows its target and spreads nothing out."""
        same = correlation(prediction.projection, target).diagonal()
        return self.scale * (1 - same).square().sum()


_LARS = {"name": "lars", "weight_decay": 1e-4, "decay_norms_and_biases": False, "warmup_epochs": 10.0}

METHOD = Declaration(
    name="barlowtwins",
    build=BarlowTwins,
    settings=BarlowTwinsConfig,
    cost=attached_cost(quadratic=False),
    recipes={
        "shapes": Defaults(settings={"hidden": 512, "output": 512}),
        "cifar10": Defaults(optimizer={**_LARS, "rate": 0.3}),
        "imagenet": Defaults(
            settings={"hidden": 8192, "output": 8192, "scale": 0.024},
            optimizer={**_LARS, "rate": 0.2, "weight_decay": 1.5e-6},
        ),
    },
)
