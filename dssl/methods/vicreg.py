"""VICReg: views agree while each keeps its own variance and decorrelates its dimensions (Bardes, Ponce, LeCun, ICLR 2022)."""

from dssl.methods import VICRegConfig
from dssl.methods.losses import covariance, deviation, invariance, variance
from dssl.methods.method import Method, Prediction, mlp
from dssl.types import Embedding, Scalar


class VICReg(Method, settings=VICRegConfig):
    """On one standard pair this is the original loss."""

    settings: VICRegConfig

    def build_heads(self, width: int) -> None:
        self.projector = mlp(width, self.settings.hidden, self.settings.hidden, self.settings.output)
        self.regularizes_all = self.settings.regularize == "all"

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return self.settings.invariance * invariance(prediction.projection, target)

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The same pull between deviations from the mean.

        A pair pulls both ways, and what shifts all views alike cancels. One way only, it adds up: heavy views would run after the
        mean of the standard ones and, by the shared encoder, take it along, and no term of VICReg would hold it.
        """
        return self.settings.invariance * deviation(prediction.projection, target)

    def regularize(self, prediction: Prediction) -> Scalar:
        """Both directions of a pair have half the loss, in which the original counts variances half and covariances whole."""
        z = prediction.projection
        return self.settings.variance * variance(z) + 2 * self.settings.covariance * covariance(z)
