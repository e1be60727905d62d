"""`objective.backward(views)` is the whole backward in less memory: the same loss, gradients, buffers and random numbers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dssl import (
    BYOL,
    DINO,
    BarlowTwins,
    DsslError,
    LeJEPA,
    MoCo,
    Objective,
    SimSiam,
    SwAV,
    VICReg,
    ViewGraph,
    named_graph,
)
from dssl.graph import KINDS, PRESETS, Edge, Vertex, View
from dssl.methods.losses import negative_cosine
from tests.test_objective import METHOD_NAMES, build, taught, views_of

GUARDED = ("simsiam guarded", "byol guarded")

GRAPHS = [*PRESETS, "soft(0.1)", "equation6(1,1,1,1)", "h1->s1", "h1->s1[attach]", "s1<->s2, s2->s3[attach], h1->s3"]
GRAPHS += [
    "s1<->s2, h1->mean(s1,s2), h2->mean(s1,s2)",
    "h1->mean(s1,s2)[attach], s1->s3",
    "s1<->s2:1..0.2, h1->s1:0..1",
]
GRAPHS += ["s1<->s2, h1->s1[relation], h2->mean(s1,s2):0.5[relation]", "s1->h1[relation], h1->s1"]
GRAPHS += ["s1<->s2, s1->teacher(s1):0.5, h1->teacher(s1)", "s1->mean(teacher(s1),teacher(s2))"]
PROGRESS = 0.25
"""Of the run, for weights that move."""


def whole(method: Any, graph: ViewGraph, views: dict[str, Tensor]) -> Tensor:
    """The loss as the formulae read: every prediction, every target, every edge, one sum. Independent of ``Objective``."""
    attached = {name for edge in graph.active_edges if not edge.detach for name in edge.target_views}
    two = method.predictor_per_kind
    predictions = {
        name: method.predict(views[name], heavy=True) if two and name.startswith("h") else method.predict(views[name])
        for name in graph.predictors
    }
    targets = {
        name: method.target(views[name], predictions.get(name), gradient=name in attached) for name in graph.targets
    }
    targets |= {f"teacher({name})": method.teacher(views[name]) for name in graph.taught}
    total = torch.zeros((), dtype=torch.float64)
    for edge in graph.active_edges:
        y = sum(targets[str(vertex)] for vertex in edge.targets) / len(edge.targets)
        y = y.detach() if edge.detach else y
        similar = edge.kind == "similarity"
        prediction = predictions[edge.predictor]
        if similar:
            loss = method.similarity(prediction, y)
        elif edge.is_taught:
            loss = negative_cosine(method.teacher.map(prediction.prediction), y)
        elif edge.kind == "relation":
            z = prediction.prediction
            loss = related(
                (z / method.settings.temperature).softmax(dim=1) if isinstance(method, SwAV | DINO) else z, y
            )
        elif isinstance(method, VICReg | BarlowTwins | LeJEPA | SwAV | DINO):
            loss = method.align(prediction, y)
        else:
            loss = negative_cosine(prediction.prediction, y)
        if (isinstance(method, VICReg | LeJEPA) and similar) or (
            isinstance(method, SimSiam | BYOL) and method.settings.guard
        ):
            loss = loss + method.regularize(prediction)
        moved = 0.0 if edge.final is None else edge.final - edge.weight
        total = total + (edge.weight + PROGRESS * moved) * loss
    return total / graph.divisor


def related(z: Tensor, y: Tensor) -> Tensor:
    """R with ReSSL's temperatures, image by image: the others are all rows but its own."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(z)):
        others = torch.cat([y[:row], y[row + 1 :]])
        taught = (torch.cosine_similarity(y[row : row + 1], others) / 0.04).softmax(dim=0)
        total = total - (taught * (torch.cosine_similarity(z[row : row + 1], others) / 0.1).log_softmax(dim=0)).sum()
    return total / len(z)


def assert_same_state(ours: nn.Module, reference: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, one), two in zip(ours.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", [*METHOD_NAMES, *GUARDED])
@pytest.mark.parametrize("preset", GRAPHS)
def test_it_equals_the_whole_backward(name: str, preset: str) -> None:
    graph = named_graph(preset)
    views = views_of(graph)
    reference, plain, early = (taught(name, graph) for _ in range(3))
    loss = whole(reference, graph, views)
    loss.backward()
    expected = Objective(plain, graph)(views, progress=PROGRESS)
    expected.total.backward()
    report = Objective(early, graph).backward(views, progress=PROGRESS)
    assert not report.total.requires_grad
    for total in (expected.total, report.total):
        assert total.item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    assert_same_state(plain, reference)
    assert_same_state(early, reference)
    for field in ("edges", "regularizers", "projections", "predictions", "targets"):
        ours, theirs = getattr(report, field), getattr(expected, field)
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[key], theirs[key]) and not ours[key].requires_grad for key in ours), field


@pytest.mark.parametrize("name", ["simsiam per-kind", "byol per-kind", "moco per-kind"])
@pytest.mark.parametrize("preset", ["dssl", "ablation-f", "ablation-h", "s1<->s2, h1->mean(s1,s2)"])
def test_heavy_views_have_their_own_predictor(name: str, preset: str) -> None:
    graph = named_graph(preset)
    views = views_of(graph)
    reference, early = build(name), build(name)
    loss = whole(reference, graph, views)
    loss.backward()
    report = Objective(early, graph).backward(views)
    assert report.total.item() == pytest.approx(loss.item(), rel=1e-12)
    assert_same_state(early, reference)
    assert isinstance(early, SimSiam | BYOL | MoCo)
    alone = Objective(build(name), graph)
    alone.method.heavy_predictor[-1].weight.data.add_(1.0)  # type: ignore[attr-defined]
    changed = alone(views).predictions
    assert {key for key, value in changed.items() if not torch.equal(value, report.predictions[key])} == {
        key for key in changed if key.startswith("h")
    }


@pytest.mark.parametrize("name", ["simsiam per-kind", "byol per-kind"])
@pytest.mark.parametrize("preset", ["standard", "heavy", "ablation-g"])
def test_two_predictors_need_two_kinds_of_views(name: str, preset: str) -> None:
    with pytest.raises(DsslError, match="per-kind"):
        Objective(build(name), named_graph(preset))


@st.composite
def any_graph(draw: st.DrawFn) -> ViewGraph:
    names = [f"v{number}" for number in range(draw(st.integers(2, 5)))]
    ends = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda pair: pair[0] != pair[1])
    pairs = draw(st.lists(ends, min_size=1, max_size=8, unique=True))
    edges = tuple(
        Edge(
            predictor=predictor,
            targets=(Vertex(target),),
            weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
            kind=kind,
            detach=kind == "relation" or draw(st.booleans()),
            final=draw(st.sampled_from([None, None, 0.0, 3.0])),
        )
        for predictor, target in pairs
        for kind in [draw(st.sampled_from(KINDS))]
    )
    if len(names) > 2:  # one edge may end at the mean of all other views
        mean = tuple(Vertex(name) for name in names if name != edges[0].predictor)
        edges = (replace(edges[0], targets=draw(st.sampled_from([edges[0].targets, mean]))), *edges[1:])
    used = {end for edge in edges for end in (edge.predictor, *edge.target_views)}
    return ViewGraph(tuple(View(name=name, policy="standard") for name in names if name in used), edges)


@pytest.mark.parametrize("name", [*METHOD_NAMES, *GUARDED])
@settings(max_examples=25)
@given(graph=any_graph())
def test_it_equals_the_whole_backward_on_any_graph(name: str, graph: ViewGraph) -> None:
    reference, early = build(name), build(name)
    views = views_of(graph)
    whole(reference, graph, views).backward()
    Objective(early, graph).backward(views, progress=PROGRESS)
    assert_same_state(early, reference)


class Mark(torch.autograd.Function):
    """Counts the views whose graph is alive."""

    alive = most = 0

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        Mark.alive += 1
        Mark.most = max(Mark.most, Mark.alive)
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        Mark.alive -= 1
        return gradients[0]


class Marked(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, images: Tensor) -> Any:
        features = self.encoder(images)
        return Mark.apply(features) if features.requires_grad else features


@pytest.fixture
def marks() -> type[Mark]:
    Mark.alive = Mark.most = 0
    return Mark


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("dssl", {"simsiam": 2, "byol": 1, "simclr": 2}),
        ("standard2", {"simsiam": 2, "byol": 1, "simclr": 2}),
        ("heavy2", {"simsiam": 2, "byol": 1, "simclr": 2}),
        ("ablation-f", {"simsiam": 2, "byol": 1, "simclr": 2}),
        ("ablation-g", {"simsiam": 2, "byol": 1, "simclr": 2}),
        ("ablation-h", {"simsiam": 3, "byol": 1, "simclr": 3}),
        ("h1->s1", {"simsiam": 1, "byol": 1, "simclr": 1}),
    ],
)
@pytest.mark.parametrize("name", METHOD_NAMES)
def test_graphs_alive_at_a_time(name: str, preset: str, expected: dict[str, int], marks: type[Mark]) -> None:
    graph = named_graph(preset)
    method = build(name)
    method.encoder = Marked(method.encoder)
    Objective(method, graph).backward(views_of(graph))
    # VICReg, Barlow Twins and LeJEPA may let gradient through their targets, as SimCLR does
    like = {"moco": "byol", "dino": "byol", "swav": "simsiam"}.get(name, name)
    assert (marks.most, marks.alive) == (expected.get(like, expected["simclr"]), 0)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_what_is_released_is_freed(name: str) -> None:
    """Not only walked: no tensor of an earlier view's graph is referred to when a later view comes."""
    import gc
    import weakref

    graph = named_graph("dssl")
    method = build(name)
    kept: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def remember(module: nn.Module, inputs: object, output: Tensor) -> None:
        counts.append(sum(one() is not None for one in kept))
        if output.requires_grad:
            kept.append(weakref.ref(output))

    assert isinstance(method.encoder, nn.Sequential)
    method.encoder[2].register_forward_hook(remember)  # what AdaptiveAvgPool2d needs for its backward
    gc.disable()
    try:
        Objective(method, graph).backward(views_of(graph))
    finally:
        gc.enable()
    assert counts[-4:] == ([0, 0, 0, 0] if name in ("byol", "moco", "dino") else [0, 1, 0, 0])


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("preset", ["dssl", "ablation-g", "ablation-h"])
def test_random_numbers_are_drawn_in_one_order(name: str, preset: str) -> None:
    """Dropout: ``forward`` and ``backward`` use the same numbers for the same view."""
    graph = named_graph(preset)
    views = views_of(graph)
    methods = []
    for early in (False, True):
        method = build(name)
        method.encoder = nn.Sequential(method.encoder, nn.Dropout(0.5))
        if isinstance(method, BYOL | MoCo | DINO):
            method.target_encoder = copy.deepcopy(method.encoder).requires_grad_(False)
        torch.manual_seed(3)
        objective = Objective(method, graph)
        if early:
            objective.backward(views)
        else:
            objective(views).total.backward()
        methods.append(method)
    assert_same_state(*methods)


@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("preset", ["dssl", "ablation-g", "ablation-h"])
def test_under_autocast(name: str, preset: str) -> None:
    """Every weight gets its gradient (casts are cached), in float32, as near as bf16 allows."""
    graph = named_graph(preset)
    views = {key: value.float() for key, value in views_of(graph).items()}
    plain, early = build(name).float(), build(name).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = Objective(plain, graph)(views)
    expected.total.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = Objective(early, graph).backward(views)
    assert report.total.item() == expected.total.item()
    for (key, ours), theirs in zip(early.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if ours.grad is not None and theirs.grad is not None:
            assert ours.grad.dtype == torch.float32
            # the whole backward adds the views' gradients in bf16, this one in float32
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.05 * theirs.grad.abs().max().item())


def test_a_scaler_multiplies_every_group() -> None:
    graph = named_graph("dssl")
    views = views_of(graph)
    plain, scaled = build("simsiam"), build("simsiam")
    Objective(plain, graph).backward(views)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    report = Objective(scaled, graph).backward(views, scaler=scaler)
    assert report.total.item() == Objective(build("simsiam"), graph)(views).total.item()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, 8 * theirs.grad, rtol=1e-12, atol=1e-12)


def test_weights_that_move_ask_how_far_the_run_is() -> None:
    graph = ViewGraph.parse("s1<->s2, h1->s1:0..1")
    objective = Objective(build("simsiam"), graph)
    for call in (objective, objective.backward):
        with pytest.raises(DsslError, match=r"h1->s1.*0\.\.1"):
            call(views_of(graph))
    first, last = (objective(views_of(graph), progress=progress) for progress in (0.0, 1.0))
    assert last.total.item() - first.total.item() == pytest.approx(first.edges["h1->s1"].item() / 2, rel=1e-12)
