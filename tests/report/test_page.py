import base64
import hashlib
import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jinja2
import pytest
from matplotlib.figure import Figure

from dssl.files import write_text
from dssl.report import page
from dssl.report.page import COLORS, SERIES


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A page of the smallest kind on the real base."""
    (tmp_path / "small.html").write_text('{% extends "base.html" %}{% block content %}<p>{{ text }}</p>{% endblock %}')
    environment = page._environment().overlay(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(tmp_path), jinja2.FileSystemLoader(page.TEMPLATES)])
    )
    monkeypatch.setattr(page, "_environment", lambda: environment)
    return tmp_path


def test_text_is_escaped_in_title_and_body(template: Path) -> None:
    made = page.render("small.html", title="</title><script>1</script>", context={"text": '<img src=x onerror="1">&'})
    assert "<script" not in made
    assert "<img" not in made
    assert "&lt;img src=x onerror=&#34;1&#34;&gt;&amp;" in made


def test_a_missing_value_is_an_error_and_not_an_empty_place(template: Path) -> None:
    with pytest.raises(jinja2.UndefinedError):
        page.render("small.html", title="t", context={})


def test_policy_allows_the_one_style_by_its_hash_and_nothing_else(template: Path) -> None:
    made = page.render("small.html", title="t", context={"text": "x"})
    (style,) = re.findall(r"<style>(.*?)</style>", made, flags=re.DOTALL)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', made)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert made.index("Content-Security-Policy") < made.index("<style>")


def test_pages_hold_no_style_attribute_and_no_script() -> None:
    for template in page.TEMPLATES.glob("*.html"):
        text = template.read_text()
        assert not re.search(r"<script|\sstyle=|\son\w+=|https?:|javascript:", text), template.name


def test_every_colour_has_a_dark_counterpart() -> None:
    light = page.STYLESHEET.split("@media", 1)[0]
    dark = page.STYLESHEET.split("prefers-color-scheme: dark", 1)[1].split("}", 1)[0]
    assert set(re.findall(r"--([\w-]+): #", light)) == set(re.findall(r"--([\w-]+): #", dark))
    assert {"ink", "muted", "line", "good", "warn", "bad"} < set(COLORS)
    assert len(set(COLORS.values())) == len(COLORS)  # a colour of a figure has one variable


def test_a_name_that_is_not_unicode_can_be_written_and_read(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "page.html", "caf\udce9.jpg")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == "caf\\udce9.jpg"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (0.0002, "< 0.1%"), (0.9998, "> 99.9%"), (0.014, "1.4%"), (0.498, "50%"), (0.0999, "10%"),
     (0.996, "99.6%")],
)  # fmt: skip
def test_shares(share: float, text: str) -> None:
    assert page.percent(share) == text.replace(" ", "\N{NO-BREAK SPACE}")


@pytest.mark.parametrize(
    ("number", "text"),
    [(124_567, "124,567"), (999, "999"), (3.4, "3.4"), (1.49, "1.49")],
)
def test_rates(number: float, text: str) -> None:
    assert page.rate(number) == text


def _drawn(name: str, text: str = "label") -> str:
    with page.styled():
        figure = Figure(figsize=(4, 2))
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [1, 3, 2], color=SERIES[0], marker="o", alpha=0.5)
        axes.fill_between([0, 1], [1, 2], color=COLORS["bad"])
        axes.plot([0, 2], [1, 1])
        axes.plot([0, 2], [2, 1])  # the second colour of the cycle
        axes.set_title(page.label(text), fontweight="bold")
        axes.grid(True)
        return str(page.plot(figure, name=name, description='"quoted" <description>').svg)


def test_the_same_figure_is_the_same_bytes_and_holds_no_date() -> None:
    first, second = _drawn("a"), _drawn("a")
    assert first == second
    assert "metadata" not in first
    assert not re.search(r"20\d\d-\d\d", first)


def test_all_colours_are_variables_so_that_they_follow_the_scheme() -> None:
    drawn = _drawn("a")
    assert not re.search(r"#[0-9a-f]{6}", drawn)
    used = set(re.findall(r'(fill|stroke)="var\(--([\w-]+)\)"', drawn))
    expected = {("fill", "ink"), ("fill", "muted"), ("stroke", "line"), ("stroke", "series-1"), ("fill", "bad")}
    assert expected | {("stroke", "series-2")} <= used
    assert 'font-weight="bold"' in drawn or 'font-weight="700"' in drawn


def test_nothing_that_the_security_policy_forbids() -> None:
    drawn = _drawn("a")
    assert "style" not in {_key for element in ElementTree.fromstring(drawn).iter() for _key in element.attrib}
    assert "<style" not in drawn
    assert "xmlns" not in drawn


def test_ids_of_two_figures_differ_and_references_meet() -> None:
    seen: set[str] = set()
    for name in ("first", "second"):
        root = ElementTree.fromstring(_drawn(name))
        ids = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
        used = re.findall(r"url\(#([^)]*)\)", _drawn(name)) + re.findall(r'href="#([^"]*)"', _drawn(name))
        assert used
        assert set(used) <= ids
        assert not ids & seen
        seen |= ids


def test_any_text_may_stand_in_a_figure() -> None:
    hostile = "<script>alert(1)</script> $x^2$ \x00\x1b\udce9 &amp;"
    root = ElementTree.fromstring(_drawn("a", hostile))
    texts = ["".join(element.itertext()) for element in root.iter("text")]
    assert "<script>alert(1)</script> $x^2$ \ufffd\ufffd\ufffd &amp;" in [text.strip() for text in texts]
    assert root.attrib["aria-label"] == '"quoted" <description>'
