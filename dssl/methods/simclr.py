"""SimCLR: pick the other view of the same image among all views of the batch (Chen et al., ICML 2020)."""

from dataclasses import dataclass

from torch import nn

from dssl.errors import DsslError
from dssl.methods.heads import simclr_projector
from dssl.methods.losses import nt_xent
from dssl.methods.method import Declaration, Defaults, Prediction, WithoutPredictor, attached_cost
from dssl.settings import LARGEST, MethodSettings, between, finite
from dssl.types import Embedding, Scalar


@dataclass(frozen=True, kw_only=True)
class SimCLRConfig(MethodSettings):
    """SimCLR's head and temperature."""

    output: int = 128
    """Width of the projection."""
    temperature: float = 0.5
    """0.5 on CIFAR-10, 0.1 on ImageNet."""

    def __post_init__(self) -> None:
        between("method.output", self.output, LARGEST["head"])
        finite("method.temperature", self.temperature, strictly=True)


class SimCLR(WithoutPredictor):
    """Temperature 0.5 on CIFAR-10, 0.1 on ImageNet. There is no predictor: the prediction is the projection."""

    def __init__(self, encoder: nn.Module, *, feature_dim: int, output: int = 128, temperature: float = 0.5) -> None:
        if not temperature > 0:
            raise DsslError(f"SimCLR's temperature is {temperature}, expected a number above zero")
        super().__init__(encoder, simclr_projector(feature_dim, output=output))
        self.temperature = temperature

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return nt_xent(prediction.projection, target, temperature=self.temperature)


_LARS = {"name": "lars", "weight_decay": 1e-6, "decay_norms_and_biases": False, "warmup_epochs": 10.0}

METHOD = Declaration(
    name="simclr",
    build=SimCLR,
    settings=SimCLRConfig,
    cost=attached_cost(quadratic=True),
    recipes={
        "cifar10": Defaults(optimizer={**_LARS, "rate": 1.0}),
        "adapt": Defaults(settings={"temperature": 0.2}),
        "imagenet": Defaults(settings={"temperature": 0.1}, optimizer={**_LARS, "rate": 0.3}),
    },
)
