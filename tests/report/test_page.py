import base64
import hashlib
import html
import re
from pathlib import Path

import jinja2
import pytest

from dssl.files import write_text
from dssl.report import page
from dssl.report.figures import COLORS


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


def test_figures_and_stylesheet_name_the_same_colours() -> None:
    light = page.stylesheet().split("@media", 1)[0]
    declared = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    assert {name: declared.get(name) for name in COLORS} == COLORS
    dark = page.stylesheet().split("prefers-color-scheme: dark", 1)[1].split("}", 1)[0]
    assert set(declared) == set(re.findall(r"--([\w-]+): #", dark)), "a colour has no dark counterpart"
    for name in COLORS:
        assert (
            f".fill-{name} {{ fill: var(--{name}); }} .stroke-{name} {{ stroke: var(--{name}); }}" in page.stylesheet()
        )


def test_a_name_that_is_not_unicode_can_be_written_and_read(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "page.html", "caf\udce9.jpg")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == "caf\\udce9.jpg"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.0002, "< 0.1 %"), (0.9998, "> 99.9 %"), (0.014, "1.4 %"), (0.498, "50 %"), (0.0999, "10 %"),
     (0.996, "99.6 %")],
)  # fmt: skip
def test_shares(share: float, text: str) -> None:
    assert page.percent(share) == text.replace(" ", "\N{NO-BREAK SPACE}")


@pytest.mark.parametrize(
    ("number", "text"), [(124_567, "125 000"), (999, "999"), (3.4, "3.4"), (1_234_567, "1 230 000")]
)
def test_rates(number: float, text: str) -> None:
    assert page.rate(number) == text.replace(" ", "\N{NO-BREAK SPACE}")


def test_counts_are_exact() -> None:
    assert [page.exact(number) for number in (7, 1234, 1_234_567)] == ["7", "1\xa0234", "1\xa0234\xa0567"]
