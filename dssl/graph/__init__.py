"""The directed graph of views: which views of an image exist, and which prediction is pulled towards which target.

A loss term is an edge. ``h1 -> s1`` reads "the prediction of the heavy view h1 is pulled to the target of the standard view
s1". Every method, baseline and ablation of the paper is one graph over SimSiam, BYOL or SimCLR. This package is pure data and
knows no torch; the paper's named graphs are at the end. The text form of a graph, for people and for the command line:

    s1<->s2            the method's own similarity, both ways
    h1->s1             alignment: the prediction of h1 is pulled to the detached target of s1
    s1<-h1             the same, as the paper writes it
    h1->s1:0.5         a weight
    h1->s1:0..1        a weight that moves linearly over the run
    s1->mean(s2,s3)    the target is the mean of the targets of several views
    s1->teacher(s1)    the target is what a frozen teacher makes of a view
    h1->s1[relation]   the target teaches how much an image resembles the others of the batch
    a->b[similarity, attach]   another kind, or a target through which gradient flows
    h1 = ra(2,5)(image)        a view declared: policy, and what it is applied to
    l1 = crop(0.05,0.3)@16(image)   a view of 16 pixels
    normalize=all      what the total is divided by

Items are separated by commas, semicolons or new lines. A view that is not declared is ``standard(image)`` when its name starts
with s, and h1 is ``heavy(s1)``.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Literal, cast

from dssl.errors import LARGEST, DsslError, choices
from dssl.text import number

Kind = Literal["similarity", "alignment", "relation"]
Normalize = Literal["similarity", "all", "sum"]

KINDS: tuple[Kind, ...] = ("similarity", "alignment", "relation")
NORMALIZATIONS: tuple[Normalize, ...] = ("similarity", "all", "sum")
RESERVED_NAMES = ("image", "normalize", "mean", "teacher")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_END = r"\w+(?:\s*\((?:[^()]|\([^()]*\))*\))?"
_EDGE = re.compile(
    rf"(?P<left>{_END})\s*(?P<arrow><->|->|<-)\s*(?P<right>{_END})"
    r"\s*(?::\s*(?P<weight>[^\s\[\]]+))?\s*(?:\[(?P<options>[^\]]*)\])?"
)
_DECLARATION = re.compile(
    r"(?P<name>\w+)\s*=\s*(?P<policy>.+?)(?:@(?P<size>[^@()]*))?\(\s*(?P<source>[A-Za-z_]\w*)\s*\)", re.DOTALL
)
_VERTEX = re.compile(r"(?P<teacher>teacher\()?(?P<view>[A-Za-z_]\w*)(?(teacher)\))")
_SETTING = re.compile(r"normalize\s*=\s*(?P<value>[^()]*)")
_STANDARD = re.compile(r"standard(-[a-z]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One augmented view: ``policy`` applied to the image, or to the pixels of another view (Eq. 3)."""

    name: str
    """A letter followed by letters, digits or _."""
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
    """The view's name."""
    taught: bool = False
    """Whether it is the teacher's."""

    def __str__(self) -> str:
        return f"teacher({self.view})" if self.taught else self.view


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One loss term: the prediction of ``predictor`` is pulled to the mean of ``targets``."""

    predictor: str
    """The name of the view at which the edge begins."""
    targets: tuple[Vertex, ...]
    """Where it ends; of several ends it is pulled to their mean."""
    weight: float = 1.0
    """The weight at the first step, if it moves."""
    kind: Kind = "alignment"
    """``similarity``: S, the method's own loss (Eq. 2). ``alignment``: D, negative cosine (Eq. 4). ``relation``: R, the cross
    entropy of the similarities to other images (CLSA, ReSSL)."""
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
            raise DsslError(f"edge {self.name}: a mean is over views or over teacher views, not both")
        if self.is_taught and (self.kind != "alignment" or not self.detach):
            raise DsslError(
                f"edge {self.name}: a teacher does not learn, so its edges are alignments; leave out similarity, relation "
                "and attach"
            )
        if self.kind not in KINDS:
            raise DsslError(f"edge {self.name}: kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.kind == "relation" and not self.detach:
            raise DsslError(f"edge {self.name}: the target of a relation teaches and does not learn; leave out attach")
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
        """Whether the two are one pair, ``a<->b``.

        Args:
            other: The edge that may be the way back.
        """
        ends = ((Vertex(other.predictor),), (Vertex(self.predictor),))
        return (self.targets, other.targets) == ends and self == replace(
            other, predictor=self.predictor, targets=self.targets
        )

    @property
    def largest(self) -> float:
        """The largest weight that it has during a run."""
        return self.weight if self.final is None else max(self.weight, self.final)

    def weight_at(self, progress: float) -> float:
        """The weight at a point of the run.

        Args:
            progress: From 0 at the first step to 1 at the last.
        """
        return self.weight if self.final is None else self.weight + (self.final - self.weight) * progress

    @property
    def weight_text(self) -> str:
        """As the text form has it: ``0.5``, or ``0..1`` where it moves."""
        return number(self.weight) + ("" if self.final is None else f"..{number(self.final)}")


@dataclass(frozen=True, slots=True)
class ViewGraph:
    """Views and the edges between them; raises ``DsslError`` if they are inconsistent."""

    views: tuple[View, ...]
    """Each with a name of its own."""
    edges: tuple[Edge, ...]
    """The terms of the loss."""
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
        """The graph of a text, whose inverse is ``str(graph)``.

        Args:
            text: Such as ``s1<->s2, h1->s1, h2->s2``, or the name of a preset, such as ``dssl``.
        """
        return named_graph(text)

    def __str__(self) -> str:
        return _write(self)

    def view(self, name: str) -> View:
        """One of the views.

        Args:
            name: Of the view.
        """
        return next(view for view in self.views if view.name == name)

    def size(self, name: str) -> int | None:
        """The size of a view in pixels, its own or that of the view it is derived from; None: the run's.

        Args:
            name: Of the view.
        """
        view = self.view(name)
        return view.size if view.source is None else self.size(view.source)

    @property
    def active_edges(self) -> tuple[Edge, ...]:
        """The edges that take part: an edge of weight zero, from the first step to the last, is as good as none."""
        return tuple(edge for edge in self.edges if edge.largest > 0)

    @property
    def predictors(self) -> tuple[str, ...]:
        """The views whose prediction must be computed, in the order of the views."""
        return self._in_order(edge.predictor for edge in self.active_edges)

    @property
    def targets(self) -> tuple[str, ...]:
        """The views whose target must be computed, in the order of the views."""
        return self._in_order(name for edge in self.active_edges if not edge.is_taught for name in edge.target_views)

    @property
    def taught(self) -> tuple[str, ...]:
        """The views that the teacher sees, in the order of the views."""
        return self._in_order(name for edge in self.active_edges if edge.is_taught for name in edge.target_views)

    @property
    def encoded(self) -> tuple[str, ...]:
        """The views that the encoder sees."""
        return self._in_order((*self.predictors, *self.targets))

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        needed = set(names)
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
    try:
        TopologicalSorter({view.name: [view.source] for view in graph.views if view.source is not None}).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise DsslError(
            f"views are derived from each other in a circle: {circle}; one must come from the image"
        ) from None


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
    for name in [*used]:
        source: str | None = name
        while source is not None:
            used.add(source)
            source = graph.view(source).source
    for view in graph.views:
        if view.name not in used:
            raise DsslError(f"view {view.name} is in no edge and no view is derived from it; remove it or add its edge")


def _parse(text: str) -> ViewGraph:
    """Read a graph, or say in one sentence which part could not be read."""
    declared: list[View] = []
    edges: list[Edge] = []
    normalize = "similarity"
    for item in _items(text):
        if match := _SETTING.fullmatch(item):
            normalize = match["value"].strip()
        elif match := _EDGE.fullmatch(item):
            edges += _edges(match)
        elif match := _DECLARATION.fullmatch(item):
            declared.append(_view(match))
        else:
            raise DsslError(
                f"cannot read {item!r} in the graph: expected an edge such as 'h1->s1:0.5' or 's1<->s2', "
                "a view such as 'h1 = ra(2,5)(image)', or 'normalize=all'"
            )
    return ViewGraph((*declared, *_undeclared(declared, edges)), tuple(edges), cast(Normalize, normalize))


def _write(graph: ViewGraph) -> str:
    """The shortest of the spellings that is read back as the same graph."""
    edges = list(_edge_texts(graph.edges))
    tail = [] if graph.normalize == "similarity" else [f"normalize={graph.normalize}"]
    unusual = [str(view) for view in graph.views if view != _default_view(view.name)]
    for declarations in ([], unusual, [str(view) for view in graph.views]):
        text = ", ".join([*edges, *declarations, *tail])
        try:
            if _parse(text) == graph:
                return text
        except DsslError:  # a view without a declaration may not have a default
            continue
    raise AssertionError(f"graph has no text form: {graph!r}")


def _items(text: str) -> Iterator[str]:
    """Split at separators that are outside of brackets."""
    depth = start = 0
    for position, character in enumerate(text + ","):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character in ",;\n" and depth <= 0:
            if item := text[start:position].strip():
                yield item
            start, depth = position + 1, 0
    if depth > 0:
        raise DsslError(f"a bracket is not closed in {text[start:].strip()!r}")


def _view(match: re.Match[str]) -> View:
    size = match["size"]
    if size is not None and not re.fullmatch(r"\d{1,9}", size.strip()):
        raise DsslError(
            f"view {match['name']}: its size is {size.strip()!r}, expected a whole number of pixels, as in @16"
        )
    return View(
        name=match["name"],
        policy=match["policy"].strip(),
        source=None if match["source"] == "image" else match["source"],
        size=None if size is None else int(size),
    )


def _edges(match: re.Match[str]) -> list[Edge]:
    left, arrow, right = match["left"], match["arrow"], match["right"]
    first, moves, last = (match["weight"] or "1").partition("..")
    try:
        weight, final = float(first), float(last) if moves else None
    except ValueError:
        raise DsslError(
            f"edge {match.group()!r}: weight {match['weight']!r} is not a number, nor two as in 0..1"
        ) from None
    both = arrow == "<->"
    kinds: dict[str, Kind] = {name: name for name in KINDS}
    kind: Kind = "similarity" if both else "alignment"
    options = [option for word in (match["options"] or "").split(",") if (option := word.strip())]
    detach = not both or "relation" in options
    for option in options:
        if option in kinds:
            kind = kinds[option]
        elif option in ("attach", "detach"):
            detach = option == "detach"
        else:
            raise choices(f"option of edge {left}{arrow}{right}", option, (*KINDS, "attach", "detach"))
    ends = {"->": [(left, right)], "<-": [(right, left)], "<->": [(left, right), (right, left)]}[arrow]
    for start, end in ends:
        if "(" in start:
            raise DsslError(f"edge {start}->{end}: only a view predicts; write {end}->{start}")
    return [
        Edge(predictor=start, targets=_targets(start, end), weight=weight, kind=kind, detach=detach, final=final)
        for start, end in ends
    ]


def _targets(start: str, end: str) -> tuple[Vertex, ...]:
    """The vertices of ``s1``, ``teacher(s1)`` or ``mean(s1,s2)``."""
    mean = re.fullmatch(r"mean\s*\((.*)\)", end, re.DOTALL)
    matches = [_VERTEX.fullmatch("".join(part.split())) for part in (mean[1].split(",") if mean else (end,))]
    vertices = tuple(Vertex(match["view"], taught=match["teacher"] is not None) for match in matches if match)
    if len(vertices) < len(matches):
        raise DsslError(
            f"edge {start}->{end}: target is {end!r}, expected a view, a mean such as mean(s1,s2), or teacher(s1)"
        )
    return vertices


def _default_view(name: str) -> View | None:
    if name.startswith("s"):
        return View(name=name, policy="standard")
    if name.startswith("h") and len(name) > 1:
        return View(name=name, policy="heavy", source="s" + name[1:])
    return None


def _undeclared(declared: list[View], edges: list[Edge]) -> list[View]:
    """The other views in the order of first mention; each mention is followed to the views it is derived from."""
    views: list[View] = []
    names = {view.name for view in declared}
    mentions: list[tuple[str | None, str]] = [(view.source, f"view {view.name}") for view in declared]
    mentions += [(name, f"edge {edge.name}") for edge in edges for name in (edge.predictor, *edge.target_views)]
    for name, mentioned_by in mentions:
        while name is not None and name not in names:
            view = _default_view(name)
            if view is None:
                raise DsslError(
                    f"{mentioned_by} names the view {name!r}, which is unknown: s… is standard(image) and h1 is heavy(s1); "
                    f"declare any other, as in '{name} = ra(2,5)(image)'"
                )
            views.append(view)
            names.add(name)
            name, mentioned_by = view.source, f"view {name}"
    return views


def _edge_texts(edges: tuple[Edge, ...]) -> Iterator[str]:
    position = 0
    while position < len(edges):
        edge = edges[position]
        following = edges[position + 1] if position + 1 < len(edges) else None
        # a pair of alignments reads better as two arrows, unless nothing but the pair's own spelling differs
        both = edge.kind == "similarity" and following is not None and following.is_reverse_of(edge)
        options: list[str] = []
        if edge.kind != ("similarity" if both else "alignment"):
            options.append(edge.kind)
        if edge.detach == both:
            options.append("detach" if edge.detach else "attach")
        weight = "" if edge.weight_text == "1" else f":{edge.weight_text}"
        suffix = f"[{', '.join(options)}]" if options else ""
        yield f"{edge.name.replace('->', '<->') if both else edge.name}{weight}{suffix}"
        position += 2 if both else 1


# The named graphs: the paper's baselines, its method, every row of its ablation, and one from elsewhere. The figure of the
# ablation (section 4.3) survives only through its text; rows whose shape the text does not state are marked as inferred.

INDEPENDENT = "h1 = heavy(image), h2 = heavy(image)"


def equation6(
    alpha: float = 1.0, beta: float = 0.0, gamma: float = 1.0, delta: float = 0.0, *, derived: bool = True
) -> ViewGraph:
    """The paper's general loss. A term of weight zero is left out, with the views that only it needs.

    Args:
        alpha: The weight of the standard pair.
        beta: The weight of the heavy pair.
        gamma: The weight of ``h->s``.
        delta: The weight of ``s->h``.
        derived: Whether heavy views are derived from the standard ones (Eq. 3) or made from the image itself (Algorithm 1).
    """
    terms = {
        "s1<->s2": alpha, "h1<->h2": beta, "h1->s1": gamma, "h2->s2": gamma, "s1->h1": delta, "s2->h2": delta,
    }  # fmt: skip
    items = [f"{edge}:{number(weight)}" for edge, weight in terms.items() if weight != 0]
    if not derived and any("h" in item for item in items):
        items.append(INDEPENDENT)
    graph = _parse(", ".join(items))
    return replace(graph, views=tuple(sorted(graph.views, key=lambda view: ("s1", "s2", "h1", "h2").index(view.name))))


def soft(delta: float) -> ViewGraph:
    """Soft-weighted DSSL (section 4.3): gamma = 1 - delta.

    Args:
        delta: The weight of ``s->h``, from 0 to 1.
    """
    if not 0 <= delta <= 1:
        raise DsslError(f"soft({delta}): delta must lie between 0 and 1, since gamma is 1 - delta")
    return equation6(1.0, 0.0, 1.0 - delta, delta)


@dataclass(frozen=True, slots=True)
class Preset:
    text: str
    """The graph in its text form."""
    meaning: str
    inferred: str = ""
    """What the paper does not say outright; empty where it does."""


_FOUR = ("s1", "s2", "s3", "s4")
PRESETS: dict[str, Preset] = {
    "standard": Preset("s1<->s2", "one pair of standard views: the original methods; SimCLR's row 'repro.'"),
    "standard2": Preset("s1<->s2, s3<->s4", "two standard pairs (Algorithm 2): the row 'repro.' of SimSiam and BYOL"),
    "heavy": Preset(f"h1<->h2, {INDEPENDENT}", "one pair of heavy views; SimCLR's row 'w/ T^'"),
    "heavy2": Preset(
        f"h1<->h2, h3<->h4, {INDEPENDENT}, h3 = heavy(image), h4 = heavy(image)",
        "two heavy pairs: the row 'w/ T^' of SimSiam and BYOL",
    ),
    "dssl": Preset(
        "s1<->s2, h1->s1, h2->s2", "directional self-supervised learning (Eq. 5, Algorithm 1), derived views"
    ),
    "fastsiam": Preset(
        ", ".join(f"{view}->mean({','.join(other for other in _FOUR if other != view)})[similarity]" for view in _FOUR),
        "four standard views, each pulled to the mean of the others (FastSiam, Pototzky et al. 2022)",
    ),
}

_PAIRS = "the text does not say how many pairs; two, so that as many predictions are made as in (j)"
ABLATION: dict[str, Preset] = {
    "c": Preset(f"h1<->h2, {INDEPENDENT}", "heavy views only, symmetric; the paper: collapse"),
    "d": Preset(
        f"s1<->h1, s2<->h2, {INDEPENDENT}",
        "standard and heavy view, symmetric, made independently; the paper: 59.7",
        f"that the heavy view has a crop of its own; {_PAIRS}",
    ),
    "e": Preset(
        "s1<->h1, s2<->h2",
        "standard and heavy view, symmetric, the heavy one derived; the paper: 20.4",
        f"the text only says that all views are made similar; derived is the remaining difference to (d); {_PAIRS}",
    ),
    "f": Preset(
        "s1<->s2, h1<->h2, h1->s1, h2->s2", "DSSL and the symmetric heavy pair (beta = 1); the paper: collapse"
    ),
    "g": Preset(
        f"h1->s1, h2->s2, {INDEPENDENT}",
        "(d) with direction: only heavy to standard, made independently; the paper: 93.1",
        "that there is no standard pair, since the text compares it with (d)",
    ),
    "h": Preset(
        "s1<->s2, h1->s1, h2->s2, s1->h1, s2->h2",
        "DSSL and standard to heavy (delta = 1), 'fairly contrasting'; the paper: collapse",
        "that (h) is (j) with delta, from the sentence that compares the two",
    ),
    "i": Preset(
        f"s1<->s2, h1->s1, h2->s2, {INDEPENDENT}",
        "DSSL with heavy views made from the image, as Algorithm 1 writes it; the paper: 93.7",
        "that (i) differs from (j) by the views' construction alone, from the sentence that compares (g), (i) and (j)",
    ),
    "j": Preset("s1<->s2, h1->s1, h2->s2", "DSSL; the paper: 94.2"),
}
PRESETS |= {f"ablation-{letter}": preset for letter, preset in ABLATION.items()}


def named_graph(text: str) -> ViewGraph:
    """The graph that a text stands for.

    Args:
        text: The name of a preset, ``soft(0.1)``, ``equation6(1,0,1,0)``, or the text form itself.
    """
    text = text.strip()
    if text in PRESETS:
        return _parse(PRESETS[text].text)
    call = re.fullmatch(r"(\w+)\s*\(([^()]*)\)", text)
    if call and call[1] in ("soft", "equation6"):
        return _call(text, call[1], [word.strip() for word in call[2].split(",")])
    if re.fullmatch(r"[\w-]*", text) or call:
        raise choices("graph", call[1] if call else text, [*PRESETS, "soft", "equation6"])
    return _parse(text)


def _call(text: str, name: str, words: list[str]) -> ViewGraph:
    independent = name == "equation6" and words[-1] == "independent"
    try:
        values = [float(word) for word in (words[:-1] if independent else words)]
    except ValueError:
        values = []
    if not 1 <= len(values) <= (4 if name == "equation6" else 1):
        raise DsslError(
            f"{text}: expected one number for soft, or one to four for equation6, with 'independent' at the end for heavy views "
            "made from the image"
        )
    return equation6(*values, derived=not independent) if name == "equation6" else soft(*values)
