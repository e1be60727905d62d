"""SimSiam: a predictor on one side, a stop-gradient on the other (Chen and He, CVPR 2021)."""

from torch import nn

from dssl.methods import SimSiamConfig
from dssl.methods.losses import narrowness, negative_cosine
from dssl.methods.method import Prediction, WithPredictor, mlp
from dssl.types import Embedding, Scalar


def simsiam_projector(width: int, *, hidden: int, output: int, layers: int) -> nn.Sequential:
    """Ends in a BatchNorm without scale and shift."""
    return nn.Sequential(*mlp(width, *[hidden] * (layers - 1), output), nn.BatchNorm1d(output, affine=False))


class SimSiam(WithPredictor, settings=SimSiamConfig):
    """Its targets never learn, whatever the edge says: that is what keeps SimSiam from collapsing."""

    settings: SimSiamConfig

    def build_heads(self, width: int) -> None:
        of = self.settings
        self.projector = simsiam_projector(width, hidden=of.hidden, output=of.output, layers=of.projector_layers)
        self.build_predictor(lambda: mlp(of.output, of.bottleneck, of.output))

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return negative_cosine(prediction.prediction, target)

    def regularize(self, prediction: Prediction) -> "Scalar | None":
        # not the projections, which the projector's last BatchNorm keeps apart whatever they carry
        return self.settings.guard * narrowness(prediction.prediction) if self.settings.guard else None
