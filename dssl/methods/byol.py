"""BYOL: the target is a moving average of the online network (Grill et al., NeurIPS 2020)."""

import copy
import math

import torch
from torch import Tensor

from dssl.methods import BYOLConfig
from dssl.methods.losses import narrowness, squared_distance
from dssl.methods.method import Prediction, WithPredictor, mlp
from dssl.types import Embedding, Images, Scalar


class BYOL(WithPredictor, settings=BYOLConfig):
    """The same heads on CIFAR-10 and ImageNet.

    The moving average is over parameters. Buffers (BatchNorm's running statistics) are the target's own: in training it
    normalises by the batch that it sees, as the original does, and its statistics follow from that; they are never copied.
    """

    settings: BYOLConfig

    def build_heads(self, width: int) -> None:
        hidden, output = self.settings.hidden, self.settings.output
        self.projector = mlp(width, hidden, output)
        self.build_predictor(lambda: mlp(output, hidden, output))
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_projector = copy.deepcopy(self.projector).requires_grad_(False)

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """The target network has no gradient, so the online forward of the same view is of no use to it."""
        with torch.no_grad():
            projection: Embedding = self.target_projector(self.target_encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return squared_distance(prediction.prediction, target)

    def regularize(self, prediction: Prediction) -> "Scalar | None":
        return self.settings.guard * narrowness(prediction.projection) if self.settings.guard else None

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        """target = momentum * target + (1 - momentum) * online, all tensors in one call; the momentum grows to 1."""
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        target: list[Tensor] = [*self.target_encoder.parameters(), *self.target_projector.parameters()]
        momentum = 1 - (1 - self.settings.momentum) * (math.cos(math.pi * step / total) + 1) / 2
        torch._foreach_lerp_(target, online, 1 - momentum)
