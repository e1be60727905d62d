"""A method and a graph make a loss: compute the predictions and targets that the edges need, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dssl.errors import DsslError
from dssl.graph import Edge, ViewGraph
from dssl.methods.losses import negative_cosine, spread
from dssl.methods.method import Method, Prediction
from dssl.types import Embedding, Images, Scalar


@dataclass(frozen=True, slots=True)
class LossReport:
    """What one step learnt from, still on the device: reading a value waits for it."""

    total: Scalar
    edges: dict[str, Scalar]
    """The unweighted loss of every active edge, by its name; detached, like everything below."""
    projections: dict[str, Embedding]
    """For every view that the encoder saw."""
    predictions: dict[str, Embedding]
    """z, for every view that predicts."""
    targets: dict[str, Embedding]
    """y, for every view that is a target."""

    @property
    def spread(self) -> dict[str, Scalar]:
        """For every view: standard deviation of its normalised projection times sqrt(d); 1 is healthy, 0 has collapsed."""
        return {name: spread(projection) for name, projection in self.projections.items()}


class Objective(nn.Module):
    """``objective(views) -> LossReport``; this is what DDP wraps and ``torch.compile`` compiles.

    Each view passes the encoder on its own, so that BatchNorm sees one view at a time.
    """

    def __init__(self, method: Method, graph: ViewGraph) -> None:
        super().__init__()
        assert isinstance(method, nn.Module)
        self.method = method
        self.graph = graph
        self._edges = graph.active_edges
        self._predictors = graph.predictors
        self._targets = graph.targets
        self._encoded = graph.encoded
        self._divisor = graph.divisor
        self._with_gradient = {edge.target for edge in self._edges if not edge.detach}

    def forward(self, views: Mapping[str, Images]) -> LossReport:
        for name in self._encoded:
            if name not in views:
                raise DsslError(f"the graph needs the view {name}, but the batch has only {', '.join(sorted(views))}")
        predictions: dict[str, Prediction] = {name: self.method.predict(views[name]) for name in self._predictors}
        targets: dict[str, Embedding] = {
            name: self.method.target(views[name], predictions.get(name), gradient=name in self._with_gradient)
            for name in self._targets
        }
        losses = {
            edge.name: self._loss(edge, predictions[edge.predictor], targets[edge.target]) for edge in self._edges
        }
        weighted = [edge.weight * losses[edge.name] for edge in self._edges]
        projections: dict[str, Tensor] = {
            name: (predictions[name].projection if name in predictions else targets[name]).detach()
            for name in self._encoded
        }
        return LossReport(
            total=sum(weighted[1:], weighted[0]) / self._divisor,
            edges={name: loss.detach() for name, loss in losses.items()},
            projections=projections,
            predictions={name: prediction.prediction.detach() for name, prediction in predictions.items()},
            targets={name: target.detach() for name, target in targets.items()},
        )

    def _loss(self, edge: Edge, prediction: Prediction, target: Embedding) -> Scalar:
        """S or D between the two ends of an edge (Eq. 2, Eq. 4)."""
        y = target.detach() if edge.detach else target
        if edge.kind == "similarity":
            return self.method.similarity(prediction, y)
        return negative_cosine(prediction.prediction, y)
