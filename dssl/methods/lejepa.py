"""LeJEPA: views agree while the embeddings of each view follow an isotropic Gaussian (Balestriero and LeCun, 2025).

With ``regularizer="visreg"`` what holds them apart is VISReg's (Wu, Balestriero, Levine, 2026), whose gradient does not vanish
at a collapse.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dssl import rng
from dssl.methods import LeJEPAConfig
from dssl.methods.losses import invariance, non_gaussianity, sketched_distance
from dssl.methods.method import Clock, Method, Prediction, mlp
from dssl.types import Embedding, Scalar


class LeJEPA(Method, settings=LeJEPAConfig):
    """On a graph such as ``fastsiam`` this is the original, with a larger pull.

    Of V views, the difference to the mean of the others is V / (V - 1) times that to the mean of all. The original has no
    stop-gradient; detaching the mean changes the pull by a factor alone, because the differences of all views add up to zero. The
    gradient on ``fastsiam`` is the original's with a pull of V / (V - 1), and twice that on ``s1<->s2``.
    """

    settings: LeJEPAConfig

    def build_heads(self, width: int) -> None:
        of = self.settings
        self.projector = mlp(width, of.hidden, of.hidden, of.output)
        self.clock = Clock()

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return (1 - self.settings.weight) * invariance(prediction.projection, target)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The same pull. The standard views' regularizer also holds the mean, so that heavy views cannot take it along."""
        return self.similarity(prediction, target)

    def regularize(self, prediction: Prediction) -> Scalar:
        """Of one view at a time: several views together are not one sample of a Gaussian."""
        z = prediction.projection
        measure = non_gaussianity if self.settings.regularizer == "sigreg" else sketched_distance
        return self.settings.weight * measure(z, self.slices(z))

    def slices(self, z: Embedding) -> Tensor:
        """Unit vectors in columns, the same for every view and process of a step; drawn from (seed, step), never stored.

        Args:
            z: Embeddings, whose width, type and device they have.
        """
        key = rng.key(self.seed, "slices", self.clock.step)
        generator = torch.Generator().manual_seed(key % 2**63)
        drawn = torch.randn(z.shape[1], self.settings.slices, generator=generator, dtype=torch.float64)
        return F.normalize(drawn, dim=0).to(torch.promote_types(z.dtype, torch.float32)).to(z.device)

    def after_step(self, step: int, total: int) -> None:
        self.clock.advance(step, total)
