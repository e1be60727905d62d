"""DINO: predict a moving average's centred, sharpened scores over prototypes (Caron et al., ICCV 2021)."""

import torch
from torch import Tensor

from dssl.methods import DINOConfig
from dssl.methods.method import Prediction, follow, frozen_copy
from dssl.methods.swav import Prototypes, scores
from dssl.types import Images


class DINO(Prototypes, settings=DINOConfig):
    """The target network is a moving average of encoder, projector and prototypes.

    The heads have BatchNorm and ReLU as those of the other methods here; the original's, for transformers, has GELU and no norm.
    """

    settings: DINOConfig

    def build_heads(self, width: int) -> None:
        super().build_heads(width)
        self.target_encoder = frozen_copy(self.encoder)
        self.target_projector = frozen_copy(self.projector)
        self.target_prototypes = frozen_copy(self.prototypes)

    def target_scores(self, images: Images, prediction: Prediction | None) -> Tensor:
        return scores(self.target_projector(self.target_encoder(images)), self.target_prototypes)

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        super().after_step(step, total)
        follow(
            (self.target_encoder, self.encoder),
            (self.target_projector, self.projector),
            (self.target_prototypes, self.prototypes),
            momentum=self.settings.momentum,
            progress=step / total,
        )
