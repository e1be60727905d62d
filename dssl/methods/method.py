"""What a method is: an encoder, heads on it, and what a prediction is compared with."""

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from dssl.errors import DsslError
from dssl.methods import METHODS, BYOLConfig, MethodSettings, MoCoConfig, SimSiamConfig
from dssl.methods.losses import negative_cosine
from dssl.methods.relation import Relation
from dssl.methods.teacher import Teacher
from dssl.models import feature_dim as measure_width
from dssl.types import Embedding, Images, Scalar

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One forward of a view: what the encoder, the projector and the predictor gave (z in the paper is the last)."""

    feature: Embedding
    """Of the encoder."""
    projection: Embedding
    """Of the projector."""
    prediction: Embedding
    """Of the predictor; of a method that has none, the projection."""

    def detach(self) -> "Prediction":
        return Prediction(self.feature.detach(), self.projection.detach(), self.prediction.detach())


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """A head: Linear, BatchNorm, ReLU for every hidden width, and a last Linear."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after, bias=bias), nn.BatchNorm1d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))


def frozen_copy(module: Module) -> Module:
    """The start of a target network: it has the same weights and is never trained."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(*pairs: tuple[nn.Module, nn.Module], momentum: float, progress: float) -> None:
    """target = momentum * target + (1 - momentum) * online, all tensors in one call; the momentum grows to 1 along a cosine."""
    target: list[Tensor] = [parameter for module, _ in pairs for parameter in module.parameters()]
    online: list[Tensor] = [parameter for _, module in pairs for parameter in module.parameters()]
    momentum = 1 - (1 - momentum) * (math.cos(math.pi * progress) + 1) / 2
    torch._foreach_lerp_(target, online, 1 - momentum)


class Clock(nn.Module):
    """How many steps are done, for what a method draws or schedules by them; saved with its weights.

    The number is the host's: asking a device for it would wait.
    """

    step, total = 0, 1

    def advance(self, step: int, total: int) -> None:
        """Step number ``step`` of ``total`` is done."""
        self.step, self.total = step + 1, total

    @property
    def progress(self) -> float:
        return self.step / self.total

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.step, self.total])

    def set_extra_state(self, state: Tensor) -> None:
        self.step, self.total = state.tolist()


class Method(nn.Module):
    """What you derive from (docs/add-a-method.md): ``build_heads`` and ``similarity`` are yours, the rest has a default.

    ``class Mine(Method, settings=MineConfig)`` says which settings it has; by their name ``dssl.train`` then finds it.
    Without a predictor, the prediction of a view and its target are both the projection.
    """

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    settings: MethodSettings
    projector: nn.Module
    teacher: Teacher
    """Only of graphs with an edge to one."""
    seed = 0
    """Of the run: what a method draws is a function of it and of the step."""
    predictor_per_kind = False
    """Whether heavy views have a predictor of their own."""
    regularizes_all = False
    """Whether the term of a view has the weight of all edges that it predicts, or only of similarity edges."""

    _classes: ClassVar[dict[type[MethodSettings], "type[Method]"]] = {}

    def __init_subclass__(cls, *, settings: type[MethodSettings] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if settings is not None:
            cls.Settings = settings
            cls._classes[settings] = cls
            METHODS[settings.name] = settings

    def __init__(
        self,
        encoder: nn.Module,
        *,
        feature_dim: int | None = None,
        image_size: int | None = None,
        settings: MethodSettings | None = None,
    ) -> None:
        """Give an encoder heads.

        Args:
            encoder: A network from images to vectors.
            feature_dim: The length of these vectors.
            image_size: In its place: width and height of an image, so that the length is measured.
            settings: Those of the method, by default as ``dssl train`` has them.
        """
        super().__init__()
        if feature_dim is None and image_size is None:
            raise DsslError(
                f"{type(self).__name__}(encoder): expected feature_dim=, the length of the encoder's vectors, or image_size= to "
                "measure it"
            )
        self.encoder = encoder
        self.settings = self.Settings() if settings is None else settings
        self.relation = Relation()
        self.build_heads(feature_dim or measure_width(encoder, image_size=image_size or 0))

    @staticmethod
    def of(settings: MethodSettings, encoder: nn.Module, *, feature_dim: int) -> "Method":
        """The method with these settings.

        Args:
            settings: Their class says which method it is.
            encoder: A network from images to vectors.
            feature_dim: The length of these vectors.
        """
        if type(settings) not in Method._classes:
            importlib.import_module(f"dssl.methods.{settings.name}")
        return Method._classes[type(settings)](encoder, feature_dim=feature_dim, settings=settings)

    def build_heads(self, width: int) -> None:
        """Set ``self.projector``.

        Args:
            width: The length of the vectors that it takes.
        """
        raise NotImplementedError

    def predict(self, images: Images, *, heavy: bool = False) -> Prediction:
        """The forward of a view that is the source of an edge.

        Args:
            images: The view of a batch.
            heavy: Whether it is not a standard view.
        """
        feature = self.encoder(images)
        projection = self.projector(feature)
        return Prediction(feature, projection, projection)

    def target(self, images: Images, prediction: Prediction | None, *, gradient: bool) -> Embedding:
        """y(v), what a prediction is pulled to.

        Args:
            images: The view of a batch.
            prediction: The forward of the same view, if there is one.
            gradient: Whether some edge does not detach it.
        """
        gradient = gradient and self.settings.targets_learn
        if prediction is not None:
            return prediction.projection if gradient else prediction.projection.detach()
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            projection: Embedding = self.projector(self.encoder(images))
            return projection

    def similarity(self, prediction: Prediction, target: Embedding) -> Scalar:
        """S, for one directed edge.

        Args:
            prediction: Of the view at which the edge begins.
            target: y of the view at which it ends.
        """
        raise NotImplementedError

    def align(self, prediction: Prediction, target: Embedding) -> Scalar:
        """D, for alignment edges.

        Args:
            prediction: Of the view at which the edge begins.
            target: y of the view at which it ends.
        """
        return negative_cosine(prediction.prediction, target)

    def relate(self, prediction: Prediction, target: Embedding) -> Scalar:
        """R, for relation edges; ``method.relation = Relation(...)`` has other temperatures, or a queue.

        Args:
            prediction: Of the view at which the edge begins.
            target: y of the view at which it ends.
        """
        loss: Scalar = self.relation(prediction.prediction, target)
        return loss

    def regularize(self, prediction: Prediction) -> "Scalar | None":
        """A term for one view that predicts.

        Args:
            prediction: Of this view.
        """
        return None

    def after_step(self, step: int, total: int) -> None:
        """Called after each step of the optimizer, for moving averages and queues.

        Args:
            step: Its number.
            total: The number of steps in the run.
        """

    @property
    def taught_by(self) -> Teacher | None:
        """The teacher that was set with ``method.teacher = Teacher(...)``."""
        return next((module for module in self.children() if isinstance(module, Teacher)), None)

    def partly_used(self) -> list[nn.Module]:
        """The modules that the graphs of only some views reach."""
        return [] if self.taught_by is None else [self.taught_by.map]


class WithPredictor(Method):
    """A method with a predictor for all views, or one for standard and one for heavy views, and a guard against collapse."""

    settings: SimSiamConfig | BYOLConfig | MoCoConfig
    regularizes_all = True

    def build_predictor(self, predictor: Callable[[], nn.Module]) -> None:
        """Set ``self.predictor`` and, if there is one for heavy views, ``self.heavy_predictor``.

        Args:
            predictor: Makes one.
        """
        self.predictor = predictor()
        self.predictor_per_kind = self.settings.predictor == "per-kind"
        if self.predictor_per_kind:
            self.heavy_predictor = predictor()

    def predict(self, images: Images, *, heavy: bool = False) -> Prediction:
        forward = super().predict(images)
        predictor = self.heavy_predictor if heavy and self.predictor_per_kind else self.predictor
        return Prediction(forward.feature, forward.projection, predictor(forward.projection))

    def partly_used(self) -> list[nn.Module]:
        return [*([self.predictor, self.heavy_predictor] if self.predictor_per_kind else []), *super().partly_used()]
