"""The graph is data: printing and parsing are inverse, presets are the paper's, nonsense is refused by name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dssl.graph import ABLATION, KINDS, PRESETS, Edge, Vertex, View, ViewGraph, equation6, named_graph, soft
from dssl.graph.schedule import Backward, Compare
from dssl.methods import METHODS
from tests.rejecting import rejects

names = st.sampled_from(["s1", "s2", "h1", "h2", "h7", "s", "h", "x", "view_3", "sigma"])
policies = st.sampled_from(["standard", "heavy", "ra(2,5)", "ra(2,5) > jigsaw(4)", "0.9*ra(2,5) | 0.1*jigsaw(4)"])
weights = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 0.5]), st.floats(0, 1e300, allow_subnormal=True))


@st.composite
def graphs(draw: st.DrawFn) -> ViewGraph:
    """Any graph: views in any order, derived from any other without a circle, edges of every kind."""
    chosen = draw(st.lists(names, min_size=2, max_size=6, unique=True))
    views = [View(name=chosen[0], policy=draw(policies))]
    for name in chosen[1:]:
        source = draw(st.one_of(st.none(), st.sampled_from([view.name for view in views])))
        size = draw(st.sampled_from([None, None, 16, 4096])) if source is None else None
        views.append(View(name=name, policy=draw(policies), source=source, size=size))
    pairs = st.tuples(st.sampled_from(chosen), st.sampled_from(chosen)).filter(lambda pair: pair[0] != pair[1])
    edges = [
        Edge(
            predictor=predictor,
            targets=(Vertex(target),),
            weight=draw(weights),
            kind=kind,
            detach=kind == "relation" or draw(st.booleans()),
            final=draw(st.one_of(st.none(), weights)),
        )
        for predictor, target in draw(st.lists(pairs, min_size=1, max_size=8, unique=True))
        for kind in [draw(st.sampled_from(KINDS))]
    ]
    for position, edge in enumerate(edges):
        others = [name for name in chosen if name not in (edge.predictor, *edge.target_views)]
        if others and draw(st.booleans()):
            more = draw(st.lists(st.sampled_from(others), min_size=1, unique=True))
            mean = replace(edge, targets=tuple(map(Vertex, draw(st.permutations([*edge.target_views, *more])))))
            if not any((one.predictor, {*one.target_views}) == (mean.predictor, {*mean.target_views}) for one in edges):
                edges[position] = mean
        if draw(st.integers(0, 4)) == 0:
            taught = tuple(Vertex(name, taught=True) for name in edges[position].target_views)
            edges[position] = replace(edges[position], targets=taught, kind="alignment", detach=True)
    if not any(edge.largest > 0 for edge in edges):
        edges[0] = replace(edges[0], weight=1.0)
    used = {end for edge in edges for end in (edge.predictor, *edge.target_views)}
    for view in reversed(views):  # sources come before what is derived from them
        if view.name in used and view.source is not None:
            used.add(view.source)
    kept = draw(st.permutations([view for view in views if view.name in used]))
    return ViewGraph(tuple(kept), tuple(edges), draw(st.sampled_from(["similarity", "all", "sum"])))


@given(graphs())
def test_parse_is_the_inverse_of_print(graph: ViewGraph) -> None:
    assert ViewGraph.parse(str(graph)) == graph
    assert hash(ViewGraph.parse(str(graph))) == hash(graph)


@given(graphs())
def test_sources_are_made_before_what_is_derived_from_them(graph: ViewGraph) -> None:
    made = [view.name for view in graph.made]
    assert len(made) == len(set(made))
    assert set(graph.encoded) <= set(made)
    for view in graph.made:
        assert view.source is None or made.index(view.source) < made.index(view.name)


def test_dssl_reads_as_the_paper_writes_it() -> None:
    graph = ViewGraph.parse("s1<->s2, h1->s1, h2->s2")
    assert graph.views == (
        View(name="s1", policy="standard"),
        View(name="s2", policy="standard"),
        View(name="h1", policy="heavy", source="s1"),
        View(name="h2", policy="heavy", source="s2"),
    )
    assert graph.edges == (
        Edge(predictor="s1", targets=(Vertex("s2"),), kind="similarity", detach=False),
        Edge(predictor="s2", targets=(Vertex("s1"),), kind="similarity", detach=False),
        Edge(predictor="h1", targets=(Vertex("s1"),), kind="alignment", detach=True),
        Edge(predictor="h2", targets=(Vertex("s2"),), kind="alignment", detach=True),
    )
    assert graph == ViewGraph.parse("s1<->s2; s1<-h1\n s2 <- h2")
    assert graph == named_graph("dssl") == equation6() == soft(0)
    assert str(graph) == "s1<->s2, h1->s1, h2->s2"


def test_a_view_may_be_declared() -> None:
    graph = ViewGraph.parse("s1<->s2, h1->s1:0.5[attach], h1 = 0.9*ra(2,5) | 0.1*jigsaw(4)(image), normalize=all")
    assert graph.view("h1") == View(name="h1", policy="0.9*ra(2,5) | 0.1*jigsaw(4)", source=None)
    assert graph.edges[2] == Edge(predictor="h1", targets=(Vertex("s1"),), weight=0.5, kind="alignment", detach=False)
    assert graph.normalize == "all"


def test_a_target_may_be_a_mean_and_a_weight_may_move() -> None:
    graph = ViewGraph.parse("s1<->s2:2..0.5, h1 -> mean( s1, s2 ):0..1, mean(s1,h1)<-s2[attach]")
    assert graph.edges[2:] == (
        Edge(predictor="h1", targets=(Vertex("s1"), Vertex("s2")), weight=0.0, final=1.0),
        Edge(predictor="s2", targets=(Vertex("s1"), Vertex("h1")), detach=False),
    )
    assert graph.edges[2].name == "h1->mean(s1,s2)"
    assert graph.edges[2].target_views == ("s1", "s2")
    assert [edge.weight_at(0.5) for edge in graph.edges] == [1.25, 1.25, 0.5, 1.0]
    assert str(graph) == "s1<->s2:2..0.5, h1->mean(s1,s2):0..1, s2->mean(s1,h1)[attach]"
    assert graph.targets == ("s1", "s2", "h1")
    assert graph.divisor == 4.0  # a weight that moves counts with its largest value
    assert ViewGraph.parse("h1->s1:0..0, s1->s2:1..0").active_edges == (
        Edge(predictor="s1", targets=(Vertex("s2"),), final=0.0),
    )


def test_a_view_may_have_its_own_size_and_passes_it_on() -> None:
    graph = ViewGraph.parse("s1<->s2, l1->s1, l1 = crop(0.05,0.3) @ 16 (image), hl->s2, hl = ra(2,5)(l1)")
    assert graph.view("l1") == View(name="l1", policy="crop(0.05,0.3)", size=16)
    assert {view.name: graph.size(view.name) for view in graph.views} == {"s1": None, "s2": None, "l1": 16, "hl": 16}
    assert "l1 = crop(0.05,0.3)@16(image)" in str(graph)


def test_a_teacher_is_a_vertex() -> None:
    graph = ViewGraph.parse("s1<->s2, s1->teacher(s1), h1->mean(teacher(s1),teacher(s3)):0..1, s2->teacher(s2):0")
    assert graph.predictors == ("s1", "s2", "h1")
    assert graph.targets == ("s1", "s2")  # of the method's own
    assert graph.taught == ("s1", "s3")
    assert graph.encoded == ("s1", "s2", "h1")
    assert [view.name for view in graph.made] == ["s1", "s2", "h1", "s3"]
    assert graph.edges[3].targets == (Vertex("s1", taught=True), Vertex("s3", taught=True))
    assert ViewGraph.parse(str(graph)) == graph
    assert ViewGraph.parse("s1->teacher(s1)").divisor == 1.0


def test_a_relation_is_a_third_kind_whose_target_is_always_detached() -> None:
    graph = ViewGraph.parse("s1<->s2, h1->mean(s1,s2):0.5[relation], s1<->s3[relation]")
    assert graph.edges[2] == Edge(predictor="h1", targets=(Vertex("s1"), Vertex("s2")), weight=0.5, kind="relation")
    assert [(edge.kind, edge.detach) for edge in graph.edges[3:]] == [("relation", True)] * 2
    assert str(graph) == "s1<->s2, h1->mean(s1,s2):0.5[relation], s1->s3[relation], s3->s1[relation]"
    assert graph.divisor == 2.0  # as an alignment


def test_fastsiam_pulls_each_view_to_the_mean_of_the_others() -> None:
    graph = named_graph("fastsiam")
    assert [(edge.predictor, edge.target_views) for edge in graph.edges] == [
        ("s1", ("s2", "s3", "s4")), ("s2", ("s1", "s3", "s4")), ("s3", ("s1", "s2", "s4")), ("s4", ("s1", "s2", "s3")),
    ]  # fmt: skip
    assert graph.divisor == 4.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_prints_as_it_is_written(name: str) -> None:
    graph = named_graph(name)
    assert ViewGraph.parse(str(graph)) == graph
    assert str(graph) == PRESETS[name].text


def test_presets_are_the_rows_of_the_paper() -> None:
    edges = {name: {edge.name for edge in named_graph(name).edges} for name in PRESETS}
    assert edges["standard"] == {"s1->s2", "s2->s1"}
    assert edges["standard2"] == {"s1->s2", "s2->s1", "s3->s4", "s4->s3"}
    assert edges["heavy2"] == {"h1->h2", "h2->h1", "h3->h4", "h4->h3"}
    assert edges["ablation-f"] == edges["dssl"] | {"h1->h2", "h2->h1"}
    assert edges["ablation-h"] == edges["dssl"] | {"s1->h1", "s2->h2"}
    assert edges["ablation-g"] == {"h1->s1", "h2->s2"}
    assert all(view.source is None for view in named_graph("heavy2").views)
    assert {view.source for view in named_graph("ablation-i").views} == {None}
    assert set(ABLATION) == set("cdefghij")
    assert {letter for letter, preset in ABLATION.items() if preset.inferred} == set("deghi")


@pytest.mark.parametrize("derived", [True, False])
def test_equation6_weights(derived: bool) -> None:
    graph = equation6(1.0, 0.25, 0.5, 0.125, derived=derived)
    assert {edge.name: edge.weight for edge in graph.edges} == {
        "s1->s2": 1.0, "s2->s1": 1.0, "h1->h2": 0.25, "h2->h1": 0.25,
        "h1->s1": 0.5, "h2->s2": 0.5, "s1->h1": 0.125, "s2->h2": 0.125,
    }  # fmt: skip
    assert {view.source for view in graph.views} == ({None, "s1", "s2"} if derived else {None})
    assert [view.name for view in equation6(1, 0, 0, 0).views] == ["s1", "s2"]
    assert named_graph("equation6(1, 0.25, 0.5, 0.125, independent)") == equation6(1, 0.25, 0.5, 0.125, derived=False)


def test_soft_shares_one_weight_between_the_two_directions() -> None:
    assert {edge.name: edge.weight for edge in named_graph("soft(0.25)").edges} == {
        "s1->s2": 1, "s2->s1": 1, "h1->s1": 0.75, "h2->s2": 0.75, "s1->h1": 0.25, "s2->h2": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "divisor"),
    [
        ("dssl", 2.0),
        ("s1<->s2, h1->s1, h2->s2, normalize=all", 4.0),
        ("s1<->s2, h1->s1, h2->s2, normalize=sum", 1.0),
        ("standard2", 4.0),
        ("h1->s1:3, h2->s2", 4.0),  # no similarity edge: all weights
    ],
)
def test_divisor(text: str, divisor: float) -> None:
    assert named_graph(text).divisor == divisor


def test_only_what_positive_edges_need() -> None:
    graph = ViewGraph.parse("s1->s2, h1->s1:0, h3->s2")
    assert graph.predictors == ("s1", "h3")
    assert graph.targets == ("s2",)
    assert [view.name for view in graph.made] == ["s1", "s2", "s3", "h3"]
    assert graph.encoded == ("s1", "s2", "h3")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("s1<->s1", ["s1->s1", "own target"]),
        ("x->s1", ["x->s1", "'x'"]),
        ("s1<->s2, h1 = ra(2,5)(y)", ["view h1", "'y'"]),
        ("s1<->s2:-1", ["s1->s2", "weight", -1.0]),
        ("s1<->s2:nan", ["s1->s2", "weight", "nan"]),
        ("s1<->s2:inf", ["s1->s2", "weight", "inf"]),
        ("s1<->s2:much", ["'s1<->s2:much'", "'much'"]),
        ("s1<->s2:0", ["s1->s2:0, s2->s1:0", "weight"]),
        ("a = heavy(b), b = heavy(a), a->b", ["a -> b -> a"]),
        ("s1<->s2, s1->s2", ["duplicate", "s1->s2"]),
        ("s1<->s2, s3 = standard(image)", ["view s3"]),
        ("s1<->s2, h1 = a(image), h1 = b(image)", ["view h1", "twice"]),
        ("s1<->s2, hello", ["'hello'", "'h1->s1:0.5'"]),
        ("s1<->s2[fast]", ["s1<->s2", "'fast'", "detach"]),
        ("s1<->s2, normalize=mean", ["'mean'", "similarity"]),
        ("h1 = ra(2,5(image), h1->s1", ["bracket", "'h1 = ra(2,5(image), h1->s1'"]),
        ("h1 = jigsaw(4), h1->s1", ["'h1 = jigsaw(4)'"]),
        ("image->s1", ["image->s1", "'image'"]),
        ("s1->mean(s1,s2)", ["s1->mean(s1,s2)", "own target"]),
        ("h1->mean(s1,s1)", ["h1->mean(s1,s1)", "different"]),
        ("h1->mean(s1,)", ["'mean(s1,)'", "mean(s1,s2)", "teacher(s1)"]),
        ("h1->median(s1,s2)", ["'median(s1,s2)'", "mean(s1,s2)", "teacher(s1)"]),
        ("s1->teacher(s1,s2)", ["'teacher(s1,s2)'", "mean(s1,s2)", "teacher(s1)"]),
        ("s1->teacher(mean(s1,s2))", ["'teacher(mean(s1,s2))'", "mean(s1,s2)", "teacher(s1)"]),
        ("s1->teacher", ["s1->teacher", "'teacher'"]),
        ("teacher(s1)->s1", ["teacher(s1)->s1", "s1->teacher(s1)"]),
        ("s1<->teacher(s1)", ["teacher(s1)->s1", "s1->teacher(s1)"]),
        ("s1->mean(s2,teacher(s1))", ["s1->mean(s2,teacher(s1))", "both"]),
        ("s1->teacher(s1)[similarity]", ["s1->teacher(s1)", "similarity"]),
        ("s1->teacher(s1)[attach]", ["s1->teacher(s1)", "attach"]),
        ("s1->teacher(s1)[relation]", ["s1->teacher(s1)", "relation"]),
        ("h1->s1[relation, attach]", ["h1->s1", "relation", "attach"]),
        ("s1->teacher(x)", ["s1->teacher(x)", "'x'"]),
        ("h1->mean(s1,x)", ["h1->mean(s1,x)", "'x'"]),
        ("mean(s1,s2)->h1", ["mean(s1,s2)->h1", "h1->mean(s1,s2)"]),
        ("h1<->mean(s1,s2)", ["mean(s1,s2)->h1", "h1->mean(s1,s2)"]),
        ("h1->mean(s1,s2), h1->mean(s2,s1)", ["duplicate", "h1->mean(s2,s1)"]),
        ("mean = heavy(image), mean->s1", ["view name", "'mean'"]),
        ("s1<->s2, s2 = standard@0(image)", ["view s2", "size", 0, "4,096"]),
        ("s1<->s2, s2 = standard@5000(image)", ["view s2", "size", 5000, "4,096"]),
        ("s1<->s2, s2 = standard@-3(image)", ["view s2", "size", "'-3'", "@16"]),
        ("s1<->s2, s2 = standard@16@8(image)", ["view s2", "'standard@16'", "@"]),
        ("h1->s1, h1 = heavy@16(s1)", ["view h1", "s1", "@16"]),
        ("s1<->s2:0..", ["'s1<->s2:0..'", "'0..'", "0..1"]),
        ("s1<->s2:0..-1", ["s1->s2", "weight", -1.0]),
        ("s1<->s2:0..0", ["s1->s2:0..0, s2->s1:0..0", "weight"]),
        ("dsssl", ["'dsssl'", "'dssl'"]),
        ("soft(2)", ["soft(2.0)", "delta", "0 and 1"]),
        ("soft()", ["soft()", "one number"]),
        ("soft(0.1, 0.2)", ["soft(0.1, 0.2)", "one number"]),
        ("soft(0.1, independent)", ["soft(0.1, independent)", "one number"]),
        ("equation6(1,2,3,4,5)", ["equation6(1,2,3,4,5)", "one to four"]),
        ("equation6(0,0,0,0)", ["no edge", "weight"]),
        ("equation6(-1)", ["s1->s2", "weight", -1.0]),
        ("", ["graph", "''", "dssl"]),
    ],
)
def test_nonsense_is_refused_by_name(text: str, facts: list[object]) -> None:
    with rejects(*facts):
        named_graph(text)


def test_nonsense_from_python_is_refused_too() -> None:
    view = View(name="s1", policy="standard")
    edge = Edge(predictor="s1", targets=(Vertex("s2"),))
    with rejects("s1->s2", "view s2"):
        ViewGraph((view,), (edge,))
    with rejects("view s1", "twice"):
        ViewGraph((view, view), (edge,))
    with rejects("view s1", "s9"):
        ViewGraph((replace(view, source="s9"),), (edge,))
    with rejects("view name", "'1s'"):
        View(name="1s", policy="standard")
    with rejects("view s", "'ra(2,5'"):
        View(name="s", policy="ra(2,5")
    with rejects("normalize", "'mean'", "similarity"):
        ViewGraph((view,), (edge,), "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "heavy"),
    [
        ("standard", False),
        ("standard-cifar", False),
        ("heavy", True),
        ("standard-cifar > ra(2,9)", True),
        ("crop(0.05,0.3)", True),
    ],
)
def test_what_counts_as_heavy(policy: str, heavy: bool) -> None:
    assert View(name="v1", policy=policy).is_heavy == heavy


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        ("simsiam", "h1->s1", ["predict h1", "target s1", "compare h1->s1", "backward [h1->s1]"]),
        ("byol", "h1->s1", ["target s1", "predict h1", "compare h1->s1", "backward [h1->s1]"]),
        # a target that learns ties its view to those that predict it, also where it predicts nothing itself
        (
            "simclr", "h1->s1[attach], h2->s1[attach], s2->h1",
            ["predict h1", "target h1", "predict h2", "predict s2", "compare s2->h1", "backward [s2->h1]", "target s1",
             "compare h1->s1", "compare h2->s1", "backward [h1->s1, h2->s1]"],
        ),
        # SimSiam's never do, whatever the edge says
        (
            "simsiam", "h1->s1[attach], h2->s1[attach]",
            ["predict h1", "predict h2", "target s1", "compare h1->s1", "compare h2->s1", "backward [h1->s1]",
             "backward [h2->s1]"],
        ),
        (
            "vicreg", "s1->mean(s2,s3), s1->teacher(s4), s2->s1:0",
            ["teacher s4", "predict s1", "compare s1->teacher(s4)", "target s2", "target s3", "compare s1->mean(s2,s3)",
             "backward [s1->mean(s2,s3), s1->teacher(s4)]"],
        ),
    ],
)  # fmt: skip
def test_the_schedule_of_a_step(method: str, text: str, expected: list[str]) -> None:
    assert [str(step) for step in METHODS[method].schedule(ViewGraph.parse(text))] == expected


@pytest.mark.parametrize("method", METHODS)
@given(graph=graphs())
def test_a_schedule_does_each_thing_once_and_only_when_it_can(method: str, graph: ViewGraph) -> None:
    steps = METHODS[method].schedule(graph)
    assert len(set(steps)) == len(steps)
    done: set[str] = set()
    compared, walked = [], []
    for step in steps:
        if isinstance(step, Compare):
            ends = {f"predict {step.edge.predictor}"}
            ends |= {f"{'teacher' if vertex.taught else 'target'} {vertex.view}" for vertex in step.edge.targets}
            assert ends <= done
            compared.append(step.edge)
        elif isinstance(step, Backward):
            assert set(step.edges) <= set(compared)
            walked += step.edges
        done.add(str(step))
    assert sorted(map(hash, walked)) == sorted(map(hash, compared)) == sorted(map(hash, graph.active_edges))
    assert isinstance(steps[-1], Backward)
