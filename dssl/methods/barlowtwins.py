"""Barlow Twins: a dimension of one view correlates with the same one of the other, and no other (Zbontar et al., ICML 2021)."""

from dssl.methods import BarlowTwinsConfig
from dssl.methods.losses import correlation
from dssl.methods.method import Method, Prediction, mlp
from dssl.types import Embedding, Scalar


class BarlowTwins(Method, settings=BarlowTwinsConfig):
    """On one standard pair this is the original loss."""

    settings: BarlowTwinsConfig

    def build_heads(self, width: int) -> None:
        self.projector = mlp(width, self.settings.hidden, self.settings.hidden, self.settings.output, bias=False)

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        matrix = correlation(prediction.projection, target)
        same = matrix.diagonal()
        different = (matrix - same.diag()).square().sum()
        return self.settings.scale * ((1 - same).square().sum() + self.settings.redundancy * different)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The first term alone: a heavy view follows its target and spreads nothing out."""
        same = correlation(prediction.projection, target).diagonal()
        return self.settings.scale * (1 - same).square().sum()
