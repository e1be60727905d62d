"""The losses of the methods equal formulae written out by hand, number by number, in float64."""

import math

import pytest
import torch
from torch import Tensor, nn

from dssl import (
    BYOL,
    BarlowTwins,
    BarlowTwinsConfig,
    BYOLConfig,
    Objective,
    Prediction,
    SimSiam,
    SimSiamConfig,
    VICReg,
    VICRegConfig,
    ViewGraph,
)
from dssl.methods.losses import narrowness

ROWS, WIDTH = 7, 5


def rows(seed: int, *, scale: float = 0.6) -> Tensor:
    return scale * torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.3


def column(z: Tensor, dimension: int) -> list[float]:
    return [float(value) for value in z[:, dimension]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def covary(first: list[float], second: list[float], *, count: int) -> float:
    a, b = mean(first), mean(second)
    return math.fsum((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / count


def vicreg_by_hand(z: Tensor, y: Tensor) -> float:
    """The paper's equation 6 with its weights 25, 25, 1 and the published code's averages."""
    distance = math.fsum((a - b) ** 2 for d in range(WIDTH) for a, b in zip(column(z, d), column(y, d), strict=True))
    total = 25 * distance / (ROWS * WIDTH)
    for one in (z, y):
        deviations = [math.sqrt(covary(column(one, d), column(one, d), count=ROWS - 1) + 1e-4) for d in range(WIDTH)]
        total += 25 / 2 * mean([max(0.0, 1 - deviation) for deviation in deviations])
        total += math.fsum(
            covary(column(one, i), column(one, j), count=ROWS - 1) ** 2 / WIDTH
            for i in range(WIDTH)
            for j in range(WIDTH)
            if i != j
        )
    return total


def barlow_by_hand(z: Tensor, y: Tensor, *, redundancy: float, scale: float) -> float:
    def deviation(one: Tensor, dimension: int) -> float:
        return math.sqrt(covary(column(one, dimension), column(one, dimension), count=ROWS) + 1e-5)

    def entry(i: int, j: int) -> float:
        return covary(column(z, i), column(y, j), count=ROWS) / (deviation(z, i) * deviation(y, j))

    same = math.fsum((1 - entry(i, i)) ** 2 for i in range(WIDTH))
    different = math.fsum(entry(i, j) ** 2 for i in range(WIDTH) for j in range(WIDTH) if i != j)
    return scale * (same + redundancy * different)


class Given(nn.Module):
    """Stands for encoder and projector: the embedding of a view is handed in as its pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)


def given(method: nn.Module) -> nn.Module:
    method.encoder, method.projector = Given(), nn.Identity()  # type: ignore[assignment]
    return method.double()


def total(method: nn.Module, graph: str, views: dict[str, Tensor]) -> float:
    return Objective(method, ViewGraph.parse(graph))(views).total.item()  # type: ignore[arg-type]


def test_vicreg_on_a_pair_is_the_original_loss() -> None:
    method = given(VICReg(nn.Identity(), feature_dim=WIDTH, settings=VICRegConfig(hidden=2, output=WIDTH)))
    z, y = rows(1), rows(2)
    assert total(method, "s1<->s2", {"s1": z, "s2": y}) == pytest.approx(vicreg_by_hand(z, y), rel=1e-12)
    four = {"s1": z, "s2": y, "s3": rows(3), "s4": rows(4)}
    both = (vicreg_by_hand(z, y) + vicreg_by_hand(four["s3"], four["s4"])) / 2
    assert total(method, "s1<->s2, s3<->s4", four) == pytest.approx(both, rel=1e-12)


def test_barlow_twins_on_a_pair_is_the_original_loss() -> None:
    method = given(
        BarlowTwins(
            nn.Identity(),
            feature_dim=WIDTH,
            settings=BarlowTwinsConfig(hidden=2, output=WIDTH, redundancy=0.02, scale=0.3),
        )
    )
    z, y = rows(1), rows(2)
    expected = barlow_by_hand(z, y, redundancy=0.02, scale=0.3)
    assert total(method, "s1<->s2", {"s1": z, "s2": y}) == pytest.approx(expected, rel=1e-12)


def test_a_heavy_view_is_aligned_and_not_regularised_unless_asked() -> None:
    """h1->s1 adds the pull alone; regularize="all", or similarity on the edge, adds the terms of h1."""
    z, y, h = rows(1), rows(2), rows(3)
    views = {"s1": z, "s2": y, "h1": h}
    plain, every = (
        given(VICReg(nn.Identity(), feature_dim=WIDTH, settings=VICRegConfig(hidden=2, output=WIDTH, regularize=which)))  # type: ignore[arg-type]
        for which in ("similarity", "all")
    )
    # of the deviations from the mean; a similarity edge pulls the vectors themselves
    centred = math.fsum(covary(column(h - z, d), column(h - z, d), count=ROWS) for d in range(WIDTH))
    pull = 25 * centred / WIDTH
    similar = 25 * float((h - z).square().mean())
    base = vicreg_by_hand(z, y)
    # of h1 alone: the loss of a pair whose views are equal has no distance and counts both views' terms
    terms = vicreg_by_hand(h, h)
    assert total(plain, "s1<->s2, h1->s1", views) == pytest.approx(base + pull / 2, rel=1e-12)
    assert total(every, "s1<->s2, h1->s1", views) == pytest.approx(base + (pull + terms) / 2, rel=1e-12)
    asked = total(plain, "s1<->s2, h1->s1[similarity], normalize=sum", views)
    assert asked == pytest.approx(2 * base + similar + terms, rel=1e-12)
    twins = given(
        BarlowTwins(
            nn.Identity(),
            feature_dim=WIDTH,
            settings=BarlowTwinsConfig(hidden=2, output=WIDTH, redundancy=0.02, scale=0.3),
        )
    )
    aligned = barlow_by_hand(h, z, redundancy=0.0, scale=0.3)
    pair = barlow_by_hand(z, y, redundancy=0.02, scale=0.3)
    assert total(twins, "s1<->s2, h1->s1", views) == pytest.approx(pair + aligned / 2, rel=1e-12)


@pytest.mark.parametrize("kind", [VICReg, BarlowTwins])
def test_an_alignment_does_not_move_the_mean(kind: type[VICReg] | type[BarlowTwins]) -> None:
    """The pull of heavy views goes through weights that they share with their targets, which it would move without end."""
    method = given(kind(nn.Identity(), feature_dim=WIDTH, settings=kind.Settings(hidden=2, output=WIDTH)))
    views = {"s1": rows(1), "h1": rows(3) + 5}
    views["h1"].requires_grad_()
    Objective(method, ViewGraph.parse("h1->s1"))(views).total.backward()
    assert views["h1"].grad is not None
    assert views["h1"].grad.abs().max() > 1e-3
    assert views["h1"].grad.sum(dim=0).abs().max() < 1e-12


def guard_by_hand(z: Tensor) -> float:
    unit = [[float(value) / math.sqrt(math.fsum(float(x) ** 2 for x in row)) for value in row] for row in z]
    lacking = []
    for dimension in range(WIDTH):
        values = [math.sqrt(WIDTH) * row[dimension] for row in unit]
        lacking.append(max(0.0, 1 - math.sqrt(covary(values, values, count=ROWS - 1) + 1e-4)))
    return mean(lacking)


def test_the_guard_is_the_variance_of_unit_vectors_and_ignores_scale() -> None:
    z = rows(5)
    assert narrowness(z).item() == pytest.approx(guard_by_hand(z), rel=1e-12)
    assert narrowness(1000 * z).item() == pytest.approx(guard_by_hand(z), rel=1e-12)
    assert narrowness(z[:1].expand(ROWS, -1)).item() == pytest.approx(1 - 1e-2, rel=1e-12)


@pytest.mark.parametrize("kind", [SimSiam, BYOL])
def test_a_guard_adds_its_term_for_every_view_that_predicts(kind: type[SimSiam] | type[BYOL]) -> None:
    """By the weight of the edges that a view predicts, heavy views included."""
    views = {"s1": rows(1), "s2": rows(2), "h1": rows(3)}
    found = []
    for guard in (0.0, 2.0):
        torch.manual_seed(0)
        method = kind(nn.Identity(), feature_dim=WIDTH, settings=kind.Settings(output=WIDTH, guard=guard))
        method.predictor = nn.Identity()  # type: ignore[assignment]
        if isinstance(method, BYOL):
            method.target_encoder = method.target_projector = nn.Identity()  # type: ignore[assignment]
        found.append(total(given(method), "s1<->s2, h1->s1:0.5", views))
    terms = guard_by_hand(views["s1"]) + guard_by_hand(views["s2"]) + 0.5 * guard_by_hand(views["h1"])
    assert found[1] - found[0] == pytest.approx(2.0 * terms / 2, rel=1e-12, abs=1e-12)


def test_the_guard_looks_at_simsiams_predictions_and_byols_projections() -> None:
    """SimSiam's projections are kept apart by their BatchNorm, whatever they carry (docs/project/decisions.md)."""
    seen = Prediction(rows(1), rows(2), rows(3))
    for method, expected in (
        (
            SimSiam(
                nn.Identity(),
                feature_dim=WIDTH,
                settings=SimSiamConfig(hidden=4, output=WIDTH, bottleneck=2, guard=3.0),
            ),
            rows(3),
        ),
        (BYOL(nn.Identity(), feature_dim=WIDTH, settings=BYOLConfig(hidden=4, output=WIDTH, guard=3.0)), rows(2)),
    ):
        term = method.regularize(seen)
        assert term is not None
        assert term.item() == pytest.approx(3 * guard_by_hand(expected), rel=1e-12)


def test_a_guard_of_zero_costs_nothing() -> None:
    method = SimSiam(nn.Identity(), feature_dim=WIDTH, settings=SimSiamConfig(hidden=4, output=4, bottleneck=2))
    z = rows(1)
    assert method.regularize(Prediction(z, z, z)) is None
