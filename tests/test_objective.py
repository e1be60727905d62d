"""Direction is in the gradients, only what is needed is computed, and the loss is what the graph says."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dssl import (
    BYOL,
    DINO,
    BYOLConfig,
    DsslError,
    Method,
    MoCo,
    MoCoConfig,
    Objective,
    SimCLR,
    SimSiam,
    SimSiamConfig,
    Teacher,
    ViewGraph,
    named_graph,
)
from dssl.graph import PRESETS
from dssl.methods import METHODS

METHOD_NAMES = ("simsiam", "byol", "simclr", "vicreg", "barlowtwins", "moco", "lejepa", "swav", "dino")


def encoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def build(name: str) -> Method:
    """A small method of that name; ``simsiam guarded`` has a guard, ``simsiam per-kind`` a predictor for each kind of view."""
    torch.manual_seed(0)
    name, _, more = name.partition(" ")
    guard = 0.7 if more == "guarded" else 0.0
    predictor: Literal["shared", "per-kind"] = "per-kind" if more == "per-kind" else "shared"
    if name == "simsiam":
        return SimSiam(
            encoder(),
            feature_dim=16,
            settings=SimSiamConfig(hidden=16, output=16, bottleneck=8, predictor=predictor, guard=guard),
        ).double()
    if name == "byol":
        return BYOL(
            encoder(), feature_dim=16, settings=BYOLConfig(hidden=16, output=8, predictor=predictor, guard=guard)
        ).double()
    if name == "moco":
        return MoCo(encoder(), feature_dim=16, settings=MoCoConfig(hidden=16, output=8, predictor=predictor)).double()
    widths = {"hidden": 16, "output": 8, "prototypes": 8, "slices": 12}
    settings = METHODS[name](**{key: width for key, width in widths.items() if key in vars(METHODS[name]())})
    return Method.of(settings, encoder(), feature_dim=16).double()


def taught(name: str, graph: ViewGraph) -> Method:
    """The method, with a teacher of another width where the graph has an edge to one."""
    method = build(name)
    if graph.taught:
        width = {"simsiam": 16}.get(name.split()[0], 8)
        teacher = nn.Sequential(nn.Flatten(), nn.LazyLinear(12), nn.BatchNorm1d(12), nn.Linear(12, 5)).double()
        teacher(torch.randn(4, 3, 6, 6, dtype=torch.float64))
        method.teacher = Teacher(teacher, width=width, features=5).double()
    return method


def views_of(graph: ViewGraph, *, count: int = 5, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = sorted(view.name for view in graph.views)
    return {name: torch.randn(count, 3, 6, 6, generator=generator, dtype=torch.float64) for name in names}


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("text", ["h1->s1", "s1->h1"])
def test_nothing_flows_through_the_target(name: str, text: str) -> None:
    """Seen at the pixels: the predictor's view gets a gradient, the target's none; reversing the edge reverses that."""
    graph = ViewGraph.parse(text)
    views = {key: value.requires_grad_() for key, value in views_of(graph).items()}
    Objective(build(name), graph)(views).total.backward()
    predictor, target = text.split("->")
    assert views[predictor].grad is not None
    assert views[predictor].grad.abs().max() > 1e-6
    assert views[target].grad is None


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_in_dssl_the_heavy_edges_leave_the_standard_views_alone(name: str) -> None:
    """The gradient at s1 and s2 is that of the standard pair alone: heavy views are pulled and never pull."""
    full, pair = named_graph("dssl"), ViewGraph.parse("s1<->s2")
    gradients = []
    for graph in (full, pair):
        views = {key: value.requires_grad_() for key, value in views_of(full).items()}
        Objective(build(name), graph)(views).total.backward()
        gradients.append([views[key].grad for key in ("s1", "s2")])
    for ours, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["simclr", "vicreg", "barlowtwins", "lejepa"])
def test_both_ends_of_an_attached_edge_are_pulled(name: str) -> None:
    graph = ViewGraph.parse("h1->s1[attach]")
    views = {key: value.requires_grad_() for key, value in views_of(graph).items()}
    Objective(build(name), graph)(views).total.backward()
    assert all(view.grad is not None and view.grad.abs().max() > 1e-6 for view in views.values())


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize(
    "preset",
    [
        *(*PRESETS, "soft(0.1)", "h1->s1", "s1->s2[similarity, attach]", "s1<->s2, h1->s1:0", "h1->mean(s1,s2)"),
        *("s1<->s2, h1->mean(s1,s3):0..1", "s1->mean(s2,s3)[attach]", "s1<->s2, h1->teacher(s3)"),
    ],
)
def test_passes_are_counted(name: str, preset: str) -> None:
    graph = named_graph(preset)
    method = taught(name, graph)
    passes: Counter[str] = Counter()

    def count(module: nn.Module, inputs: object, output: Tensor) -> None:
        passes["with" if output.requires_grad else "without"] += 1

    for module in method.children():
        if module is method.encoder or module is getattr(method, "target_encoder", None):
            module.register_forward_hook(count)
    if graph.taught:
        method.teacher.register_forward_hook(lambda *_: passes.update(["teacher"]))
    Objective(method, graph)(views_of(graph), progress=0.0)
    price = METHODS[name].cost(graph)
    assert (passes["with"], passes["without"]) == (price.with_gradient, price.without_gradient)
    assert passes["teacher"] == len(graph.taught)


@pytest.mark.parametrize(
    ("name", "preset", "expected"),
    [
        ("simsiam", "dssl", (4, 0, "4n")),
        ("byol", "dssl", (4, 2, "4n")),
        ("simclr", "dssl", (4, 0, "2n² + 2n")),
        ("simclr", "standard", (2, 0, "2n²")),
        ("byol", "standard2", (4, 4, "4n")),
        ("simsiam", "h1->s1", (1, 1, "n")),
        ("simclr", "h1->s1", (1, 1, "n")),
        ("simsiam", "s1<->s2, h1->s1[relation]", (3, 0, "n² + 2n")),
        ("moco", "dssl", (4, 2, "2n² + 2n")),
        ("swav", "s1<->s2, l1->s1, l1->s2, l1 = crop(0.05,0.3)@16(image)", (3, 0, "4n")),
        ("dino", "s1<->s2, l1->s1, l1->s2, l1 = crop(0.05,0.3)@16(image)", (3, 2, "4n")),
        ("lejepa", "fastsiam", (4, 0, "4n")),
    ],
)
def test_cost_is_what_the_paper_says(name: str, preset: str, expected: tuple[int, int, str]) -> None:
    price = METHODS[name].cost(named_graph(preset))
    assert (price.with_gradient, price.without_gradient, price.pairs) == expected


@pytest.mark.parametrize("name", METHOD_NAMES)
@settings(max_examples=15)
@given(data=st.data())
def test_under_sum_the_loss_is_linear_in_the_weights(name: str, data: st.DataObject) -> None:
    graph = replace(named_graph("equation6(1,1,1,1)"), normalize="sum")
    weights = data.draw(st.lists(st.floats(0, 4), min_size=len(graph.edges), max_size=len(graph.edges)))
    if not any(weights):
        weights[0] = 1.0
    weighted = replace(
        graph, edges=tuple(replace(edge, weight=weight) for edge, weight in zip(graph.edges, weights, strict=True))
    )
    views = views_of(graph)
    values = Objective(build(name), graph)(views).edges
    terms = Objective(build(name), graph)(views).regularizers
    expected = sum(weight * values[edge.name].item() for edge, weight in zip(graph.edges, weights, strict=True))
    expected += sum(
        weight * terms[edge.predictor].item()
        for edge, weight in zip(graph.edges, weights, strict=True)
        if edge.predictor in terms and edge.kind == "similarity"
    )
    assert Objective(build(name), weighted)(views).total.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", METHOD_NAMES)
@settings(max_examples=15)
@given(
    dropped=st.sets(st.integers(0, 7), min_size=1, max_size=7), normalize=st.sampled_from(["similarity", "all", "sum"])
)
def test_a_zero_edge_equals_no_edge(name: str, dropped: set[int], normalize: str) -> None:
    full = named_graph("equation6(1,1,1,1,independent)")
    zero = tuple(replace(edge, weight=0.0) if k in dropped else edge for k, edge in enumerate(full.edges))
    with_zero = ViewGraph(full.views, zero, normalize)  # type: ignore[arg-type]
    kept = with_zero.active_edges
    used = {end for edge in kept for end in (edge.predictor, *edge.target_views)}
    without = ViewGraph(tuple(view for view in full.views if view.name in used), kept, normalize)  # type: ignore[arg-type]
    first, second = build(name), build(name)
    views = views_of(full)
    one, two = Objective(first, with_zero)(views), Objective(second, without)(views)
    assert one.total.item() == two.total.item()
    assert one.edges.keys() == two.edges.keys() == {edge.name for edge in kept}
    one.total.backward()
    two.total.backward()
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    for ours, theirs in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(ours, theirs)  # not one BatchNorm saw a view that only a zero edge names


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_batchnorm_sees_one_view_at_a_time(name: str) -> None:
    """A constant added to one view's pixels vanishes in the BatchNorm behind a linear layer, if it sees that view alone."""
    torch.manual_seed(0)
    method = build(name)
    linear_first = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.BatchNorm1d(16), nn.ReLU()).double()
    method.encoder = linear_first
    if isinstance(method, BYOL | MoCo | DINO):
        method.target_encoder = copy.deepcopy(linear_first)
    views = views_of(named_graph("dssl"))
    plain = Objective(method, named_graph("dssl"))(views).total.item()
    shifted = Objective(method, named_graph("dssl"))(views | {"h1": views["h1"] + 3.0}).total.item()
    assert shifted == pytest.approx(plain, rel=1e-9)


def test_report_names_every_edge_and_view() -> None:
    graph = named_graph("dssl")
    report = Objective(build("simsiam"), graph)(views_of(graph))
    assert set(report.edges) == {"s1->s2", "s2->s1", "h1->s1", "h2->s2"}
    assert set(report.spread) == set(report.projections) == set(report.predictions) == {"s1", "s2", "h1", "h2"}
    assert set(report.targets) == {"s1", "s2"}
    values = [report.edges[name].item() for name in ("s1->s2", "s2->s1", "h1->s1", "h2->s2")]
    assert report.total.item() == pytest.approx(sum(values) / 2, rel=1e-12)
    assert not any(tensor.requires_grad for tensor in [*report.edges.values(), *report.projections.values()])


def test_spread_is_one_for_random_and_zero_for_collapsed_embeddings() -> None:
    from dssl.methods.losses import spread

    random = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    assert spread(random).item() == pytest.approx(1, abs=0.02)
    assert spread(random[:1].expand(100, -1)).item() == pytest.approx(0, abs=1e-6)
    # by hand: half of the vectors at +e1, half at -e1: std 1 in one of d dimensions, times sqrt(d) / d
    two = torch.zeros(10, 4)
    two[:5, 0], two[5:, 0] = 3.0, -7.0
    assert spread(two).item() == pytest.approx(0.25 * 2, rel=1e-6)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_autocast_keeps_the_loss_in_float32(name: str) -> None:
    graph = named_graph("dssl")
    method = build(name).float()
    views = {key: value.float() for key, value in views_of(graph).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = Objective(method, graph)(views)
    exact = Objective(build(name), graph)(views_of(graph))
    assert low.total.dtype == torch.float32
    assert low.total.item() == pytest.approx(exact.total.item(), abs=0.1, rel=0.02)
    low.total.backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


def test_a_missing_view_is_named() -> None:
    graph = named_graph("dssl")
    views = views_of(graph)
    del views["h2"]
    objective = Objective(build("simsiam"), graph)
    with pytest.raises(DsslError, match=r"h2.*h1, s1, s2"):
        objective(views)


def test_the_width_of_the_heads_is_measured_with_an_image_size() -> None:
    method = SimCLR(encoder(), image_size=8)
    assert method.predict(torch.randn(2, 3, 8, 8)).projection.shape == (2, 128)
    with pytest.raises(DsslError, match="feature_dim="):
        SimCLR(encoder())
