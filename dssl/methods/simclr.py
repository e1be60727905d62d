"""SimCLR: pick the other view of the same image among all views of the batch (Chen et al., ICML 2020)."""

from dssl.methods import SimCLRConfig
from dssl.methods.heads import simclr_projector
from dssl.methods.losses import nt_xent
from dssl.methods.method import Method, Prediction
from dssl.types import Embedding, Scalar


class SimCLR(Method, settings=SimCLRConfig):
    """Temperature 0.5 on CIFAR-10, 0.1 on ImageNet."""

    settings: SimCLRConfig

    def build_heads(self, width: int) -> None:
        self.projector = simclr_projector(width, output=self.settings.output)

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return nt_xent(prediction.projection, target, temperature=self.settings.temperature)
