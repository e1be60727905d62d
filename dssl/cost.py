"""What a graph costs with each method, known before anything runs; a test counts the real passes."""

from dataclasses import dataclass

from dssl.errors import choices
from dssl.graph import ViewGraph


@dataclass(frozen=True, slots=True)
class Cost:
    """Encoder passes of one step, and compared pairs in a batch of n."""

    with_gradient: int
    without_gradient: int
    """Passes that keep no graph: the momentum encoder, and views that are only ever a target."""
    pairs: str
    """The paper's count of compared pairs, in n."""

    @property
    def passes(self) -> int:
        return self.with_gradient + self.without_gradient


def cost(graph: ViewGraph, method: str) -> Cost:
    """Encoder passes and loss pairs of one step; ``method`` is simsiam, byol or simclr."""
    active = graph.active_edges
    similarities = sum(edge.kind == "similarity" for edge in active)
    only_targets = [name for name in graph.targets if name not in graph.predictors]
    linear = len(active)
    if method == "byol":
        return Cost(len(graph.predictors), len(graph.targets), _in_n(0, linear))
    if method == "simsiam":
        return Cost(len(graph.predictors), len(only_targets), _in_n(0, linear))
    if method == "simclr":
        attached = {edge.target for edge in active if not edge.detach}
        frozen = sum(name not in attached for name in only_targets)
        return Cost(len(graph.encoded) - frozen, frozen, _in_n(similarities, linear - similarities))
    raise choices("method", method, ("simsiam", "byol", "simclr"))


def _in_n(quadratic: int, linear: int) -> str:
    """``2n² + 2n``."""
    terms = [f"{'' if count == 1 else count}{power}" for count, power in ((quadratic, "n²"), (linear, "n")) if count]
    return " + ".join(terms)
