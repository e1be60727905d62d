"""The directed graph of views: which views of an image exist, and which prediction is pulled towards which target.

A loss term is an edge. ``h1 -> s1`` reads "the prediction of the heavy view h1 is pulled to the target of the standard view
s1". Every method, baseline and ablation of the paper is one graph over SimSiam, BYOL or SimCLR. This module is pure data and
knows no torch; the text form is in ``graph_text``, the named graphs of the paper are in ``presets``.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from dssl.errors import DsslError

Kind = Literal["similarity", "alignment"]
Normalize = Literal["similarity", "all", "sum"]

KINDS: tuple[Kind, ...] = ("similarity", "alignment")
NORMALIZATIONS: tuple[Normalize, ...] = ("similarity", "all", "sum")
RESERVED_NAMES = ("image", "normalize")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One augmented view: ``policy`` applied to the image, or to the pixels of another view (Eq. 3)."""

    name: str
    policy: str
    """``standard`` and ``heavy`` stand for whatever the run uses as such; any policy text may stand here."""
    source: str | None = None
    """None: made from the image. The name of a view: derived from that view."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise DsslError(
                f"view name {self.name!r}: expected a letter followed by letters, digits or _, "
                f"and none of {', '.join(RESERVED_NAMES)}"
            )
        if self.policy != self.policy.strip() or not self.policy:
            raise DsslError(f"view {self.name}: its policy is {self.policy!r}, expected a policy such as 'standard'")
        _check_brackets(self)

    def __str__(self) -> str:
        return f"{self.name} = {self.policy}({self.source or 'image'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One loss term: the prediction of ``predictor`` is pulled to the target of ``target``."""

    predictor: str
    target: str
    weight: float = 1.0
    kind: Kind = "alignment"
    """``similarity``: S, the method's own loss (Eq. 2). ``alignment``: D, negative cosine (Eq. 4)."""
    detach: bool = True
    """A stop-gradient on the target. SimSiam and BYOL always have one; for SimCLR this is what makes an edge directed."""

    def __post_init__(self) -> None:
        if self.predictor == self.target:
            raise DsslError(f"edge {self.name}: a view cannot be its own target")
        if self.kind not in KINDS:
            raise DsslError(f"edge {self.name}: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if not math.isfinite(self.weight) or self.weight < 0:
            raise DsslError(f"edge {self.name}: weight is {self.weight}, expected a finite number that is not negative")

    @property
    def name(self) -> str:
        return f"{self.predictor}->{self.target}"


@dataclass(frozen=True, slots=True)
class ViewGraph:
    """Views and the edges between them; refuses to exist when it makes no sense."""

    views: tuple[View, ...]
    edges: tuple[Edge, ...]
    normalize: Normalize = "similarity"
    """What the weighted sum is divided by: the sum of the similarity weights (of all weights, where there is no similarity
    edge), the sum of ``all`` weights (Algorithm 1), or nothing (``sum``, Eq. 5)."""

    def __post_init__(self) -> None:
        if self.normalize not in NORMALIZATIONS:
            raise DsslError(f"normalize is {self.normalize!r}, expected one of {', '.join(NORMALIZATIONS)}")
        _check_views(self)
        _check_edges(self)

    @staticmethod
    def parse(text: str) -> "ViewGraph":
        """The graph of a text such as ``s1<->s2, h1->s1, h2->s2``; ``str(graph)`` is its inverse."""
        from dssl.graph_text import parse

        return parse(text)

    def __str__(self) -> str:
        from dssl.graph_text import write

        return write(self)

    def view(self, name: str) -> View:
        return next(view for view in self.views if view.name == name)

    @property
    def active_edges(self) -> tuple[Edge, ...]:
        """The edges that take part: an edge of weight zero is as good as none."""
        return tuple(edge for edge in self.edges if edge.weight > 0)

    @property
    def predictors(self) -> tuple[str, ...]:
        """The views whose prediction must be computed, in the order of the views."""
        needed = {edge.predictor for edge in self.active_edges}
        return tuple(view.name for view in self.views if view.name in needed)

    @property
    def targets(self) -> tuple[str, ...]:
        """The views whose target must be computed, in the order of the views."""
        needed = {edge.target for edge in self.active_edges}
        return tuple(view.name for view in self.views if view.name in needed)

    @property
    def encoded(self) -> tuple[str, ...]:
        """The views that the encoder sees."""
        needed = {*self.predictors, *self.targets}
        return tuple(view.name for view in self.views if view.name in needed)

    @property
    def made(self) -> tuple[View, ...]:
        """The views whose pixels must be made, each after the view that it is derived from."""
        order: dict[str, View] = {}

        def add(name: str) -> None:
            view = self.view(name)
            if view.source is not None:
                add(view.source)
            order.setdefault(name, view)

        for name in self.encoded:
            add(name)
        return tuple(order.values())

    @property
    def divisor(self) -> float:
        """What the weighted sum of the edges is divided by."""
        if self.normalize == "sum":
            return 1.0
        similarity = math.fsum(edge.weight for edge in self.edges if edge.kind == "similarity")
        if self.normalize == "similarity" and similarity > 0:
            return similarity
        return math.fsum(edge.weight for edge in self.edges)


def _check_brackets(view: View) -> None:
    """The text form finds the end of a policy by its brackets, so they must be balanced."""
    depth = 0
    for character in view.policy:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0 or (depth == 0 and character in ",;=\n"):
            break
    else:
        if depth == 0:
            return
    raise DsslError(
        f"view {view.name}: policy {view.policy!r} has unbalanced brackets, or one of , ; = outside of brackets"
    )


def _check_views(graph: ViewGraph) -> None:
    names = [view.name for view in graph.views]
    for name in names:
        if names.count(name) > 1:
            raise DsslError(f"view {name} is declared twice; give the second one another name")
    for view in graph.views:
        if view.source is not None and view.source not in names:
            raise DsslError(f"view {view.name} is derived from {view.source}, which is not a view of this graph")
    for view in graph.views:
        chain = [view.name]
        while (source := graph.view(chain[-1]).source) is not None:
            if source in chain:
                circle = " -> ".join([*chain[chain.index(source) :], source])
                raise DsslError(
                    f"views are derived from each other in a circle: {circle}; one must come from the image"
                )
            chain.append(source)


def _check_edges(graph: ViewGraph) -> None:
    names = {view.name for view in graph.views}
    seen: set[str] = set()
    for edge in graph.edges:
        for end in (edge.predictor, edge.target):
            if end not in names:
                raise DsslError(f"edge {edge.name}: there is no view {end}; views are {', '.join(sorted(names))}")
        if edge.name in seen:
            raise DsslError(f"edge {edge.name} stands there twice; keep one and add the weights")
        seen.add(edge.name)
    if not graph.active_edges:
        given = ", ".join(f"{edge.name}:{edge.weight:g}" for edge in graph.edges) or "no edge"
        raise DsslError(f"nothing to learn from: {given}; at least one edge needs a weight above zero")
    used = {end for edge in graph.edges for end in (edge.predictor, edge.target)}
    frontier = list(used)
    while frontier:
        source = graph.view(frontier.pop()).source
        if source is not None and source not in used:
            used.add(source)
            frontier.append(source)
    for view in graph.views:
        if view.name not in used:
            raise DsslError(f"view {view.name} is in no edge and no view is derived from it; remove it or add its edge")
