"""``dssl graph``: what a view graph contains, what it costs, and what it looks like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dssl.errors import DsslError
from dssl.graph import Edge, ViewGraph
from dssl.methods import METHODS
from dssl.presets import PRESETS, named_graph
from dssl.text import columns

_PUBLISHED = "the published code makes 8 passes for DSSL: 4 with and 4 without gradient"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show a view graph: its views, edges, weights and cost with each method; draw it with --out."""

    graph: Annotated[str, tyro.conf.arg(metavar="GRAPH")]
    """A preset (standard, standard2, heavy, heavy2, dssl, ablation-c ... ablation-j), soft(0.1), equation6(1,0,1,0), or the
    text itself: "s1<->s2, h1->s1, h2->s2"."""
    out: Path | None = None
    """Draw the graph to this file: .png, .svg or .pdf."""


def run(arguments: Arguments) -> int:
    graph = named_graph(arguments.graph)
    print(describe(graph, name=arguments.graph.strip()))
    if arguments.out is not None:
        if arguments.out.suffix not in (".png", ".svg", ".pdf"):
            raise DsslError(f"--out is {arguments.out}: expected a name that ends in .png, .svg or .pdf")
        from dssl.report.graph_figure import draw_graph

        draw_graph(graph, arguments.out)
        print(f"\ndrawn to {arguments.out}")
    return 0


def describe(graph: ViewGraph, *, name: str) -> str:
    """Everything about a graph, in plain text."""
    lines = [str(graph)]
    if preset := PRESETS.get(name):
        lines.append(f"  {name}: {preset.meaning}")
        if preset.inferred:
            lines.append(f"  inferred, not stated outright in the paper: {preset.inferred}")
    made = {view.name for view in graph.made}
    lines += ["", "views"]
    for view in graph.views:
        source = "the image" if view.source is None else f"the pixels of {view.source}"
        lines.append(f"  {view.name:<6}{view.policy} on {source}{'' if view.name in made else '  (never made)'}")
    lines += ["", "edges"]
    lines += [f"  {edge.name:<10}weight {edge.weight:<6g}{_meaning(edge)}" for edge in graph.edges]
    divided = {"similarity": "the similarity weights", "all": "all weights", "sum": "nothing"}[graph.normalize]
    lines.append(f"  the weighted sum is divided by {graph.divisor:g} (normalize={graph.normalize}: {divided})")
    lines += [
        "",
        "cost of a step with a batch of n",
    ]
    costs = [("method", "encoder passes", "of these without gradient", "compared pairs")]
    for method in METHODS.values():
        price = method.cost(graph)
        costs.append((method.name, str(price.passes), str(price.without_gradient), str(price.pairs)))
    lines += [f"  {line}" for line in columns(costs)]
    if graph == named_graph("dssl"):
        lines += [f"  byol: {_PUBLISHED}", "  simclr: the standard pair alone compares 2n² pairs"]
    return "\n".join(lines)


def _meaning(edge: Edge) -> str:
    if edge.weight == 0:
        return "costs nothing"
    text = "similarity S of the method" if edge.kind == "similarity" else "alignment D, negative cosine"
    return text + (", target detached" if edge.detach else "")
