"""The named graphs: the paper's baselines, its method, every row of its ablation, and one from elsewhere.

The figure of the ablation (section 4.3) survives only through its text; rows whose shape the text does not state are marked as
inferred in ``ABLATION``, and so in ``dssl graph`` and in the documentation.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from dssl.errors import DsslError, choices
from dssl.graph import Edge, Kind, Vertex, View, ViewGraph

INDEPENDENT = "h1 = heavy(image), h2 = heavy(image)"


def equation6(
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 1.0,
    delta: float = 0.0,
    *,
    pairs: int = 1,
    derived: bool = True,
    standard: str = "standard",
    heavy: str = "heavy",
) -> ViewGraph:
    """The paper's general loss: alpha and beta weigh the standard and the heavy pair, gamma h->s, delta s->h.

    One pair is two standard views and their two heavy views, which are ``derived`` from the standard ones (Eq. 3) or made from
    the image on their own (Algorithm 1). A term of weight zero is left out, with the views that only it needs.
    """
    if pairs < 1:
        raise DsslError(f"equation6: pairs is {pairs}, expected at least 1")
    views: dict[str, View] = {}
    edges: list[Edge] = []

    def edge(predictor: str, target: str, weight: float, *, pair: bool = False) -> Edge:
        kind: Kind = "similarity" if pair else "alignment"
        return Edge(predictor=predictor, targets=(Vertex(target),), weight=weight, kind=kind, detach=not pair)

    for first in range(1, 2 * pairs, 2):
        s, h = ([f"{letter}{number}" for number in (first, first + 1)] for letter in "sh")
        views |= {name: View(name=name, policy=standard) for name in s}
        views |= {b: View(name=b, policy=heavy, source=a if derived else None) for a, b in zip(s, h, strict=True)}
        edges += [edge(a, b, alpha, pair=True) for a, b in (s, s[::-1])]
        edges += [edge(a, b, beta, pair=True) for a, b in (h, h[::-1])]
        edges += [edge(a, b, gamma) for a, b in zip(h, s, strict=True)]
        edges += [edge(a, b, delta) for a, b in zip(s, h, strict=True)]
    edges = [edge for edge in edges if edge.weight != 0]
    needed = {end for edge in edges for end in (edge.predictor, *edge.target_views)}
    needed |= {source for name in needed if (source := views[name].source) is not None}
    return ViewGraph(tuple(view for name, view in views.items() if name in needed), tuple(edges))


def soft(delta: float) -> ViewGraph:
    """Soft-weighted DSSL (section 4.3): gamma = 1 - delta."""
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
        ", ".join(f"{one}->mean({','.join(other for other in _FOUR if other != one)})[similarity]" for one in _FOUR),
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

_CALLS: dict[str, tuple[Callable[..., ViewGraph], int]] = {"soft": (soft, 1), "equation6": (equation6, 4)}


def named_graph(text: str) -> ViewGraph:
    """The graph of a preset's name, of ``soft(0.1)``, of ``equation6(1,0,1,0)``, or of the text form itself."""
    text = text.strip()
    if text in PRESETS:
        return ViewGraph.parse(PRESETS[text].text)
    call = re.fullmatch(r"(\w+)\s*\(([^()]*)\)", text)
    if call and call[1] in _CALLS:
        function, most = _CALLS[call[1]]
        return _call(text, function, most, [word.strip() for word in call[2].split(",")])
    if re.fullmatch(r"[\w-]*", text) or call:
        raise choices("graph", call[1] if call else text, [*PRESETS, *_CALLS])
    return ViewGraph.parse(text)


def _call(text: str, function: Callable[..., ViewGraph], most: int, words: list[str]) -> ViewGraph:
    derived = "independent" not in words
    numbers = [word for word in words if word not in ("independent", "derived")]
    try:
        values = [float(word) for word in numbers]
    except ValueError:
        raise DsslError(
            f"{text}: expected numbers, and at the end 'independent' for heavy views made from the image"
        ) from None
    if len(values) > most or (most == 1 and len(values) != 1):
        raise DsslError(f"{text}: {function.__name__} takes {'one number' if most == 1 else f'at most {most} numbers'}")
    if function is equation6:
        return equation6(*values, derived=derived)
    if not derived:
        raise DsslError(f"{text}: 'independent' goes with equation6 only")
    return function(*values)
