"""The base of every HTML page: one template and one stylesheet, no script, nothing loaded from elsewhere."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import jinja2
from markupsafe import Markup

from dssl.version import VERSION

Colour: TypeAlias = Literal["good", "warn", "bad", "neutral"]
"""How a badge or a number is coloured; ``neutral`` says nothing about quality."""

TEMPLATES = Path(__file__).parent / "templates"


def percent(share: float) -> str:
    """A share for people, with one digit near the ends: "0 %" means none and "100 %" means all, never nearly."""
    if 0 < share < 0.001:
        text = "< 0.1 %"
    elif 0.999 < share < 1:
        text = "> 99.9 %"
    elif 0 < share < 0.0995 or 0.9905 <= share < 1:
        text = f"{100 * share:.1f} %"
    else:
        text = f"{100 * share:.0f} %"
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def rate(number: float) -> str:
    """A rate with three significant digits and a space between thousands: 124 000."""
    if abs(number) < 100:
        return f"{number:.3g}"
    digits = max(0, len(str(int(abs(number)))) - 3)
    return exact(round(number / 10**digits) * 10**digits)


def exact(number: int) -> str:
    """A count with a space between thousands: 12 345."""
    return f"{number:,}".replace(",", "\N{NO-BREAK SPACE}")


@cache
def stylesheet() -> str:
    """The stylesheet of all pages, as it is written between the style tags."""
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


def content_security_policy(style: str) -> str:
    """Allow exactly this style element and images inside the page: no script, no request, no form, no style attribute."""
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"exact": exact, "percent": percent, "rate": rate}
    return environment


def render(template: str, *, title: str, context: Mapping[str, object]) -> str:
    """The HTML of a page whose template extends ``base.html``.

    Text in ``context`` is escaped; only what this package's own helpers made as ``Markup`` (figures) is inserted unchanged.
    """
    style = stylesheet()
    policy = content_security_policy(style)
    # the stylesheet is ours and contains no "</"
    made = {"title": title, "version": VERSION, "stylesheet": Markup(style), "content_security_policy": policy}
    return _environment().get_template(template).render(context, **made)
