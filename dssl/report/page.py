"""The base of every HTML page: one template and one stylesheet, no script, nothing loaded from elsewhere; and its figures.

A figure is drawn with Matplotlib inside ``styled()`` in the colours of ``COLORS``: ``plot`` turns each into the variable of the
stylesheet, so that it follows light and dark, and style attributes, which the page's content security policy forbids, into
presentation attributes. The same data gives the same bytes.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import jinja2
from markupsafe import Markup, escape

from dssl.version import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Colour: TypeAlias = Literal["good", "warn", "bad", "neutral"]
"""How a badge or a number is coloured; ``neutral`` says nothing about quality."""

TEMPLATES = Path(__file__).parent / "templates"
STYLESHEET = (TEMPLATES / "style.css").read_text(encoding="utf-8")
"""Of all pages, as it is written between the style tags."""
COLORS = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", STYLESHEET.partition("@media")[0]))
"""The light colours of the stylesheet by the names of its variables."""
SERIES = tuple(COLORS[f"series-{number}"] for number in range(1, 7))

_VARIABLES = {value: f"var(--{name})" for name, value in COLORS.items()}
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def percent(share: float) -> str:
    """A share for people, with one digit near the ends: "0%" means none and "100%" means all, never nearly."""
    if 0 < share < 0.001:
        text = "< 0.1%"
    elif 0.999 < share < 1:
        text = "> 99.9%"
    elif 0 < share < 0.0995 or 0.9905 <= share < 1:
        text = f"{100 * share:.1f}%"
    else:
        text = f"{100 * share:.0f}%"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def rate(number: float) -> str:
    """A rate with three significant digits, or to the next whole number: 12.3, 124,567."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


@cache
def _environment() -> jinja2.Environment:
    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    as_json = partial(json.dumps, indent=1, sort_keys=True, default=str)
    environment.filters |= {"thousands": "{:,}".format, "json": as_json, "percent": percent, "rate": rate}
    return environment


def render(template: str, *, title: str, context: Mapping[str, object]) -> str:
    """The HTML of a page whose template extends ``base.html``.

    Text in ``context`` is escaped; only what this package's own helpers made as ``Markup`` (figures) is inserted unchanged.
    """
    digest = base64.b64encode(hashlib.sha256(STYLESHEET.encode("utf-8")).digest()).decode("ascii")
    # exactly this style element and images inside the page: no script, no request, no form, no style attribute
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    # the stylesheet is ours and contains no "</"
    common = {"title": title, "version": VERSION, "stylesheet": Markup(STYLESHEET), "content_security_policy": policy}
    return _environment().get_template(template).render(context, **common)


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure as a page holds it."""

    svg: Markup
    description: str


def label(text: str) -> str:
    """Text that is safe in a figure: no character that XML forbids, and no dollar sign that would start a formula."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text).replace("$", r"\$")


def styled() -> AbstractContextManager[None]:
    """The settings under which a figure is drawn and passed to ``plot``."""
    import matplotlib

    ink, muted, line = (COLORS[name] for name in ("ink", "muted", "line"))
    return matplotlib.rc_context({
        "svg.fonttype": "none", "svg.hashsalt": "dssl", "font.size": 13, "legend.frameon": False, "text.color": ink,
        "axes.edgecolor": line, "grid.color": line, "xtick.color": line, "ytick.color": line,
        "axes.labelcolor": muted, "xtick.labelcolor": muted, "ytick.labelcolor": muted,
        "axes.facecolor": "none", "figure.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
        "axes.prop_cycle": f"cycler('color', {list(SERIES)!r})",
    })  # fmt: skip


def plot(figure: "Figure", *, name: str, description: str) -> Plot:
    """The figure for a page; ``name`` keeps its ids apart from those of the page's other figures."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = re.sub(r"^.*?(?=<svg)|<style.*?</style>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r"<\w[^>]*>", partial(_presentation, name=name), svg)
    about = f'<svg class="plot" role="img" aria-label="{escape(description)}"'
    return Plot(Markup(svg.replace("<svg", about, 1)), description)


def _presentation(tag: re.Match[str], name: str) -> str:
    """A tag with attributes in place of ``style``, colours of the page, and ids with the figure's name."""
    text = re.sub(r' xmlns(:xlink)?="[^"]*"|xlink:|pt(?=")', "", tag[0])
    text = re.sub(r"#[0-9a-f]{6}\b", lambda color: _VARIABLES.get(color[0], color[0]), text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", text)
    return re.sub(r' style="([^"]*)"', _attributes, text)


def _attributes(style: re.Match[str]) -> str:
    declared = dict(re.findall(r"([\w-]+): ([^;]+)", style[1]))
    if font := re.match(r"(?:(bold|\d00) )?([\d.]+)px", declared.pop("font", "")):
        declared |= {"font-weight": font[1] or "normal", "font-size": font[2]}
    return "".join(f' {key}="{value}"' for key, value in declared.items())
