"""MoCo v3: pick the target of the same image among all targets, which a moving average makes (Chen et al., ICCV 2021)."""

import torch
from torch import nn

from dssl.methods import MoCoConfig
from dssl.methods.losses import info_nce
from dssl.methods.method import Prediction, WithPredictor, follow, frozen_copy, mlp
from dssl.types import Embedding, Images, Scalar


class MoCo(WithPredictor, settings=MoCoConfig):
    """The heads of its ResNets: no biases, and a projector that ends in a BatchNorm without scale and shift.

    No gradient flows to the targets, so that a heavy view with a similarity edge is repelled by other images and repels none.
    """

    settings: MoCoConfig

    def build_heads(self, width: int) -> None:
        hidden, output = self.settings.hidden, self.settings.output
        last = nn.BatchNorm1d(output, affine=False)
        self.projector = nn.Sequential(*mlp(width, hidden, output, bias=False), last)
        self.build_predictor(lambda: mlp(output, hidden, output, bias=False))
        self.target_encoder = frozen_copy(self.encoder)
        self.target_projector = frozen_copy(self.projector)

    @torch.no_grad()
    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        projection: Embedding = self.target_projector(self.target_encoder(images))
        return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return info_nce(prediction.prediction, target, temperature=self.settings.temperature)

    def after_step(self, step: int, total: int) -> None:
        pairs = ((self.target_encoder, self.encoder), (self.target_projector, self.projector))
        follow(*pairs, momentum=self.settings.momentum, progress=step / total)
