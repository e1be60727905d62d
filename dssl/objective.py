"""A method and a graph make a loss: compute the predictions and targets that the edges need, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dssl import distributed
from dssl.errors import DsslError
from dssl.graph import Edge, ViewGraph
from dssl.graph.schedule import Backward, Compare
from dssl.methods.losses import negative_cosine, spread
from dssl.methods.method import Method, Prediction
from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, slots=True)
class LossReport:
    """What one step learned from, still on the device: reading a value waits for it."""

    total: Scalar
    """The whole loss. Its graph is that of all edges after ``objective(views)``; none is left after ``objective.backward``."""
    edges: dict[str, Scalar]
    """The unweighted loss of every active edge, by its name; detached, like everything below."""
    regularizers: dict[str, Scalar]
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
        """Make a loss of both.

        Args:
            method: An encoder with heads, and how predictions and targets are compared.
            graph: The views and the edges between them.
        """
        super().__init__()
        _check(method, graph)
        self.method = method
        self.graph = graph
        self.schedule = method.settings.schedule(graph)
        self._edges = graph.active_edges
        self._divisor = graph.divisor
        self._heavy = {view.name for view in graph.views if view.is_heavy}
        self._regularized = {edge for edge in self._edges if method.regularizes_all or edge.kind == "similarity"}
        relations = [step.edge for step in self.schedule if isinstance(step, Compare) and step.edge.kind == "relation"]
        self._queued = relations[-1] if relations else None
        """Whose target goes to a queue: one vector of each image."""
        self._moving = next((edge for edge in self._edges if edge.final is not None), None)

    def backward(
        self,
        views: Mapping[str, Images],
        *,
        progress: float | None = None,
        through: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> LossReport:
        """Forward and backward, view by view: the gradients of ``self(views).total.backward()`` in less memory.

        Args:
            views: The views of a batch by name, normalised.
            progress: The share of the run that is done, for weights that move: 0 at the first step, 1 at the last.
            through: The DDP that wraps this objective.
            scaler: Multiplies the loss for fp16.
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
        return replace(report, total=report.total.detach())

    def forward(
        self,
        views: Mapping[str, Images],
        *,
        progress: float | None = None,
        release: Callable[[Scalar], None] | None = None,
    ) -> LossReport:
        """Walk the schedule.

        Args:
            views: The views of a batch by name, normalised.
            progress: The share of the run that is done, for weights that move: 0 at the first step, 1 at the last.
            release: Gets the loss of every group of edges but the last, whose graph ``total`` has.
        """
        for name in (*self.graph.encoded, *self.graph.taught):
            if name not in views:
                raise DsslError(f"the graph needs the view {name}, but the batch has only {', '.join(sorted(views))}")
        weights = self._weigh(progress)
        predictions: dict[str, Prediction] = {}
        targets: dict[str, Embedding] = {}
        losses: dict[str, Scalar] = {}
        terms: dict[str, Scalar] = {}
        for step in self.schedule:
            if isinstance(step, Compare):
                losses[step.edge.name] = self._loss(step.edge, predictions, targets)
            elif isinstance(step, Backward):
                if release is not None and step is not self.schedule[-1]:
                    release(self._total(step.edges, weights, losses, terms))
                    # these hold the last references to the graphs of the group, whose memory the next view needs
                    losses |= {edge.name: losses[edge.name].detach() for edge in step.edges}
                    predictions |= {name: predictions[name].detach() for name in step.views & predictions.keys()}
                    targets |= {name: targets[name].detach() for name in step.views & targets.keys()}
                    terms |= {name: terms[name].detach() for name in step.views & terms.keys()}
            elif step.call == "predict":
                predictions[step.view] = self.method.predict(views[step.view], heavy=step.view in self._heavy)
                terms |= self._term(step.view, predictions[step.view])
            elif step.call == "target":
                targets[step.view] = self.method.target(
                    views[step.view], predictions.get(step.view), gradient=step.gradient
                )
            else:
                targets[f"teacher({step.view})"] = self.method.teacher(views[step.view])
        if self._queued is not None and self.training:
            self.method.relation.push(self._target(self._queued, targets))
        total = self._total(self._edges, weights, losses, terms)
        partly_used = [parameter for part in self.method.partly_used() for parameter in part.parameters()]
        if release is not None and partly_used and distributed.world_size() > 1:
            # DDP exchanges the gradients of what its one backward reaches, and waits in vain for all others
            total = total + 0.0 * torch.stack([parameter.sum() for parameter in partly_used]).sum()
        return LossReport(
            total=total,
            edges={edge.name: losses[edge.name].detach() for edge in self._edges},
            regularizers={name: term.detach() for name, term in terms.items()},
            projections={
                name: (predictions[name].projection if name in predictions else targets[name]).detach()
                for name in self.graph.encoded
            },
            predictions={name: predictions[name].prediction.detach() for name in self.graph.predictors},
            targets={name: target.detach() for name, target in targets.items()},
        )

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

    def _total(
        self,
        edges: Sequence[Edge],
        weights: Mapping[Edge, float],
        losses: Mapping[str, Scalar],
        terms: Mapping[str, Scalar],
    ) -> Scalar:
        """What these edges add to the loss (Eq. 5), with the terms of the views that predict them."""
        weighted = [weights[edge] * losses[edge.name] for edge in edges]
        regularized = [edge for edge in edges if edge in self._regularized and edge.predictor in terms]
        weighted += [weights[edge] * terms[edge.predictor] for edge in regularized]
        return sum(weighted[1:], weighted[0]) / self._divisor

    def _loss(self, edge: Edge, predictions: Mapping[str, Prediction], targets: Mapping[str, Embedding]) -> Scalar:
        """S, D or R between the two ends of an edge (Eq. 2, Eq. 4)."""
        prediction, target = predictions[edge.predictor], self._target(edge, targets)
        if edge.kind == "similarity":
            return self.method.similarity(prediction, target)
        if edge.kind == "relation":
            return self.method.relate(prediction, target)
        if edge.is_taught:
            return negative_cosine(self.method.teacher.map(prediction.prediction), target)
        return self.method.align(prediction, target)

    def _target(self, edge: Edge, targets: Mapping[str, Embedding]) -> Embedding:
        """What the prediction of an edge is compared with."""
        y = [targets[str(vertex)] for vertex in edge.targets]
        target = y[0] if len(y) == 1 else torch.stack(y).mean(dim=0)
        return target.detach() if edge.detach else target

    def _term(self, view: str, prediction: Prediction) -> dict[str, Scalar]:
        """The view's regulariser, or nothing."""
        needed = any(edge.predictor == view for edge in self._regularized)
        term = self.method.regularize(prediction) if needed else None
        return {} if term is None else {view: term}


def _check(method: Method, graph: ViewGraph) -> None:
    """Reject a graph that the method cannot learn from."""
    if bool(graph.taught) != (method.taught_by is not None):
        taught = next((edge.name for edge in graph.active_edges if edge.is_taught), None)
        raise DsslError(
            "there is a teacher and no edge of the graph ends at it: add one such as s1->teacher(s1)"
            if taught is None
            else f"the edge {taught} needs a teacher: --teacher WEIGHTS, or method.teacher = Teacher(...)"
        )
    kinds = {graph.view(name).is_heavy for name in graph.predictors}
    if method.predictor_per_kind and len(kinds) == 1:
        raise DsslError(
            f"predictor=per-kind: all views that predict ({', '.join(graph.predictors)}) are of one kind, so one of the two "
            "predictors would learn nothing; use predictor=shared, or a graph such as dssl"
        )
