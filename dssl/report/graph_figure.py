"""A view graph as a picture for a paper."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from dssl.files import replacing
from dssl.graph import Edge, Vertex, ViewGraph

STANDARD, HEAVY, RELATION, DERIVED, INK = "#2f6db3", "#c2571a", "#3f8f4f", "#9a9a9a", "#222222"
_KINDS = {
    "similarity": (STANDARD, "similarity of the method"),
    "alignment": (HEAVY, "alignment, target detached"),
    "relation": (RELATION, "relation to other images"),
}
"""The colour of an edge, and what the legend says."""
_RADIUS = 0.36
_COLUMN, _ROW = 2.9, 1.75
_Point = tuple[float, float]


def draw_graph(graph: ViewGraph, path: Path) -> None:
    """Write the picture of a graph; the suffix of the path selects the format."""
    figure = graph_figure(graph)
    # text stays text and no date is written, so that the same graph gives the same bytes
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
    styled = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dssl", "pdf.fonttype": 42})
    with styled, replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."), dpi=200, metadata=metadata)


def graph_figure(graph: ViewGraph) -> Figure:
    """Image on the left, then the views made from it, then the views derived from those."""
    places = _places(graph)
    across = max(*(x for x, _ in places.values()), *(_junction(edge, places)[0] for edge in graph.edges))
    down = min(y for _, y in places.values())
    width, height = across + 2.4, -down + 3.0
    figure = Figure(figsize=(width * 0.82, height * 0.82))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1.2, width - 1.2), ylim=(down - 1.7, 1.3), aspect="equal")
    axes.axis("off")
    middle = down / 2
    _box(axes, (0, middle), "image")
    for view in graph.views:
        start = (0.0, middle) if view.source is None else places[view.source]
        # an arrow that leaves upwards, to a mean, has that side for itself
        below = any(
            edge.predictor == view.name and len(edge.targets) > 1 and _junction(edge, places)[1] > places[view.name][1]
            for edge in graph.edges
        )
        _derivation(axes, start, places[view.name], view.policy, label=view.source is not None, below=below)
    for name in graph.taught:
        _derivation(axes, places[name], places[f"teacher({name})"], "", label=True)
    for position, edge in enumerate(graph.edges):
        # of a symmetric pair only the first edge is drawn, with two heads
        if not any(_is_pair(edge, other) for other in graph.edges[:position]):
            _edge(axes, graph, edge, places)
    for view in graph.views:
        colour = HEAVY if view.is_heavy else STANDARD
        axes.add_patch(Circle(places[view.name], _RADIUS, facecolor="white", edgecolor=colour, linewidth=2, zorder=5))
        x, y = places[view.name]
        axes.text(x, y, _subscript(view.name), ha="center", va="center", fontsize=13, color=colour, zorder=6)
        own = [view.policy] if view.source is None and view.policy not in ("standard", "heavy") else []
        if about := ", ".join([*own, *([] if view.size is None else [f"{view.size} px"])]):
            # away from the arrow that comes from the image
            y, side = (y + _RADIUS + 0.1, "bottom") if y > middle else (y - _RADIUS - 0.1, "top")
            axes.text(x, y, about, ha="center", va=side, fontsize=8.5, color=colour, zorder=6)
    for name in graph.taught:
        _box(axes, places[f"teacher({name})"], f"teacher({name})")
    _legend(axes, graph)
    return figure


def _places(graph: ViewGraph) -> dict[str, _Point]:
    """One column for each derivation step; a derived view is placed beside its source, further ones below it."""
    places: dict[str, _Point] = {}
    taken: set[tuple[int, int]] = set()

    def depth(name: str) -> int:
        source = graph.view(name).source
        return 1 if source is None else 1 + depth(source)

    for view in sorted(graph.views, key=lambda view: depth(view.name)):
        column = depth(view.name)
        row = 0 if view.source is None else round(-places[view.source][1] / _ROW)
        while (column, row) in taken:
            row += 1
        taken.add((column, row))
        places[view.name] = (column * _COLUMN - 0.7, -row * _ROW)
    right = max(x for x, _ in places.values()) + _COLUMN
    return places | {f"teacher({name})": (right, places[name][1]) for name in graph.taught}


def _box(axes: Axes, place: _Point, name: str) -> None:
    x, y = place
    look: dict[str, Any] = {"boxstyle": "round,pad=0.02", "facecolor": "#f2f2f2", "edgecolor": INK, "zorder": 2}
    axes.add_patch(FancyBboxPatch((x - 0.5, y - 0.38), 1.0, 0.76, **look))
    axes.text(x, y, name, ha="center", va="center", fontsize=11 if len(name) < 8 else 9, color=INK)


def _arrow(axes: Axes, start: _Point, end: _Point, bend: float, **look: Any) -> None:
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **look))


def _derivation(axes: Axes, start: _Point, end: _Point, policy: str, *, label: bool, below: bool = False) -> None:
    side = -1 if below else 1
    _arrow(
        axes, start, end, -0.28 * side if label else 0.0, arrowstyle="-|>", mutation_scale=9, color=DERIVED,
        linestyle=(0, (2, 2)), shrinkA=22 if label else 34, shrinkB=22 if policy else 34, zorder=1,
    )  # fmt: skip
    if label:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.47 * side
        look: dict[str, Any] = {"fontsize": 9, "color": "#707070", "style": "italic"}
        axes.text(x, y, policy, ha="center", va="top" if below else "bottom", **look)


def _is_pair(edge: Edge, other: Edge) -> bool:
    return edge.kind == "similarity" and edge.is_reverse_of(other)


def _junction(edge: Edge, places: dict[str, _Point]) -> _Point:
    """Where an arrow ends: at its view, or at a point beside the views whose mean is the target."""
    ends = [places[str(vertex)] for vertex in edge.targets]
    if len(ends) == 1:
        return ends[0]
    right, (start, height) = max(x for x, _ in ends), places[edge.predictor]
    if start != right:
        height = sum(y for _, y in ends) / len(ends)
    return right + 0.38 * _COLUMN, height


def _edge(axes: Axes, graph: ViewGraph, edge: Edge, places: dict[str, _Point]) -> None:
    start, end = places[edge.predictor], _junction(edge, places)
    mean = len(edge.targets) > 1
    both = any(_is_pair(edge, other) for other in graph.edges)
    source = graph.view(edge.predictor).source
    made_with = {source, *(view.name for view in graph.views if view.source == edge.predictor)}
    derivation = not mean and (edge.is_taught or edge.target_views[0] in made_with)
    reverse = str(edge.targets[0]), (Vertex(edge.predictor),)
    returning = any((other.predictor, other.targets) == reverse for other in graph.edges)
    far = start[0] == end[0] and abs(start[1] - end[1]) > _ROW * 1.1
    if derivation:
        bend = -0.28 if end[0] < start[0] else -0.05 if returning and not both else 0.28
    elif mean:
        bend = 0.0 if abs(start[1] - end[1]) < _ROW else 0.25 if start[1] < end[1] else -0.25  # away from the views
    elif far:
        bend = 0.35
    else:
        bend = 0.16 if returning and not both else 0.0
    colour, _ = _KINDS[edge.kind]
    _arrow(
        axes, start, end, bend, arrowstyle="<|-|>" if both else "-|>", mutation_scale=16, linewidth=2.2, color=colour,
        alpha=1.0 if edge.largest else 0.25, shrinkA=22, shrinkB=4 if mean else 34 if edge.is_taught else 22, zorder=3,
    )  # fmt: skip
    if mean:  # a point, and a line from it to each of the views
        for vertex in edge.targets:
            _arrow(
                axes, end, places[str(vertex)], 0, arrowstyle="-", color=colour, linewidth=1.2, shrinkA=0, shrinkB=22
            )
        axes.add_patch(Circle(end, 0.09, facecolor=colour, edgecolor=colour, zorder=4))
    if edge.weight_text != "1":
        x = (start[0] + end[0]) / 2 + bend * (end[1] - start[1]) / 2
        y = (start[1] + end[1]) / 2 - bend * (end[0] - start[0]) / 2
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.text(x, y, edge.weight_text, ha="center", va="center", fontsize=9, color=colour, bbox=box, zorder=4)


def _legend(axes: Axes, graph: ViewGraph) -> None:
    kinds = {edge.kind for edge in graph.edges}
    handles = [
        Line2D([], [], color=color, linewidth=2.2, label=label)
        for kind, (color, label) in _KINDS.items()
        if kind in kinds
    ]
    handles.append(Line2D([], [], color=DERIVED, linestyle=":", label="made from"))
    if any(len(edge.targets) > 1 for edge in graph.edges):
        handles.append(Line2D([], [], color=INK, marker="o", linestyle="", label="mean of the targets"))
    axes.legend(handles=handles, loc="lower left", ncols=1, fontsize=8.5, frameon=False, borderaxespad=0.6)


def _subscript(name: str) -> str:
    letters = name.rstrip("0123456789")
    digits, plain = name[len(letters) :], letters.replace("_", r"\_")
    return rf"$\mathrm{{{plain}}}_{{{digits}}}$" if digits else rf"$\mathrm{{{plain}}}$"
