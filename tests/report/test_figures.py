import re
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from dssl.report import figures
from dssl.report.figures import COLORS, SERIES


def _drawn(name: str, text: str = "label") -> str:
    with figures.styled():
        figure = Figure(figsize=(4, 2))
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [1, 3, 2], color=SERIES[0], marker="o", alpha=0.5)
        axes.fill_between([0, 1], [1, 2], color=COLORS["bad"])
        axes.plot([0, 2], [1, 1])
        axes.plot([0, 2], [2, 1])  # the second colour of the cycle
        axes.set_title(figures.label(text), fontweight="bold")
        axes.grid(True)
        return str(figures.to_svg(figure, name=name, description='"quoted" <description>'))


def test_the_same_figure_is_the_same_bytes_and_holds_no_date() -> None:
    first, second = _drawn("a"), _drawn("a")
    assert first == second
    assert "metadata" not in first
    assert not re.search(r"20\d\d-\d\d", first)


def test_all_colours_are_classes_so_that_they_follow_the_scheme() -> None:
    drawn = _drawn("a")
    assert not re.search(r"#[0-9a-f]{6}", drawn)
    classes = set(" ".join(re.findall(r'class="([^"]*)"', drawn)).split())
    assert {"fill-ink", "fill-muted", "stroke-line", "stroke-series-1", "fill-bad", "stroke-series-2"} <= classes


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


def test_sparkline_marks_the_highest_point() -> None:
    root = ElementTree.fromstring(figures.sparkline([0, 5, 10, 0], top=10))
    (dot,) = root.iter("circle")
    assert (float(dot.attrib["cx"]), float(dot.attrib["cy"])) == (69.3, 0.0)
    (line,) = root.iter("polyline")
    assert line.attrib["points"] == "0.0,30.0 34.7,15.0 69.3,0.0 104.0,30.0"
    assert "NaN" not in figures.sparkline([0, 0], top=0)
