"""What the objective asks of a method, and nothing more."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, slots=True)
class Prediction:
    """One forward of a view: what the encoder, the projector and the predictor gave (z in the paper is the last)."""

    feature: Embedding
    projection: Embedding
    prediction: Embedding


class Method(Protocol):
    """SimSiam, BYOL and SimCLR are modules of this shape; so is any that you add (docs/add-a-method.md)."""

    encoder: nn.Module

    def predict(self, images: Images) -> Prediction:
        """The forward of a view that is the source of an edge."""
        ...

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y(v), from the forward of the same view where there is one; ``gradient``: some edge does not detach it."""
        ...

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        """S, for one directed edge."""
        ...

    def after_step(self, step: int, total: int) -> None:
        """Called after the optimiser's step number ``step`` of ``total``."""
        ...
