"""SimCLR: pick the other view of the same image among all views of the batch (Chen et al., ICML 2020)."""

import contextlib

import torch
from torch import nn

from dssl.errors import DsslError
from dssl.methods.heads import simclr_projector
from dssl.methods.losses import contrast
from dssl.methods.method import Prediction
from dssl.types import Embedding, Images, Scalar


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
