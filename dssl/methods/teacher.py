"""A frozen teacher: distillation is an edge, ``s1->teacher(s1)``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import distributed
from dssl.augment import Normalization
from dssl.methods.losses import wide
from dssl.types import Embedding, Images


class Teacher(nn.Module):
    """An encoder whose features are targets; ``method.teacher = Teacher(...)`` is where the objective finds it.

    Its weights are frozen, stay in evaluation mode, and are no part of the method: neither trained nor saved. What is trained and
    saved is a linear map from the predictions to its features, where their widths differ.
    """

    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        *,
        width: int,
        features: int,
        normalization: Normalization | None = None,
        sha256: str = "",
    ) -> None:
        """Freeze an encoder.

        Args:
            encoder: A network from images to vectors.
            width: The length of the method's predictions.
            features: The length of the encoder's vectors.
            normalization: Of the images that it was trained on, where it may differ from that of the views.
            sha256: Of its weights, so that a run that is resumed with another teacher is an error.
        """
        super().__init__()
        self._frozen = (encoder.eval().requires_grad_(False),)  # in a tuple, torch does not take it for a part
        self.map: nn.Module = nn.Identity() if width == features else nn.Linear(width, features)
        self.normalization, self.sha256 = normalization, sha256
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("offset", torch.zeros(()), persistent=False)

    @property
    def encoder(self) -> nn.Module:
        """The frozen network."""
        return self._frozen[0]

    def expect(self, views: Normalization) -> None:
        """Say how views are normalised, so that the teacher sees pixels as it was trained on them.

        Args:
            views: Their normalisation.
        """
        if self.normalization is None or self.normalization == views:
            return
        given, own = (torch.tensor([norm.mean, norm.std]).view(2, 1, -1, 1, 1) for norm in (views, self.normalization))
        self.scale = (given[1] / own[1]).to(self.scale)
        self.offset = ((given[0] - own[0]) / own[1]).to(self.offset)

    @torch.no_grad()
    def forward(self, images: Images) -> Embedding:
        """Each dimension with mean 0 and variance 1 over the global batch.

        Features of networks that end in a ReLU have a mean far longer than what tells images apart: a cosine with them is
        satisfied by the mean alone.

        Args:
            images: The view of a batch.
        """
        features: Embedding = wide(self.encoder(images * self.scale + self.offset))
        rows = F.batch_norm(distributed.gather_rows(features), None, None, training=True)
        first = distributed.rank() * len(features)
        return rows[first : first + len(features)]

    def _apply(self, function: Callable[..., Any], recurse: bool = True) -> "Teacher":
        """What moves or casts the method moves the frozen encoder too; torch gives this method no types."""
        self.encoder._apply(function, recurse)  # type: ignore[no-untyped-call]
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        return self
