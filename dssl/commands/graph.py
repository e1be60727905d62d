"""``dssl graph``: what a view graph contains, what it costs, and what it looks like."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dssl.commands.options import Usage
from dssl.errors import DsslError, choices
from dssl.graph import PRESETS, Edge, ViewGraph, named_graph
from dssl.graph.schedule import Step
from dssl.methods import METHODS
from dssl.text import columns

_PUBLISHED = "the published code makes 8 passes for DSSL: 4 with and 4 without gradient"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show a view graph: its views, edges, weights and cost with each method; draw it with --out."""

    USAGE: ClassVar[Usage] = Usage(
        positional={"graph": "GRAPH"},
        examples=(
            "dssl graph dssl",
            "dssl graph dssl --steps --method byol",
            'dssl graph "s1<->s2, h1->s1" --out graph.svg',
        ),
    )

    graph: str
    """A preset (standard, standard2, heavy, heavy2, dssl, fastsiam, ablation-c ... ablation-j), soft(0.1), equation6(1,0,1,0), or
    the text itself: "s1<->s2, h1->s1, h2->s2"."""
    out: Path | None = None
    """Draw the graph to this file: .png, .svg or .pdf."""
    steps: bool = False
    """Print what a training step does, in order."""
    method: str | None = None
    """With --steps: the name of a method, such as simsiam; all of them by default."""


def run(arguments: Arguments) -> int:
    graph = named_graph(arguments.graph)
    if arguments.out is not None and arguments.out.suffix not in (".png", ".svg", ".pdf"):
        raise DsslError(f"--out is {arguments.out}: expected a name that ends in .png, .svg or .pdf")
    if arguments.method is not None and not arguments.steps:
        raise DsslError(f"--method {arguments.method} without --steps: a graph has no method, its steps do")
    print(steps(graph, arguments.method) if arguments.steps else describe(graph, name=arguments.graph.strip()))
    if arguments.out is not None:
        from dssl.report.graph_figure import draw_graph

        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        draw_graph(graph, arguments.out)
        print(f"\ndrawn to {arguments.out}")
    return 0


def steps(graph: ViewGraph, method: str | None = None) -> str:
    """One line for each schedule, with the methods that have it."""
    if method is not None and method not in METHODS:
        raise choices("method", method, METHODS)
    names: dict[tuple[Step, ...], list[str]] = {}
    for settings in METHODS.values() if method is None else (METHODS[method],):
        names.setdefault(settings.schedule(graph), []).append(settings.name)
    return "\n".join(f"{', '.join(those)}: {' · '.join(map(str, line))}" for line, those in names.items())


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
        size = "" if view.size is None else f", {view.size} px"
        lines.append(f"  {view.name:<6}{view.policy} on {source}{size}{'' if view.name in made else '  (never made)'}")
    lines += ["", "edges"]
    width = max(10, *(len(edge.name) + 2 for edge in graph.edges))
    lines += [f"  {edge.name:<{width}}weight {edge.weight_text:<6} {_meaning(edge)}" for edge in graph.edges]
    divided = {"similarity": "the similarity weights", "all": "all weights", "sum": "nothing"}[graph.normalize]
    if graph.normalize == "similarity" and not any(edge.kind == "similarity" and edge.largest for edge in graph.edges):
        divided = "all weights, because no edge is a similarity"
    lines.append(f"  the weighted sum is divided by {graph.divisor:g} (normalize={graph.normalize}: {divided})")
    if any(edge.kind == "alignment" and not edge.is_taught for edge in graph.active_edges):
        vicreg = "for vicreg, barlowtwins, lejepa, swav and dino, the part of S that pulls the two ends together"
        lines.append(f"  D is the negative cosine; {vicreg}")
    if any(edge.kind == "relation" for edge in graph.active_edges):
        lines.append("  R is the cross entropy of the similarities to the other images of the batch, or to a queue")
    lines += ["", "cost of a step with a batch of n"]
    costs = [("method", "encoder passes", "of these without gradient", "compared pairs")]
    for method in METHODS.values():
        cost = method.cost(graph)
        costs.append((method.name, str(cost.passes), str(cost.without_gradient), str(cost.pairs)))
    lines += [f"  {line}" for line in columns(costs)]
    if graph.taught:
        lines.append(f"  and with each of them {len(graph.taught)} of the teacher, without gradient")
    sizes: dict[int, list[str]] = {}
    for name in dict.fromkeys((*graph.encoded, *graph.taught)):
        if (pixels := graph.size(name)) is not None:
            sizes.setdefault(pixels, []).append(name)
    for pixels, names in sizes.items():
        price = f"a pass costs about ({pixels} / the run's image size)² of the others"
        lines.append(f"  at {pixels} px: {', '.join(names)}; {price}")
    if graph == named_graph("dssl"):
        lines += [f"  byol: {_PUBLISHED}", "  simclr: the standard pair alone compares 2n² pairs"]
    return "\n".join(lines)


def _meaning(edge: Edge) -> str:
    if edge.largest == 0:
        return "costs nothing"
    moving = "" if edge.final is None else ", the weight moves over the run"
    if edge.is_taught:
        return f"alignment D to the features of a frozen teacher, the negative cosine{moving}"
    names = {"similarity": "similarity S of the method", "alignment": "alignment D", "relation": "relation R"}
    text = names[edge.kind]
    return f"{text}{', target detached' if edge.detach else ''}{moving}"
