"""BYOL: the target is a moving average of the online network (Grill et al., NeurIPS 2020)."""

import torch

from dssl.methods import BYOLConfig
from dssl.methods.losses import narrowness, squared_distance
from dssl.methods.method import Prediction, WithPredictor, follow, frozen_copy, mlp
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
        self.target_encoder = frozen_copy(self.encoder)
        self.target_projector = frozen_copy(self.projector)

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """The target network has no gradient, so the online forward of the same view is of no use to it."""
        with torch.no_grad():
            projection: Embedding = self.target_projector(self.target_encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return squared_distance(prediction.prediction, target)

    def regularize(self, prediction: Prediction) -> "Scalar | None":
        return self.settings.guard * narrowness(prediction.projection) if self.settings.guard else None

    def after_step(self, step: int, total: int) -> None:
        pairs = ((self.target_encoder, self.encoder), (self.target_projector, self.projector))
        follow(*pairs, momentum=self.settings.momentum, progress=step / total)
