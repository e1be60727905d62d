"""Matplotlib figures as SVG inside a page: same bytes for the same data, and colours that follow light and dark.

Draw inside ``styled()`` with the colours of ``COLORS``: ``to_svg`` turns each into a class of the page's stylesheet.
Style attributes, which the page's content security policy forbids, become presentation attributes.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "paper": "#fbfaf8",
    "surface": "#ffffff",
    "sunken": "#f3f1ed",
    "ink": "#1d2126",
    "muted": "#636a73",
    "line": "#e2dfd9",
    "good": "#1d7a55",
    "warn": "#8a5a00",
    "bad": "#b3261e",
    "series-1": "#2f6db4",
    "series-2": "#b4761d",
    "series-3": "#1f8a71",
    "series-4": "#8456b2",
    "series-5": "#a2593b",
    "series-6": "#5d6b7b",
}
"""The light colours of the stylesheet by name; a test keeps the two lists equal."""

SERIES = tuple(COLORS[f"series-{number}"] for number in range(1, 7))

_TOKENS = {value: name for name, value in COLORS.items()}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure as a page holds it."""

    svg: Markup
    description: str
    caption: str


def label(text: str) -> str:
    """Text that is safe in a figure: no character that XML forbids, and no dollar sign that would start a formula."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text).replace("$", r"\$")


def styled() -> AbstractContextManager[None]:
    """The settings under which a figure is drawn and passed to ``to_svg``."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "dssl",
            "font.size": 13,
            "text.color": COLORS["ink"],
            "axes.edgecolor": COLORS["line"],
            "axes.labelcolor": COLORS["muted"],
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": f"cycler('color', {list(SERIES)!r})",
            "figure.facecolor": "none",
            "grid.color": COLORS["line"],
            "xtick.color": COLORS["line"],
            "ytick.color": COLORS["line"],
            "xtick.labelcolor": COLORS["muted"],
            "ytick.labelcolor": COLORS["muted"],
            "legend.frameon": False,
        }
    )


def to_svg(figure: "Figure", *, name: str, description: str) -> Markup:
    """The figure as an SVG element for a page; ``name`` keeps its ids apart from those of the page's other figures."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in {"metadata", "style"}:
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(_presentation(attributes, name))
    width, height = (float(root.attrib[key].removesuffix("pt")) for key in ("width", "height"))
    root.attrib.update(width=f"{width:g}", height=f"{height:g}", role="img", **{"aria-label": description})
    root.attrib["class"] = "plot"
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def sparkline(values: Sequence[float], *, top: float) -> Markup:
    """A small line without axes, from zero to ``top``, with a dot at its highest point."""
    width, height = 104.0, 30.0
    step = width / max(1, len(values) - 1)
    points = [(i * step, height - height * value / top if top > 0 else height) for i, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    peak = points[max(range(len(values)), key=values.__getitem__)]
    return Markup(
        f'<svg class="sparkline" viewBox="0 0 {width:g} {height:g}" aria-hidden="true">'
        f'<line x1="0" y1="{height:g}" x2="{width:g}" y2="{height:g}" class="stroke-line"/>'
        f'<polyline points="{path}" fill="none" stroke-width="1.75" stroke-linejoin="round" class="stroke-series-1"/>'
        f'<circle cx="{peak[0]:.1f}" cy="{peak[1]:.1f}" r="2.6" class="fill-series-1"/></svg>'
    )


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _presentation(attributes: dict[str, str], name: str) -> dict[str, str]:
    """Attributes without ``style``: its colours as classes, the rest as attributes, and ids with the figure's name."""
    declared = [part.partition(":") for part in attributes.pop("style", "").split(";") if part.strip()]
    properties = {key.strip(): value.strip() for key, _, value in declared}
    font = properties.pop("font", "")
    if size := re.search(r"([\d.]+)px", font):
        attributes["font-size"] = size[1]
        if weight := re.search(r"\b(bold|[5-9]00)\b", font):
            attributes["font-weight"] = weight[1]
    classes = []
    for key, value in (properties | {k: attributes[k] for k in ("fill", "stroke") if k in attributes}).items():
        if token := _TOKENS.get(value):
            classes.append(f"{key}-{token}")
            attributes.pop(key, None)
        else:
            attributes[key] = value
    if classes:
        attributes["class"] = " ".join(sorted(classes))
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    for key, value in attributes.items():
        if key == "href" and value.startswith("#"):
            attributes[key] = f"#{name}-{value[1:]}"
        elif value.startswith("url(#"):
            attributes[key] = f"url(#{name}-{value[5:]}"
    return attributes
