"""The text form of a graph, for people and for the command line; ``parse(text)`` and ``write(graph)`` are inverse:

    s1<->s2            the method's own similarity, both ways
    h1->s1             alignment: the prediction of h1 is pulled to the detached target of s1
    s1<-h1             the same, as the paper writes it
    h1->s1:0.5         a weight
    h1->s1:0..1        a weight that moves linearly over the run
    s1->mean(s2,s3)    the target is the mean of the targets of several views
    s1->teacher(s1)    the target is what a frozen teacher makes of a view
    a->b[similarity, attach]   another kind, or a target through which gradient flows
    h1 = ra(2,5)(image)        a view declared: policy, and what it is applied to
    l1 = crop(0.05,0.3)@16(image)   a view of 16 pixels
    normalize=all      what the total is divided by

Items are separated by commas, semicolons or new lines. A view that is not declared is ``standard(image)`` when its name starts
with s, and h1 is ``heavy(s1)``.
"""

import re
from collections.abc import Iterator

from dssl.errors import DsslError, choices
from dssl.graph import KINDS, NORMALIZATIONS, Edge, Kind, Normalize, Vertex, View, ViewGraph

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


def parse(text: str) -> ViewGraph:
    """Read a graph, or say in one sentence which part could not be read."""
    declared: dict[str, View] = {}
    edges: list[Edge] = []
    normalize: Normalize = "similarity"
    for item in _items(text):
        if match := _SETTING.fullmatch(item):
            normalize = _normalization(match["value"].strip())
        elif match := _EDGE.fullmatch(item):
            edges += _edges(match)
        elif match := _DECLARATION.fullmatch(item):
            if match["name"] in declared:
                raise DsslError(f"view {match['name']} is declared twice; give the second one another name")
            declared[match["name"]] = _view(match)
        else:
            raise DsslError(
                f"cannot read {item!r} in the graph: expected an edge such as 'h1->s1:0.5' or 's1<->s2', "
                "a view such as 'h1 = ra(2,5)(image)', or 'normalize=all'"
            )
    return ViewGraph(_complete(declared, edges), tuple(edges), normalize)


def write(graph: ViewGraph) -> str:
    """The shortest of the spellings that is read back as the same graph."""
    edges = list(_edge_texts(graph.edges))
    tail = [] if graph.normalize == "similarity" else [f"normalize={graph.normalize}"]
    unusual = [str(view) for view in graph.views if view != _default_view(view.name)]
    for declarations in ([], unusual, [str(view) for view in graph.views]):
        text = ", ".join([*edges, *declarations, *tail])
        try:
            if parse(text) == graph:
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


def _normalization(value: str) -> Normalize:
    for known in NORMALIZATIONS:
        if value == known:
            return known
    raise choices("normalisation", value, NORMALIZATIONS)


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
    if both and "(" in left + right:
        raise DsslError(f"edge {left}{arrow}{right}: only a view predicts; use one arrow, as in s1->mean(s2,s3)")
    kind: Kind = "similarity" if both else "alignment"
    detach = not both
    for option in filter(None, (word.strip() for word in (match["options"] or "").split(","))):
        if option in KINDS:
            kind = "similarity" if option == "similarity" else "alignment"
        elif option in ("attach", "detach"):
            detach = option == "detach"
        else:
            raise choices(f"option of edge {left}{arrow}{right}", option, (*KINDS, "attach", "detach"))
    ends = {"->": [(left, right)], "<-": [(right, left)], "<->": [(left, right), (right, left)]}[arrow]
    return [
        Edge(predictor=_predictor(start, end), targets=_targets(start, end), weight=weight, kind=kind, detach=detach, final=final)
        for start, end in ends
    ]  # fmt: skip


def _predictor(start: str, end: str) -> str:
    if "(" in start:
        raise DsslError(f"edge {start}->{end}: only a view predicts; write {end}->{start}")
    return start


def _targets(start: str, end: str) -> tuple[Vertex, ...]:
    """The vertices of ``s1``, ``teacher(s1)`` or ``mean(s1,s2)``."""
    mean = re.fullmatch(r"mean\s*\((.*)\)", end, re.DOTALL)
    matches = [_VERTEX.fullmatch("".join(part.split())) for part in (mean[1].split(",") if mean else (end,))]
    vertices = tuple(Vertex(match["view"], taught=match["teacher"] is not None) for match in matches if match)
    if len(vertices) < len(matches):
        raise DsslError(
            f"edge {start}->{end}: target is {end!r}, expected a view, a mean such as mean(s1,s2), or teacher(s1)"
        )
    if mean and len(set(vertices)) < max(2, len(vertices)):
        raise DsslError(f"edge {start}->{end}: a mean is of two or more different views")
    return vertices


def _default_view(name: str) -> View | None:
    if name.startswith("s"):
        return View(name=name, policy="standard")
    if name.startswith("h") and len(name) > 1:
        return View(name=name, policy="heavy", source="s" + name[1:])
    return None


def _complete(declared: dict[str, View], edges: list[Edge]) -> tuple[View, ...]:
    """Views in the order of declaration, then of first mention; each mention is followed to the views it is derived from."""
    views: dict[str, View] = {}

    def add(name: str, mentioned_by: str) -> None:
        if name in views:
            return
        view = declared.get(name) or _default_view(name)
        if view is None:
            raise DsslError(
                f"{mentioned_by} names the view {name!r}, which is unknown: s… is standard(image) and h1 is heavy(s1); "
                f"declare any other, as in '{name} = ra(2,5)(image)'"
            )
        views[name] = view
        if view.source is not None:
            add(view.source, f"view {name}")

    for name in declared:
        views[name] = declared[name]
    for name in declared:
        source = declared[name].source
        if source is not None:
            add(source, f"view {name}")
    for edge in edges:
        for name in (edge.predictor, *edge.target_views):
            add(name, f"edge {edge.name}")
    return tuple(views.values())


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
