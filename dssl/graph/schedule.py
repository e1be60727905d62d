"""The schedule of a training step: what is computed in which order, and whose memory may go when. Data, known before any step."""

from dataclasses import dataclass
from typing import Literal

from dssl.graph import Edge, Vertex, ViewGraph


@dataclass(frozen=True, slots=True)
class Encode:
    """One call of the method or its teacher, which is given one view."""

    call: Literal["predict", "target", "teacher"]
    view: str
    gradient: bool = False
    """Of a target: gradient flows into it, because the method's targets learn and some edge does not detach it."""

    def __str__(self) -> str:
        return f"{self.call} {self.view}"


@dataclass(frozen=True, slots=True)
class Compare:
    """The loss of an edge, as soon as its prediction and its targets exist."""

    edge: Edge

    def __str__(self) -> str:
        return f"compare {self.edge.name}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a group of edges; afterwards nothing needs the graphs of their ``views``."""

    edges: tuple[Edge, ...]
    views: frozenset[str]

    def __str__(self) -> str:
        return f"backward [{', '.join(edge.name for edge in self.edges)}]"


Step = Encode | Compare | Backward


def schedule(graph: ViewGraph, *, targets_learn: bool, own_target_network: bool) -> tuple[Step, ...]:
    """The steps of a forward and of a backward, view by view.

    Every module sees the views in the order of the graph, those that are only targets last: BatchNorm's running statistics and
    dropout depend on it. A target network of its own has its own buffers, so it goes first, and every prediction is finished as
    soon as it is made. Otherwise the target of a view that predicts costs no pass and follows its prediction.
    """
    attached = {name for edge in graph.active_edges if targets_learn and not edge.detach for name in edge.target_views}
    predict = [Encode("predict", name) for name in graph.predictors]
    target = [Encode("target", name, gradient=name in attached) for name in graph.targets]
    passes = [*target, *predict]
    if not own_target_network:
        # stable: (predict s1, target s1), (predict s2, target s2), ..., then the targets that do not predict
        place = {name: position for position, name in enumerate(graph.predictors)}
        passes = sorted([*predict, *target], key=lambda step: place.get(step.view, len(place)))
    steps: list[Step] = []
    ready: set[str | Vertex] = set()
    waiting, groups = list(graph.active_edges), _groups(graph, targets_learn=targets_learn)
    for step in (*(Encode("teacher", name) for name in graph.taught), *passes):
        steps.append(step)
        ready.add(step.view if step.call == "predict" else Vertex(step.view, taught=step.call == "teacher"))
        compared = [edge for edge in waiting if ready.issuperset({edge.predictor, *edge.targets})]
        waiting = [edge for edge in waiting if edge not in compared]
        steps += [Compare(edge) for edge in compared]
        finished = [group for group in groups if not set(group.edges) & set(waiting)]
        groups = [group for group in groups if group not in finished]
        steps += finished
    return tuple(steps)


def _groups(graph: ViewGraph, *, targets_learn: bool) -> list[Backward]:
    """Edges whose graphs are walked in one backward: a target that learns ties its view to those that predict it."""
    groups: list[Backward] = []
    for edge in graph.active_edges:
        views = frozenset({edge.predictor, *(edge.target_views if targets_learn and not edge.detach else ())})
        tied = [group for group in groups if group.views & views]
        members = {edge, *(member for group in tied for member in group.edges)}
        edges = tuple(member for member in graph.active_edges if member in members)
        merged = Backward(edges, views.union(*(group.views for group in tied)))
        groups = [group for group in groups if group not in tied] + [merged]
    return sorted(groups, key=lambda group: graph.active_edges.index(group.edges[0]))


@dataclass(frozen=True, slots=True)
class Cost:
    """Encoder passes of one step, and compared pairs in a batch of n; a test counts the real passes."""

    with_gradient: int
    without_gradient: int
    """Passes that keep no graph: the momentum encoder, and views that are only ever a target."""
    pairs: str
    """The paper's count of compared pairs, in n: ``2n² + 2n``."""

    @property
    def passes(self) -> int:
        return self.with_gradient + self.without_gradient


def cost(graph: ViewGraph, steps: tuple[Step, ...], *, own_target_network: bool, compares_all_pairs: bool) -> Cost:
    """What a schedule costs; ``compares_all_pairs``: a similarity compares every image with every other, as relations do."""
    free = () if own_target_network else graph.predictors  # the target of a view that predicts is its projection
    targets = [s for s in steps if isinstance(s, Encode) and s.call == "target" and s.view not in free]
    learning = sum(step.gradient for step in targets)
    edges = graph.active_edges
    squared = {"relation", *(["similarity"] if compares_all_pairs else [])}
    squares = sum(edge.kind in squared for edge in edges)
    terms = [(squares, "n²"), (len(edges) - squares, "n")]
    pairs = " + ".join(f"{'' if count == 1 else count}{power}" for count, power in terms if count)
    return Cost(len(graph.predictors) + learning, len(targets) - learning, pairs)
