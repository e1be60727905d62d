"""SwAV: predict to which prototypes another view of the image belongs (Caron et al., NeurIPS 2020); what DINO shares with it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import distributed
from dssl.methods import DINOConfig, SwAVConfig
from dssl.methods.losses import sinkhorn, wide
from dssl.methods.method import Clock, Method, Prediction, mlp
from dssl.types import Embedding, Images, Scalar

_CENTER_MOMENTUM = 0.9
"""DINO's."""
_RISE = 0.3
"""The share of the run after which the targets have their last temperature; DINO: 30 of 100 epochs."""


class Prototypes(Method):
    """A prediction is the cosines with the prototypes; a target is probabilities over them, without gradient.

    Balancing keeps all images from going to one prototype: Sinkhorn gives every prototype an equal share of the global batch, a
    centre subtracts from a score what it is on average. Prototypes have unit length.
    """

    settings: SwAVConfig | DINOConfig
    center: Tensor
    score_sum: Tensor
    score_count: Tensor

    def build_heads(self, width: int) -> None:
        of = self.settings
        self.projector = mlp(width, *[of.hidden] * (of.projector_layers - 1), of.output)
        self.prototypes = nn.Linear(of.output, of.prototypes, bias=False)
        self.clock = Clock()
        if of.balance == "center":
            self.register_buffer("center", torch.zeros(of.prototypes))
            # of the targets of this step, for the centre of the next
            self.register_buffer("score_sum", torch.zeros(of.prototypes), persistent=False)
            self.register_buffer("score_count", torch.zeros(()), persistent=False)

    def predict(self, images: Images, *, heavy: bool = False) -> Prediction:
        forward = super().predict(images)
        return Prediction(forward.feature, forward.projection, scores(forward.projection, self.prototypes))

    def target_scores(self, images: Images, prediction: Prediction | None) -> Tensor:
        """The scores that a target is made of: those of the view's own prediction.

        Args:
            images: A view.
            prediction: Of this view, if there is one.
        """
        if prediction is not None:
            return prediction.prediction.detach()
        return scores(self.projector(self.encoder(images)), self.prototypes)

    @torch.no_grad()
    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        drawn = self.target_scores(images, prediction)
        if self.settings.balance == "sinkhorn":
            return sinkhorn(drawn, temperature=self.target_temperature)
        self.score_sum += distributed.gather_rows(drawn).mean(dim=0)
        self.score_count += 1
        return ((drawn - self.center) / self.target_temperature).softmax(dim=1)

    @property
    def target_temperature(self) -> float:
        """It moves linearly over the first part of the run."""
        first, last = self.settings.target_temperature, self.settings.final_target_temperature
        return first + (last - first) * min(1.0, self.clock.progress / _RISE)

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        """The cross entropy."""
        logits = prediction.prediction / self.settings.temperature
        return -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        return self.similarity(prediction, target)

    def relate(self, prediction: Prediction, target: Embedding) -> Scalar:
        """Between probabilities, which targets are."""
        loss: Scalar = self.relation((prediction.prediction / self.settings.temperature).softmax(dim=1), target)
        return loss

    @torch.no_grad()
    def after_step(self, step: int, total: int) -> None:
        self.clock.advance(step, total)
        if self.settings.balance == "center":
            mean = torch.where(self.score_count > 0, self.score_sum / self.score_count.clamp(min=1), self.center)
            self.center.lerp_(mean, 1 - _CENTER_MOMENTUM)
            self.score_sum.zero_()
            self.score_count.zero_()


def scores(projection: Embedding, prototypes: nn.Linear) -> Tensor:
    """Cosines, in float32 at least: divided by a temperature, a bf16's rounding would be a large part of them."""
    with torch.autocast(projection.device.type, enabled=False):
        return F.linear(F.normalize(wide(projection), dim=1), F.normalize(wide(prototypes.weight), dim=1))


class SwAV(Prototypes, settings=SwAVConfig):
    """The target of a view is its own assignment, so that it costs no pass."""
