"""What the objective asks of a method, and nothing more."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from dssl.graph import ViewGraph
from dssl.settings import MethodSettings
from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, slots=True)
class Prediction:
    """One forward of a view: what the encoder, the projector and the predictor gave (z in the paper is the last)."""

    feature: Embedding
    projection: Embedding
    prediction: Embedding

    def detach(self) -> "Prediction":
        return Prediction(self.feature.detach(), self.projection.detach(), self.prediction.detach())


class Method(Protocol):
    """SimSiam, BYOL and SimCLR are modules of this shape; so is any that you add (docs/add-a-method.md).

    What it need not have, and the objective uses where it does:

    - ``own_target_network = True``: ``target`` shares no module with ``predict``. Targets are then computed first, and a step
      needs the memory of one view.
    - ``regularise(prediction) -> Scalar | None``: a term for one view. It has the weight of the similarity edges that the view
      predicts; with ``regularises_all = True``, of all its edges.
    - ``align(prediction, target) -> Scalar``: its own D for alignment edges, in place of the negative cosine.
    - ``predictor_per_kind = True``: ``predict(images, heavy=True)`` is how a heavy view is predicted.
    - ``teacher``: a ``Teacher``, for edges that end at one.
    """

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


class WithoutPredictor(nn.Module):
    """The forward of a method without a predictor: the prediction is the projection, and so is the target."""

    def __init__(self, encoder: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector

    def predict(self, images: Images) -> Prediction:
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, projection)

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y is the projection itself, and both ends of a similarity learn; a directed edge detaches it."""
        if prediction is not None:
            return prediction.projection
        with contextlib.nullcontext() if gradient else torch.no_grad():
            projection: Embedding = self.projector(self.encoder(images))
            return projection

    def after_step(self, step: int, total: int) -> None:
        pass


class WithPredictor(nn.Module):
    """The forward of a method with a predictor for all views, or one for standard and one for heavy views (``per_kind``)."""

    regularises_all = True

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, predictor: Callable[[], nn.Module], *, per_kind: bool
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor()
        self.predictor_per_kind = per_kind
        if per_kind:
            self.heavy_predictor = predictor()

    def predict(self, images: Images, *, heavy: bool = False) -> Prediction:
        """``heavy`` is said where there is a predictor for each kind of view."""
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, (self.heavy_predictor if heavy else self.predictor)(projection))

    def after_step(self, step: int, total: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Cost:
    """Encoder passes of one step, and compared pairs in a batch of n; a test counts the real passes."""

    with_gradient: int
    without_gradient: int
    """Passes that keep no graph: the momentum encoder, and views that are only ever a target."""
    pairs: str
    """The paper's count of compared pairs, in n."""

    @property
    def passes(self) -> int:
        return self.with_gradient + self.without_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How a method departs from a recipe's defaults, as plain settings."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """All that the rest of the program knows of a method; ``METHODS`` lists them by name."""

    name: str
    build: Callable[..., Method]
    """``build(encoder, feature_dim=..., **settings)``: the class."""
    settings: type[MethodSettings]
    cost: Callable[[ViewGraph], Cost]
    predictions_judged_from: int | None = None
    """The step from which the watch for collapse looks at the predictions too; None: never."""
    recipes: Mapping[str, Defaults] = field(default_factory=dict)
    """By the name of the recipe."""


def only_targets(graph: ViewGraph) -> list[str]:
    """The views that are a target and predict nothing."""
    return [name for name in graph.targets if name not in graph.predictors]


def attached_cost(*, quadratic: bool) -> Callable[[ViewGraph], Cost]:
    """Of methods whose targets may learn: a view that is only ever a detached target passes without gradient."""

    def cost(graph: ViewGraph) -> Cost:
        attached = {name for edge in graph.active_edges if not edge.detach for name in edge.targets}
        frozen = sum(name not in attached for name in only_targets(graph))
        all_pairs = sum(edge.kind == "similarity" for edge in graph.active_edges) if quadratic else 0
        linear = len(graph.active_edges) - all_pairs
        return Cost(len(graph.encoded) - frozen, frozen, pairs(quadratic=all_pairs, linear=linear))

    return cost


def pairs(*, quadratic: int, linear: int) -> str:
    """``2n² + 2n``."""
    terms = [f"{'' if count == 1 else count}{power}" for count, power in ((quadratic, "n²"), (linear, "n")) if count]
    return " + ".join(terms)
