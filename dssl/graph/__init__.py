"""The directed graph of views: which views of an image exist, and which prediction is pulled towards which target.

A loss term is an edge. ``h1 -> s1`` reads "the prediction of the heavy view h1 is pulled to the target of the standard view
s1". Every method, baseline and ablation of the paper is one graph over SimSiam, BYOL or SimCLR. This package is pure data and
knows no torch; its text form, such as ``s1<->s2, h1->s1, h2->s2``, is in ``graph.text``, the named graphs of the paper are in
``presets``.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from dssl.errors import DsslError
from dssl.settings import LARGEST
from dssl.text import number

Kind = Literal["similarity", "alignment"]
Normalize = Literal["similarity", "all", "sum"]

KINDS: tuple[Kind, ...] = ("similarity", "alignment")
NORMALIZATIONS: tuple[Normalize, ...] = ("similarity", "all", "sum")
RESERVED_NAMES = ("image", "normalize", "mean", "teacher")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STANDARD = re.compile(r"standard(-[a-z]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One augmented view: ``policy`` applied to the image, or to the pixels of another view (Eq. 3)."""

    name: str
    policy: str
    """``standard`` and ``heavy`` stand for whatever the run uses as such; any policy text may stand here."""
    source: str | None = None
    """None: made from the image. The name of a view: derived from that view."""
    size: int | None = None
    """Width and height in pixels; None: the run's image size. A derived view has the size of its source."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise DsslError(
                f"view name {self.name!r}: expected a letter followed by letters, digits or _, "
                f"and none of {', '.join(RESERVED_NAMES)}"
            )
        if self.policy != self.policy.strip() or not self.policy:
            raise DsslError(f"view {self.name}: its policy is {self.policy!r}, expected a policy such as 'standard'")
        _check_brackets(self)
        if self.size is not None and not 1 <= self.size <= LARGEST["image_size"]:
            raise DsslError(
                f"view {self.name}: its size is {self.size}, expected 1 to {LARGEST['image_size']:,} pixels"
            )
        if self.size is not None and self.source is not None:
            raise DsslError(
                f"view {self.name} is derived from {self.source} and has its size: leave out @{self.size}, "
                "or make it from the image"
            )

    @property
    def is_heavy(self) -> bool:
        """Whether it is anything but a standard view: heavy, or with a policy of its own."""
        return not _STANDARD.fullmatch(self.policy)

    def __str__(self) -> str:
        size = "" if self.size is None else f"@{self.size}"
        return f"{self.name} = {self.policy}{size}({self.source or 'image'})"


@dataclass(frozen=True, slots=True)
class Vertex:
    """What an edge may end at: the method's target of a view, or what a frozen teacher makes of it."""

    view: str
    taught: bool = False

    def __str__(self) -> str:
        return f"teacher({self.view})" if self.taught else self.view


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One loss term: the prediction of ``predictor`` is pulled to the mean of ``targets``."""

    predictor: str
    targets: tuple[Vertex, ...]
    weight: float = 1.0
    """The weight at the first step, if it moves."""
    kind: Kind = "alignment"
    """``similarity``: S, the method's own loss (Eq. 2). ``alignment``: D, negative cosine (Eq. 4)."""
    detach: bool = True
    """A stop-gradient on the target. SimSiam and BYOL always have one; for SimCLR this is what makes an edge directed."""
    final: float | None = None
    """The weight at the last step, to which it moves linearly; None: it stays."""

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise DsslError(f"edge {self.name}: expected one target, or different ones for their mean")
        if Vertex(self.predictor) in self.targets:
            raise DsslError(f"edge {self.name}: a view cannot be its own target")
        if len({vertex.taught for vertex in self.targets}) > 1:
            raise DsslError(f"edge {self.name}: a mean is of views or of what the teacher makes of them, not of both")
        if self.is_taught and (self.kind != "alignment" or not self.detach):
            raise DsslError(
                f"edge {self.name}: a teacher is aligned to and does not learn; leave out similarity and attach"
            )
        if self.kind not in KINDS:
            raise DsslError(f"edge {self.name}: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        for weight in (self.weight, self.final):
            if weight is not None and (not math.isfinite(weight) or weight < 0):
                raise DsslError(f"edge {self.name}: weight is {weight}, expected a finite number that is not negative")

    @property
    def name(self) -> str:
        """As the text form has it: ``h1->s1``, ``s1->mean(s2,s3)``, ``s1->teacher(s1)``."""
        ends = ",".join(map(str, self.targets))
        return f"{self.predictor}->{ends if len(self.targets) == 1 else f'mean({ends})'}"

    @property
    def is_taught(self) -> bool:
        """Whether the target is the teacher's."""
        return self.targets[0].taught

    @property
    def target_views(self) -> tuple[str, ...]:
        """The views that the target is made of."""
        return tuple(vertex.view for vertex in self.targets)

    def is_reverse_of(self, other: "Edge") -> bool:
        """Whether the two are one pair, ``a<->b``."""
        ends = ((Vertex(other.predictor),), (Vertex(self.predictor),))
        return (self.targets, other.targets) == ends and self == replace(
            other, predictor=self.predictor, targets=self.targets
        )

    @property
    def largest(self) -> float:
        """The largest weight that it has during a run."""
        return self.weight if self.final is None else max(self.weight, self.final)

    def weight_at(self, progress: float) -> float:
        """The weight when ``progress`` of the run is done, from 0 at the first step to 1 at the last."""
        return self.weight if self.final is None else self.weight + (self.final - self.weight) * progress

    @property
    def weight_text(self) -> str:
        """As the text form has it: ``0.5``, or ``0..1`` where it moves."""
        return number(self.weight) + ("" if self.final is None else f"..{number(self.final)}")


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
        from dssl.graph.text import parse  # here, because it imports this class

        return parse(text)

    def __str__(self) -> str:
        from dssl.graph.text import write

        return write(self)

    def view(self, name: str) -> View:
        return next(view for view in self.views if view.name == name)

    def size(self, name: str) -> int | None:
        """The size of a view in pixels, its own or that of the view it is derived from; None: the run's."""
        view = self.view(name)
        return view.size if view.source is None else self.size(view.source)

    @property
    def active_edges(self) -> tuple[Edge, ...]:
        """The edges that take part: an edge of weight zero, from the first step to the last, is as good as none."""
        return tuple(edge for edge in self.edges if edge.largest > 0)

    @property
    def predictors(self) -> tuple[str, ...]:
        """The views whose prediction must be computed, in the order of the views."""
        needed = {edge.predictor for edge in self.active_edges}
        return tuple(view.name for view in self.views if view.name in needed)

    @property
    def targets(self) -> tuple[str, ...]:
        """The views whose target must be computed, in the order of the views."""
        needed = {name for edge in self.active_edges if not edge.is_taught for name in edge.target_views}
        return tuple(view.name for view in self.views if view.name in needed)

    @property
    def taught(self) -> tuple[str, ...]:
        """The views that the teacher sees, in the order of the views."""
        needed = {name for edge in self.active_edges if edge.is_taught for name in edge.target_views}
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

        for name in (*self.encoded, *self.taught):
            add(name)
        return tuple(order.values())

    @property
    def divisor(self) -> float:
        """What the weighted sum of the edges is divided by; a weight that moves counts with its largest value, at every step."""
        if self.normalize == "sum":
            return 1.0
        similarity = math.fsum(edge.largest for edge in self.edges if edge.kind == "similarity")
        if self.normalize == "similarity" and similarity > 0:
            return similarity
        return math.fsum(edge.largest for edge in self.edges)


def _check_brackets(view: View) -> None:
    """The text form finds the end of a policy by its brackets, so they must be balanced."""
    depth = 0
    for character in view.policy:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0 or (depth == 0 and character in ",;=@\n"):
            break
    else:
        if depth == 0:
            return
    raise DsslError(
        f"view {view.name}: policy {view.policy!r} has unbalanced brackets, or one of , ; = @ outside of brackets"
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
    seen: set[tuple[str, frozenset[Vertex]]] = set()
    for edge in graph.edges:
        for end in (edge.predictor, *edge.target_views):
            if end not in names:
                raise DsslError(f"edge {edge.name}: there is no view {end}; views are {', '.join(sorted(names))}")
        ends = (edge.predictor, frozenset(edge.targets))
        if ends in seen:
            raise DsslError(f"duplicate edge {edge.name}: keep one and add the weights")
        seen.add(ends)
    if not graph.active_edges:
        given = ", ".join(f"{edge.name}:{edge.weight_text}" for edge in graph.edges) or "no edge"
        raise DsslError(f"nothing to learn from: {given}; at least one edge needs a weight above zero")
    used = {end for edge in graph.edges for end in (edge.predictor, *edge.target_views)}
    frontier = list(used)
    while frontier:
        source = graph.view(frontier.pop()).source
        if source is not None and source not in used:
            used.add(source)
            frontier.append(source)
    for view in graph.views:
        if view.name not in used:
            raise DsslError(f"view {view.name} is in no edge and no view is derived from it; remove it or add its edge")
