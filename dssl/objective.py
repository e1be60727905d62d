"""A method and a graph make a loss: compute the predictions and targets that the edges need, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from dssl import distributed
from dssl.errors import DsslError
from dssl.graph import Edge, ViewGraph
from dssl.methods.losses import negative_cosine, spread
from dssl.methods.method import Method, Prediction
from dssl.methods.teacher import Teacher
from dssl.types import Embedding, Images, Scalar

Pass = tuple[Literal["predict", "target", "teacher"], str]
"""One call of the method or its teacher, and the view that it is given."""


@dataclass(frozen=True, slots=True)
class LossReport:
    """What one step learnt from, still on the device: reading a value waits for it."""

    total: Scalar
    edges: dict[str, Scalar]
    """The unweighted loss of every active edge, by its name; detached, like everything below."""
    regularisers: dict[str, Scalar]
    """The unweighted term of every view that the method regularises."""
    projections: dict[str, Embedding]
    """For every view that the encoder saw."""
    predictions: dict[str, Embedding]
    """z, for every view that predicts."""
    targets: dict[str, Embedding]
    """y, for every view that is a target; what the teacher makes of s1 is ``teacher(s1)``."""

    @property
    def spread(self) -> dict[str, Scalar]:
        """For every view: standard deviation of its normalised projection times sqrt(d); 1 is healthy, 0 has collapsed."""
        return {name: spread(projection) for name, projection in self.projections.items()}


class Objective(nn.Module):
    """``objective.backward(views) -> LossReport`` leaves the gradients; ``objective(views)`` leaves ``total.backward()`` to you.

    Each view passes the encoder on its own, so that BatchNorm sees one view at a time. DDP wraps this module.
    """

    def __init__(self, method: Method, graph: ViewGraph) -> None:
        super().__init__()
        assert isinstance(method, nn.Module)
        self.method = method
        self.graph = graph
        self._edges = graph.active_edges
        self._predictors = graph.predictors
        self._encoded = graph.encoded
        self._divisor = graph.divisor
        _check(method, graph)
        per_kind = getattr(method, "predictor_per_kind", False)
        self._heavy = {name for name in graph.predictors if per_kind and graph.view(name).is_heavy}
        # not every view's graph reaches these
        parts = [getattr(method, name) for name in ("predictor", "heavy_predictor") if self._heavy]
        parts += [self._teacher.map] if graph.taught else []
        self._rare = [parameter for part in parts for parameter in part.parameters()]
        self._with_gradient = {name for edge in self._edges if not edge.detach for name in edge.targets}
        self._moving = next((edge for edge in self._edges if edge.final is not None), None)
        self._passes = _passes(graph, targets_first=getattr(method, "own_target_network", False))
        self._align: Callable[[Prediction, Embedding], Scalar] = getattr(method, "align", _cosine)
        self._regularise: Callable[[Prediction], Scalar | None] = getattr(method, "regularise", _no_term)
        every = getattr(method, "regularises_all", False)
        self._regularised = {edge.predictor for edge in self._edges if every or edge.kind == "similarity"}
        self._regularises_all = every

    def backward(
        self,
        views: Mapping[str, Images],
        *,
        progress: float | None = None,
        through: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> LossReport:
        """Forward and backward, view by view: the gradients of ``self(views).total.backward()`` in less memory.

        ``progress`` is the share of the run that is done, for weights that move: 0 at the first step, 1 at the last.
        ``through`` is the DDP that wraps this objective; ``scaler`` multiplies the loss for fp16.
        """
        if through is None and (size := distributed.world_size()) > 1:
            raise DsslError(
                f"objective.backward in one of {size} processes: expected through=ddp, the DistributedDataParallel around this "
                "objective, which averages its gradients; through=objective leaves that to you"
            )

        def release(loss: Scalar) -> None:
            # gradients are computed in the types of the forward: autocast has no say in a backward
            with torch.autocast(loss.device.type, enabled=False):
                torch.autograd.backward(loss if scaler is None else scaler.scale(loss))

        report: LossReport = (through or self)(views, progress=progress, release=release)
        # DDP exchanges gradients in the first backward after its forward returned. All groups but the last were released
        # within it, and only added to .grad: one exchange in a step, overlapped with the last group's backward.
        release(report.total)
        return replace(report, total=self._total(self._weigh(progress), report.edges, report.regularisers))

    def forward(
        self,
        views: Mapping[str, Images],
        *,
        progress: float | None = None,
        release: Callable[[Scalar], None] | None = None,
    ) -> LossReport:
        """All losses in one graph; with ``release`` it gets the loss of every group of views but the last, which is ``total``."""
        for name in (*self._encoded, *self.graph.taught):
            if name not in views:
                raise DsslError(f"the graph needs the view {name}, but the batch has only {', '.join(sorted(views))}")
        predictions: dict[str, Prediction] = {}
        targets: dict[str, Embedding] = {}
        losses: dict[str, Scalar] = {}
        terms: dict[str, Scalar] = {}
        weights = self._weigh(progress)
        pending = self._edges
        for kind, name in self._passes:
            if kind == "predict":
                told: dict[str, Any] = {"heavy": True} if name in self._heavy else {}
                predictions[name] = self.method.predict(views[name], **told)
                if name in self._regularised and (term := self._regularise(predictions[name])) is not None:
                    terms[name] = term
            elif kind == "teacher":
                targets[f"teacher({name})"] = self._teacher(views[name])
            else:
                targets[name] = self.method.target(
                    views[name], predictions.get(name), gradient=name in self._with_gradient
                )
            for edge in pending:
                known = edge.predictor in predictions and all(one in targets for one in edge.targets)
                if known and edge.name not in losses:
                    y = [targets[one].detach() if edge.detach else targets[one] for one in edge.targets]
                    target = y[0] if len(y) == 1 else torch.stack(y).mean(dim=0)
                    losses[edge.name] = self._loss(edge, predictions[edge.predictor], target)
            while release is not None and (group := _finished(pending, losses, targets)):
                release(self._total({edge: weights[edge] for edge in group}, losses, terms))
                pending = tuple(edge for edge in pending if edge not in group)
                # these hold the last references to the group's graphs, whose memory the next view needs
                for edge in group:
                    losses[edge.name] = losses[edge.name].detach()
                    predictions[edge.predictor] = predictions[edge.predictor].detach()
                    if edge.predictor in terms:
                        terms[edge.predictor] = terms[edge.predictor].detach()
                learnt = {edge.predictor for edge in group}
                for view in learnt.union(*(edge.targets for edge in group if not edge.detach)):
                    if view in targets:
                        targets[view] = targets[view].detach()
        projections: dict[str, Tensor] = {
            name: (predictions[name].projection if name in predictions else targets[name]).detach()
            for name in self._encoded
        }
        total = self._total({edge: weights[edge] for edge in pending}, losses, terms)
        if release is not None and self._rare and distributed.world_size() > 1:
            # DDP exchanges the gradients of what its one backward reaches, and waits in vain for all others
            total = total + 0.0 * torch.stack([parameter.sum() for parameter in self._rare]).sum()
        return LossReport(
            total=total,
            edges={edge.name: losses[edge.name].detach() for edge in self._edges},
            regularisers={name: term.detach() for name, term in terms.items()},
            projections=projections,
            predictions={name: predictions[name].prediction.detach() for name in self._predictors},
            targets={name: target.detach() for name, target in targets.items()},
        )

    @property
    def _teacher(self) -> Teacher:
        return cast(Teacher, getattr(self.method, "teacher"))  # noqa: B009 (not every method has one)

    def _weigh(self, progress: float | None) -> dict[Edge, float]:
        """The weight of every active edge at this point of the run."""
        if progress is None:
            if self._moving is not None:
                raise DsslError(
                    f"the weight of {self._moving.name} moves over the run ({self._moving.weight_text}): say how much of it is "
                    "done, as in objective.backward(views, progress=step / (steps - 1))"
                )
            progress = 0.0
        return {edge: edge.weight_at(progress) for edge in self._edges}

    def _total(self, edges: Mapping[Edge, float], losses: Mapping[str, Scalar], terms: Mapping[str, Scalar]) -> Scalar:
        """What these edges add to the loss (Eq. 5), with the terms of the views that predict them."""
        weighted = [weight * losses[edge.name] for edge, weight in edges.items()]
        weighted += [
            weight * terms[edge.predictor]
            for edge, weight in edges.items()
            if edge.predictor in terms and (self._regularises_all or edge.kind == "similarity")
        ]
        return sum(weighted[1:], weighted[0]) / self._divisor

    def _loss(self, edge: Edge, prediction: Prediction, target: Embedding) -> Scalar:
        """S or D between the two ends of an edge (Eq. 2, Eq. 4)."""
        if edge.kind == "similarity":
            return self.method.similarity(prediction, target)
        if edge.is_taught:
            return negative_cosine(self._teacher.map(prediction.prediction), target)
        return self._align(prediction, target)


def _check(method: nn.Module, graph: ViewGraph) -> None:
    """Refuse a graph that the method cannot do."""
    if bool(graph.taught) != isinstance(getattr(method, "teacher", None), Teacher):
        taught = next((edge.name for edge in graph.active_edges if edge.is_taught), None)
        raise DsslError(
            "there is a teacher and no edge of the graph ends at it: add one such as s1->teacher(s1)"
            if taught is None
            else f"the edge {taught} needs a teacher: --teacher WEIGHTS, or method.teacher = Teacher(...)"
        )
    kinds = {graph.view(name).is_heavy for name in graph.predictors}
    if getattr(method, "predictor_per_kind", False) and len(kinds) == 1:
        raise DsslError(
            f"predictor=per-kind: all views that predict ({', '.join(graph.predictors)}) are of one kind, so one of the two "
            "predictors would learn nothing; use predictor=shared, or a graph such as dssl"
        )


def _cosine(prediction: Prediction, target: Embedding) -> Scalar:
    """The paper's D, for methods without an alignment of their own."""
    return negative_cosine(prediction.prediction, target)


def _no_term(prediction: Prediction) -> None:
    """Of methods that do not regularise."""


def _passes(graph: ViewGraph, *, targets_first: bool) -> tuple[Pass, ...]:
    """The order of a step's forwards, the same for ``forward`` and ``backward``.

    Every module sees the views in the order of the graph, those that are only targets last: BatchNorm's running statistics and
    dropout depend on it. A target network of its own has its own buffers, so it can go first, and every prediction is then
    finished as soon as it is made. Elsewhere the target of a view that predicts costs no pass and follows its prediction. A
    teacher goes first of all.
    """
    teacher: list[Pass] = [("teacher", name) for name in graph.taught]
    predict: list[Pass] = [("predict", name) for name in graph.predictors]
    target: list[Pass] = [("target", name) for name in graph.targets]
    if targets_first:
        return (*teacher, *target, *predict)
    # stable: (predict s1, target s1), (predict s2, target s2), ..., then the targets that do not predict
    position = {name: place for place, name in enumerate(graph.predictors)}
    return (*teacher, *sorted((*predict, *target), key=lambda one: position.get(one[1], len(position))))


def _finished(
    pending: Sequence[Edge], losses: Mapping[str, Scalar], targets: Mapping[str, Embedding]
) -> tuple[Edge, ...]:
    """The edges of a group of views whose graphs nothing else needs, or none; never all that are left.

    A target that keeps its gradient ties its view to those that predict it: their graphs are walked in one backward, once every
    edge of the group has its loss. All other views are on their own.
    """
    tied = [
        {edge.predictor, target}
        for edge in pending
        if not edge.detach
        for target in edge.targets
        if _learns(target, targets)
    ]
    for first in pending:
        views = {first.predictor}
        while grown := {view for pair in tied if pair & views for view in pair} - views:
            views |= grown
        group = tuple(edge for edge in pending if edge.predictor in views)
        if len(group) < len(pending) and all(edge.name in losses for edge in group):
            return group
    return ()


def _learns(view: str, targets: Mapping[str, Embedding]) -> bool:
    """Whether a gradient may flow into this target: it does, or the target is not computed yet."""
    return view not in targets or targets[view].requires_grad
