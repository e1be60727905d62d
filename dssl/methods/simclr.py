"""SimCLR: pick the other view of the same image among all views of the batch (Chen et al., ICML 2020)."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn

from dssl.errors import DsslError
from dssl.methods.heads import simclr_projector
from dssl.methods.losses import contrast
from dssl.methods.method import Declaration, Defaults, Prediction, attached_cost
from dssl.settings import LARGEST, MethodSettings, between, finite
from dssl.types import Embedding, Images, Scalar


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


class SimCLR(nn.Module):
    """Temperature 0.5 on CIFAR-10, 0.1 on ImageNet. There is no predictor: the prediction is the projection."""

    def __init__(self, encoder: nn.Module, *, feature_dim: int, output: int = 128, temperature: float = 0.5) -> None:
        super().__init__()
        if not temperature > 0:
            raise DsslError(f"SimCLR's temperature is {temperature}, expected a number above zero")
        self.encoder = encoder
        self.projector = simclr_projector(feature_dim, output=output)
        self.temperature = temperature

    def predict(self, images: Images) -> Prediction:
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, projection)

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y is the projection itself, and both ends of a similarity learn; a directed edge detaches it."""
        if prediction is not None:
            return prediction.projection
        with contextlib.nullcontext() if gradient else torch.no_grad():
            projection: Embedding = self.projector(self.encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return contrast(prediction.projection, target, temperature=self.temperature)

    def after_step(self, step: int, total: int) -> None:
        pass


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
