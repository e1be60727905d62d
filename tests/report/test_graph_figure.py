"""The picture of a graph shows what its text says."""

import pytest

from dssl.graph import ViewGraph
from dssl.report.graph_figure import graph_figure


@pytest.mark.parametrize(
    ("text", "shown", "arrows"),
    [
        ("s1<->s2, h1->s1, h2->s2:0.5", {"0.5"}, 3),
        ("s1<->s2:2..0.5", {"2..0.5"}, 1),
        ("s1<->s2, h1->mean(s1,s2):0..1", {"0..1", "mean of the targets"}, 2),
        ("s1<->s2, l1->s1, l1 = crop(0.05,0.3)@16(image)", {"crop(0.05,0.3), 16 px"}, 2),
        ("s1<->s2, s1->teacher(s1), h1->mean(teacher(s1),teacher(s2))", {"teacher(s1)", "teacher(s2)"}, 3),
        ("s1<->s2, h1->s1[relation]", {"similarity of the method", "relation to other images"}, 2),
        ("s1<-h1, h1 = heavy(image)", set(), 1),
    ],
)
def test_every_edge_has_an_arrow_and_every_addition_its_label(text: str, shown: set[str], arrows: int) -> None:
    figure = graph_figure(ViewGraph.parse(text))
    (axes,) = figure.axes
    assert shown <= {label.get_text() for label in (*axes.texts, *axes.get_legend().get_texts())}
    heads = [patch for patch in axes.patches if getattr(patch, "get_linewidth", float)() == 2.2]
    assert len(heads) == arrows
    for x, y in (label.get_position() for label in axes.texts):
        assert axes.get_xlim()[0] < x < axes.get_xlim()[1]
        assert axes.get_ylim()[0] < y < axes.get_ylim()[1]
