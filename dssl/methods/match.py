"""Matching: a view's features are pulled to what a frozen copy of the start makes of its target view.

With corrupted sources and clean targets (``h1->s1``) this makes good weights robust without labels: "the student should be
noised, the teacher should not" (Xie et al., CVPR 2020, "Noisy Student").
"""

import copy

import torch
from torch import Tensor, nn

from dssl import distributed
from dssl.methods import MatchConfig
from dssl.methods.losses import invariance, negative_cosine, wide
from dssl.methods.method import Method, Prediction
from dssl.types import Embedding, Images, Scalar


class Match(Method, settings=MatchConfig):
    """No heads: what learns are the features themselves, so that a classifier on the old features keeps working.

    Features are compared relative to the mean and the standard deviation of the first batch of targets: behind a ReLU the mean
    is far longer than what tells images apart.
    """

    center: Tensor
    scale: Tensor

    def build_heads(self, width: int) -> None:
        self.projector = nn.Identity()
        self.target_encoder = copy.deepcopy(self.encoder).eval().requires_grad_(False)
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("scale", torch.zeros(()))  # 0 until the first batch

    def train(self, mode: bool = True) -> "Match":
        super().train(mode)
        self.target_encoder.eval()
        return self

    def predict(self, images: Images, *, heavy: bool = False) -> Prediction:
        feature = self.encoder(images)
        relative = self._relative(feature)
        return Prediction(feature, relative, relative)

    @torch.no_grad()
    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        feature = wide(self.target_encoder(images))
        rows = distributed.gather_rows(feature)
        new = self.scale == 0  # on the device: asking for it would wait
        self.center.copy_(torch.where(new, rows.mean(dim=0), self.center))
        self.scale.copy_(torch.where(new, rows.var(dim=0).mean().sqrt(), self.scale))
        return self._relative(feature)

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return self.align(prediction, target)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The mean squared difference, in variances of the targets, plus 1 - cosine."""
        z = prediction.prediction
        return invariance(z, target) + 1 + negative_cosine(z, target)

    def _relative(self, feature: Embedding) -> Embedding:
        return (wide(feature) - self.center) / self.scale.clamp(min=1e-6)
