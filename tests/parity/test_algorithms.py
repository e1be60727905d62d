"""The paper's algorithms, written by hand from its formulae, against Objective: the loss to 1e-12, every gradient to 1e-10."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dssl import (
    BYOL,
    BYOLConfig,
    Objective,
    SimCLR,
    SimCLRConfig,
    SimSiam,
    SimSiamConfig,
    ViewGraph,
    build_encoder,
    named_graph,
)

Views = dict[str, Tensor]


def toy() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 16)
    )


ENCODERS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "toy": (toy, 16, 8),
    "resnet18-cifar": (lambda: build_encoder("resnet18-cifar", image_size=16), 512, 16),
}


@pytest.fixture(params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> tuple[nn.Module, int, int]:
    torch.manual_seed(0)
    build, dim, size = ENCODERS[request.param]
    return build().double(), dim, size


def random_views(size: int, *names: str, count: int = 5) -> Views:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64) for name in names}


def cosine(z: Tensor, y: Tensor) -> Tensor:
    """D of the paper's pseudocode, without F.normalize."""
    z = z / z.norm(dim=1, keepdim=True)
    y = y / y.norm(dim=1, keepdim=True)
    return -(z * y).sum(dim=1).mean()


def stopped(z: Tensor, y: Tensor) -> Tensor:
    return cosine(z, y.detach())


def check(method: nn.Module, graph: ViewGraph, views: Views, by_hand: Callable[[nn.Module, Views], Tensor]) -> None:
    """Objective on the method, the hand-written loss on a copy of it: the same loss and the same gradients."""
    twin = copy.deepcopy(method)
    report = Objective(method, graph)(views)  # type: ignore[arg-type]
    expected = by_hand(twin, views)
    assert report.total.item() == pytest.approx(expected.item(), rel=1e-12, abs=0)
    report.total.backward()
    expected.backward()
    compared = 0
    for (name, ours), (_, theirs) in zip(method.named_parameters(), twin.named_parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        assert ours.grad is not None, name
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10 * scale + 1e-13, msg=name)
        compared += int(scale > 1e-12)
    assert compared > 8  # the comparison was not about nothing


def test_algorithm_1(encoder: tuple[nn.Module, int, int]) -> None:
    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, SimSiam)
        y = {name: m.projector(m.encoder(images)) for name, images in v.items()}
        z = {name: m.predictor(y[name]) for name in v}
        return (
            stopped(z["s1"], y["s2"]) / 4
            + stopped(z["s2"], y["s1"]) / 4
            + stopped(z["h1"], y["s1"]) / 4
            + stopped(z["h2"], y["s2"]) / 4
        )

    module, dim, size = encoder
    method = SimSiam(module, feature_dim=dim, settings=SimSiamConfig(hidden=32, output=32, bottleneck=8)).double()
    graph = ViewGraph.parse("s1<->s2, h1->s1, h2->s2, normalize=all")
    check(method, graph, random_views(size, "s1", "s2", "h1", "h2"), by_hand)


def test_algorithm_2(encoder: tuple[nn.Module, int, int]) -> None:
    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, SimSiam)
        y = {name: m.projector(m.encoder(images)) for name, images in v.items()}
        z = {name: m.predictor(y[name]) for name in v}
        return (
            stopped(z["s1"], y["s2"]) / 4
            + stopped(z["s2"], y["s1"]) / 4
            + stopped(z["s3"], y["s4"]) / 4
            + stopped(z["s4"], y["s3"]) / 4
        )

    module, dim, size = encoder
    method = SimSiam(
        module, feature_dim=dim, settings=SimSiamConfig(projector_layers=3, hidden=32, output=32, bottleneck=8)
    ).double()
    check(method, named_graph("standard2"), random_views(size, "s1", "s2", "s3", "s4"), by_hand)


def test_soft_variant_of_the_published_default(encoder: tuple[nn.Module, int, int]) -> None:
    """delta = 0.1, gamma = 0.9; divided by the two similarity weights, twice the scale of Algorithm 1."""

    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, SimSiam)
        y = {name: m.projector(m.encoder(images)) for name, images in v.items()}
        z = {name: m.predictor(y[name]) for name in v}
        symmetric = stopped(z["s1"], y["s2"]) + stopped(z["s2"], y["s1"])
        to_standard = stopped(z["h1"], y["s1"]) + stopped(z["h2"], y["s2"])
        to_heavy = stopped(z["s1"], y["h1"]) + stopped(z["s2"], y["h2"])
        return symmetric / 2 + 0.9 * to_standard / 2 + 0.1 * to_heavy / 2

    module, dim, size = encoder
    method = SimSiam(module, feature_dim=dim, settings=SimSiamConfig(hidden=32, output=32, bottleneck=8)).double()
    check(method, named_graph("soft(0.1)"), random_views(size, "s1", "s2", "h1", "h2"), by_hand)


def test_byol_with_dssl(encoder: tuple[nn.Module, int, int]) -> None:
    """S is the squared distance of the normalised vectors, L_A the negative cosine, both to the momentum network."""

    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, BYOL)
        z = {name: m.predictor(m.projector(m.encoder(images))) for name, images in v.items()}
        with torch.no_grad():
            y = {name: m.target_projector(m.target_encoder(v[name])) for name in ("s1", "s2")}

        def mse(a: Tensor, b: Tensor) -> Tensor:
            a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
            return ((a - b) ** 2).sum(dim=1).mean()

        symmetric = mse(z["s1"], y["s2"]) + mse(z["s2"], y["s1"])
        return (symmetric + cosine(z["h1"], y["s1"]) + cosine(z["h2"], y["s2"])) / 2

    module, dim, size = encoder
    method = BYOL(module, feature_dim=dim, settings=BYOLConfig(hidden=32, output=16)).double()
    with torch.no_grad():  # a target that differs from the online network, as it does after the first step
        for parameter in method.target_encoder.parameters():
            parameter.mul_(0.9)
    check(method, named_graph("dssl"), random_views(size, "s1", "s2", "h1", "h2"), by_hand)


@pytest.mark.parametrize("encoder", ["toy"], indirect=True)
def test_the_published_byol_script(encoder: tuple[nn.Module, int, int]) -> None:
    """Negative cosine for every pair, each halved, each with its own pass of the target network (decision 1)."""

    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, BYOL)

        def half(predictor: str, target: str) -> Tensor:
            z = m.predictor(m.projector(m.encoder(v[predictor])))
            with torch.no_grad():
                y = m.target_projector(m.target_encoder(v[target]))
            return 0.5 * cosine(z, y)

        return half("s1", "s2") + half("s2", "s1") + half("h1", "s1") + half("h2", "s2")

    module, dim, size = encoder
    method = BYOL(module, feature_dim=dim, settings=BYOLConfig(hidden=32, output=16)).double()
    with torch.no_grad():
        for parameter in method.target_encoder.parameters():
            parameter.mul_(0.9)
    text = "s1<->s2:0.5[alignment], h1->s1:0.5, h2->s2:0.5, normalize=sum"
    assert text in (Path(__file__).parents[2] / "docs" / "project" / "decisions.md").read_text()
    views = random_views(size, "s1", "s2", "h1", "h2")
    check(copy.deepcopy(method), ViewGraph.parse(text), views, by_hand)
    with pytest.raises(AssertionError):
        check(method, named_graph("dssl"), views, by_hand)


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent over 2N views, one row at a time, from the formula of the SimCLR paper."""
    z = torch.cat([first, second])
    z = z / z.norm(dim=1, keepdim=True)
    count = len(first)
    total = z.new_zeros(())
    for i in range(2 * count):
        j = (i + count) % (2 * count)
        others = [k for k in range(2 * count) if k != i]
        similarity = torch.stack([z[i] @ z[k] / temperature for k in others])
        total = total - (z[i] @ z[j] / temperature - torch.logsumexp(similarity, 0))
    return total / (2 * count)


@pytest.mark.parametrize("temperature", [0.5, 0.1])
def test_simclr_as_directed_edges_is_nt_xent(encoder: tuple[nn.Module, int, int], temperature: float) -> None:
    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, SimCLR)
        return nt_xent(m.projector(m.encoder(v["s1"])), m.projector(m.encoder(v["s2"])), temperature)

    module, dim, size = encoder
    method = SimCLR(module, feature_dim=dim, settings=SimCLRConfig(output=16, temperature=temperature)).double()
    check(method, named_graph("standard"), random_views(size, "s1", "s2"), by_hand)


def test_simclr_with_dssl(encoder: tuple[nn.Module, int, int]) -> None:
    def by_hand(m: nn.Module, v: Views) -> Tensor:
        assert isinstance(m, SimCLR)
        z = {name: m.projector(m.encoder(images)) for name, images in v.items()}
        directed = stopped(z["h1"], z["s1"]) + stopped(z["h2"], z["s2"])
        return nt_xent(z["s1"], z["s2"], 0.5) + directed / 2

    module, dim, size = encoder
    method = SimCLR(module, feature_dim=dim, settings=SimCLRConfig(output=16)).double()
    check(method, named_graph("dssl"), random_views(size, "s1", "s2", "h1", "h2"), by_hand)


@pytest.mark.parametrize("step", [0, 37, 99])
def test_byol_target_after_a_step(encoder: tuple[nn.Module, int, int], step: int) -> None:
    """The target's parameters move by the schedule of the BYOL paper; its buffers do not."""
    module, dim, size = encoder
    method = BYOL(module, feature_dim=dim, settings=BYOLConfig(hidden=32, output=16, momentum=0.99)).double()
    Objective(method, named_graph("dssl"))(random_views(size, "s1", "s2", "h1", "h2"))
    with torch.no_grad():
        for parameter in [*method.encoder.parameters(), *method.projector.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    before = copy.deepcopy(method)
    method.after_step(step, 100)
    tau = 1 - (1 - 0.99) * (math.cos(math.pi * step / 100) + 1) / 2
    for target, old, online in (
        (method.target_encoder, before.target_encoder, before.encoder),
        (method.target_projector, before.target_projector, before.projector),
    ):
        for new, past, now in zip(target.parameters(), old.parameters(), online.parameters(), strict=True):
            torch.testing.assert_close(new, tau * past + (1 - tau) * now, rtol=1e-12, atol=1e-14)
        for new, past in zip(target.buffers(), old.buffers(), strict=True):
            assert torch.equal(new, past)
    for now, past in zip(method.encoder.parameters(), before.encoder.parameters(), strict=True):
        assert torch.equal(now, past)
