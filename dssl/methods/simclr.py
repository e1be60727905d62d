"""SimCLR: pick the other view of the same image among all views of the batch (Chen et al., ICML 2020)."""

from torch import nn

from dssl.methods import SimCLRConfig
from dssl.methods.losses import nt_xent
from dssl.methods.method import Method, Prediction, mlp
from dssl.types import Embedding, Scalar


def simclr_projector(width: int, *, output: int) -> nn.Sequential:
    """One hidden layer as wide as the feature, no biases, and a last BatchNorm with a scale but no learnt shift."""
    last = nn.BatchNorm1d(output)
    last.bias.requires_grad = False
    return nn.Sequential(*mlp(width, width, output, bias=False), last)


class SimCLR(Method, settings=SimCLRConfig):
    """Temperature 0.5 on CIFAR-10, 0.1 on ImageNet."""

    settings: SimCLRConfig

    def build_heads(self, width: int) -> None:
        self.projector = simclr_projector(width, output=self.settings.output)

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        of = self.settings
        return nt_xent(prediction.projection, target, temperature=of.temperature, decoupled=of.decoupled)
