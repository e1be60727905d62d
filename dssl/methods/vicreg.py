"""VICReg: views agree while each keeps its own variance and decorrelates its dimensions (Bardes, Ponce, LeCun, ICLR 2022)."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from dssl.methods.heads import mlp
from dssl.methods.losses import covariance, deviation, invariance, variance
from dssl.methods.method import Declaration, Defaults, Prediction, WithoutPredictor, attached_cost
from dssl.settings import LARGEST, MethodSettings, between, finite
from dssl.types import Embedding, Scalar


@dataclass(frozen=True, kw_only=True)
class VICRegConfig(MethodSettings):
    """VICReg's expander and the weights of its three terms."""

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
    regularise: Literal["similarity", "all"] = "similarity"
    """Which views get the variance and covariance terms: those that predict along a similarity edge, or all that predict."""

    def __post_init__(self) -> None:
        for name in ("hidden", "output"):
            between(f"method.{name}", getattr(self, name), LARGEST["head"])
        for name in ("invariance", "variance", "covariance"):
            finite(f"method.{name}", getattr(self, name))


class VICReg(WithoutPredictor):
    """On one standard pair this is the original loss. There is no predictor: the prediction is the projection."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int,
        hidden: int = 2048,
        output: int = 2048,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 1.0,
        regularise: Literal["similarity", "all"] = "similarity",
    ) -> None:
        super().__init__(encoder, mlp(feature_dim, hidden, hidden, output))
        self.invariance, self.variance, self.covariance = invariance, variance, covariance
        self.regularises_all = regularise == "all"

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return self.invariance * invariance(prediction.projection, target)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The same pull between deviations from the mean.

        A pair pulls both ways, and what shifts all views alike cancels. One way only, it adds up: heavy views would run after the
        mean of the standard ones and, by the shared encoder, take it along, and no term of VICReg would hold it.
        """
        return self.invariance * deviation(prediction.projection, target)

    def regularise(self, prediction: Prediction) -> Scalar:
        """Both directions of a pair have half the loss, in which the original counts variances half and covariances whole."""
        z = prediction.projection
        return self.variance * variance(z) + 2 * self.covariance * covariance(z)


_LARS = {"name": "lars", "weight_decay": 1e-4, "decay_norms_and_biases": False, "warmup_epochs": 10.0}

METHOD = Declaration(
    name="vicreg",
    build=VICReg,
    settings=VICRegConfig,
    cost=attached_cost(quadratic=False),
    recipes={
        "shapes": Defaults(settings={"hidden": 512, "output": 512}),
        "cifar10": Defaults(optimizer={**_LARS, "rate": 0.3}),
        "imagenet": Defaults(
            settings={"hidden": 8192, "output": 8192}, optimizer={**_LARS, "rate": 0.2, "weight_decay": 1e-6}
        ),
    },
)
