"""SimSiam: a predictor on one side, a stop-gradient on the other (Chen and He, CVPR 2021)."""

import torch
from torch import nn

from dssl.errors import DsslError
from dssl.methods.heads import mlp, simsiam_projector
from dssl.methods.losses import negative_cosine
from dssl.methods.method import Prediction
from dssl.types import Embedding, Images, Scalar


class SimSiam(nn.Module):
    """Defaults are those of CIFAR-10; ImageNet has ``projector_layers=3``."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int,
        projector_layers: int = 2,
        hidden: int = 2048,
        output: int = 2048,
        bottleneck: int = 512,
    ) -> None:
        super().__init__()
        if projector_layers not in (2, 3):
            raise DsslError(f"SimSiam's projector has {projector_layers} layers, expected 2 (CIFAR) or 3 (ImageNet)")
        self.encoder = encoder
        self.projector = simsiam_projector(feature_dim, hidden=hidden, output=output, layers=projector_layers)
        self.predictor = mlp(output, bottleneck, output)

    def predict(self, images: Images) -> Prediction:
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, self.predictor(projection))

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y is never given a gradient here, whatever the edge says: that is what keeps SimSiam from collapsing."""
        if prediction is not None:
            return prediction.projection.detach()
        with torch.no_grad():
            projection: Embedding = self.projector(self.encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        return negative_cosine(prediction.prediction, target)

    def after_step(self, step: int, total: int) -> None:
        pass
