"""The losses of the methods equal formulae written out by hand, number by number, in float64."""

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from dssl import (
    BYOL,
    DINO,
    BarlowTwins,
    BarlowTwinsConfig,
    BYOLConfig,
    DINOConfig,
    LeJEPA,
    LeJEPAConfig,
    MoCo,
    MoCoConfig,
    Objective,
    Prediction,
    Relation,
    RelationConfig,
    SimCLR,
    SimCLRConfig,
    SimSiam,
    SimSiamConfig,
    SwAV,
    SwAVConfig,
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


def cosine(first: list[float], second: list[float]) -> float:
    length = math.sqrt(math.fsum(x * x for x in first) * math.fsum(y * y for y in second))
    return math.fsum(x * y for x, y in zip(first, second, strict=True)) / length


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / math.fsum(powers) for power in powers]


def cross_entropy(target: list[float], logits: list[float]) -> float:
    return -math.fsum(p * math.log(q) for p, q in zip(target, softmax(logits), strict=True) if p)


def test_decoupled_simclr_leaves_the_positive_out_of_the_denominator() -> None:
    method = given(SimCLR(nn.Identity(), feature_dim=WIDTH, settings=SimCLRConfig(output=WIDTH, decoupled=True)))
    pair = [rows(1), rows(2)]
    losses = []
    for z, y in (pair, pair[::-1]):
        for i in range(ROWS):
            others = [other[j].tolist() for other in (z, y) for j in range(ROWS) if j != i]
            denominator = math.fsum(math.exp(cosine(z[i].tolist(), other) / 0.5) for other in others)
            losses.append(math.log(denominator) - cosine(z[i].tolist(), y[i].tolist()) / 0.5)
    assert total(method, "s1<->s2", {"s1": pair[0], "s2": pair[1]}) == pytest.approx(mean(losses), rel=1e-12)


def test_moco_picks_among_targets_alone_and_scales_by_twice_the_temperature() -> None:
    method = MoCo(nn.Identity(), feature_dim=WIDTH, settings=MoCoConfig(hidden=4, output=WIDTH, temperature=0.3))
    method.predictor = method.target_encoder = method.target_projector = nn.Identity()  # type: ignore[assignment]
    pair = [rows(1), rows(2)]
    losses = []
    for z, y in (pair, pair[::-1]):
        for i in range(ROWS):
            logits = [cosine(z[i].tolist(), y[j].tolist()) / 0.3 for j in range(ROWS)]
            losses.append(2 * 0.3 * cross_entropy([float(j == i) for j in range(ROWS)], logits))
    assert total(given(method), "s1<->s2", {"s1": pair[0], "s2": pair[1]}) == pytest.approx(mean(losses), rel=1e-12)


def epps_pulley_by_hand(values: list[float]) -> float:
    """N times the integral over [-3, 3] by the trapezoidal rule, as a sum of complex numbers."""
    points = [-3 + 6 * k / 32 for k in range(33)]
    heights = []
    for t in points:
        phi = sum(complex(math.cos(t * x), math.sin(t * x)) for x in values) / len(values)
        heights.append(abs(phi - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2))
    return len(values) * math.fsum((a + b) / 2 * 6 / 32 for a, b in pairwise(heights))


def visreg_by_hand(z: Tensor, slices: Tensor) -> float:
    columns = [column(z, d) for d in range(WIDTH)]
    deviations = [math.sqrt(covary(one, one, count=ROWS)) for one in columns]
    unit = [[(x - mean(one)) / (s + 1e-4) for x in one] for one, s in zip(columns, deviations, strict=True)]
    quantiles = [NormalDist().inv_cdf(place / (ROWS + 1)) for place in range(1, ROWS + 1)]
    distances = []
    for direction in slices.T.tolist():
        along = sorted(math.fsum(w * unit[d][i] for d, w in enumerate(direction)) for i in range(ROWS))
        distances += [(a - b) ** 2 for a, b in zip(along, quantiles, strict=True)]
    return mean([mean(one) ** 2 for one in columns]) + mean([(1 - s) ** 2 for s in deviations]) + mean(distances)


@pytest.mark.parametrize("regularizer", ["sigreg", "visreg"])
def test_lejepa_weighs_the_distance_and_a_term_of_each_view(regularizer: Literal["sigreg", "visreg"]) -> None:
    settings = LeJEPAConfig(hidden=2, output=WIDTH, weight=0.1, slices=3, regularizer=regularizer)
    method = given(LeJEPA(nn.Identity(), feature_dim=WIDTH, settings=settings))
    assert isinstance(method, LeJEPA)
    z, y, h = rows(1), rows(2), rows(3)
    method.after_step(4, 100)
    slices = method.slices(z)
    assert slices.square().sum(dim=0).tolist() == pytest.approx([1.0] * 3, rel=1e-12)

    def term(view: Tensor) -> float:
        if regularizer == "visreg":
            return visreg_by_hand(view, slices)
        return mean([epps_pulley_by_hand((view @ slices)[:, k].tolist()) for k in range(3)])

    def distance(one: Tensor, other: Tensor) -> float:
        return mean([(a - b) ** 2 for a, b in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True)])

    # a heavy view is aligned to a detached target and has no term of its own
    expected = 0.9 * distance(z, y) + 0.1 * (term(z) + term(y)) / 2 + 0.9 * distance(h, z) / 2
    assert total(method, "s1<->s2, h1->s1", {"s1": z, "s2": y, "h1": h}) == pytest.approx(expected, rel=1e-12)


def test_on_fastsiam_the_gradient_is_the_original_lejepas_with_a_pull_of_four_thirds() -> None:
    method = given(LeJEPA(nn.Identity(), feature_dim=WIDTH, settings=LeJEPAConfig(hidden=2, output=WIDTH, weight=0.0)))
    views = {f"s{number}": rows(number).requires_grad_() for number in range(1, 5)}
    Objective(method, ViewGraph.parse("fastsiam"))(views).total.backward()  # type: ignore[arg-type]
    original = torch.stack([view.detach() for view in views.values()]).requires_grad_()
    (original.mean(dim=0) - original).square().mean().backward()
    assert original.grad is not None
    for view, expected in zip(views.values(), original.grad, strict=True):
        torch.testing.assert_close(view.grad, 4 / 3 * expected, rtol=1e-12, atol=1e-14)


def sinkhorn_by_hand(scores: list[list[float]], temperature: float) -> list[list[float]]:
    """Alternately equal sums of columns and of rows, as SwAV's paper has it."""
    shares = [[math.exp(value / temperature) for value in row] for row in scores]
    for _ in range(3):
        sums = [math.fsum(row[k] for row in shares) for k in range(len(shares[0]))]
        shares = [[value / sums[k] / len(sums) for k, value in enumerate(row)] for row in shares]
        shares = [[value / math.fsum(row) / len(shares) for value in row] for row in shares]
    return [[len(shares) * value for value in row] for row in shares]


def scores_by_hand(z: Tensor, prototypes: nn.Linear) -> list[list[float]]:
    return [[cosine(row, prototype) for prototype in prototypes.weight.tolist()] for row in z.tolist()]


def test_swav_predicts_the_balanced_assignment_of_the_other_view() -> None:
    method = given(SwAV(nn.Identity(), feature_dim=WIDTH, settings=SwAVConfig(hidden=4, output=WIDTH, prototypes=6)))
    assert isinstance(method, SwAV)
    scores = {name: scores_by_hand(rows(seed), method.prototypes) for seed, name in enumerate(("s1", "s2", "l1"), 1)}
    targets = {name: sinkhorn_by_hand(value, 0.03) for name, value in scores.items()}

    def loss(source: str, target: str) -> float:
        logits = [[value / 0.1 for value in row] for row in scores[source]]
        return mean([cross_entropy(p, q) for p, q in zip(targets[target], logits, strict=True)])

    edges = [("s1", "s2"), ("s2", "s1"), ("l1", "s1"), ("l1", "s2")]
    expected = math.fsum(loss(*edge) for edge in edges) / 2
    small = "s1<->s2, l1->s1, l1->s2, l1 = crop(0.05,0.3)@16(image)"
    views = {"s1": rows(1), "s2": rows(2), "l1": rows(3)}
    assert total(method, small, views) == pytest.approx(expected, rel=1e-12)


def test_dino_sharpens_and_centres_the_scores_of_its_moving_average() -> None:
    settings = DINOConfig(hidden=4, output=WIDTH, prototypes=6, momentum=0.5, final_target_temperature=0.07)
    method = DINO(nn.Identity(), feature_dim=WIDTH, settings=settings)
    method.target_encoder = method.target_projector = nn.Identity()  # type: ignore[assignment]
    method = given(method)  # type: ignore[assignment]
    center, average = [0.0] * 6, method.prototypes.weight.detach().clone()
    for step, temperature in enumerate((0.04, 0.07)):  # after the first of two steps it has risen
        views = {"s1": rows(2 * step + 1), "s2": rows(2 * step + 2)}
        kept = nn.Linear(WIDTH, 6, bias=False, dtype=torch.float64)
        kept.weight.data = average
        taught = {name: scores_by_hand(view, kept) for name, view in views.items()}
        own = {name: scores_by_hand(view, method.prototypes) for name, view in views.items()}
        losses = []
        for source, target in (("s1", "s2"), ("s2", "s1")):
            for logits, drawn in zip(own[source], taught[target], strict=True):
                sharp = softmax([(value - c) / temperature for value, c in zip(drawn, center, strict=True)])
                losses.append(cross_entropy(sharp, [value / 0.1 for value in logits]))
        assert total(method, "s1<->s2", views) == pytest.approx(mean(losses), rel=1e-12)
        method.prototypes.weight.data += 0.3
        method.after_step(step, 2)
        center = [
            0.9 * c + 0.1 * mean([row[k] for one in taught.values() for row in one]) for k, c in enumerate(center)
        ]
        share = (1 - 0.5) * (math.cos(math.pi * step / 2) + 1) / 2
        average = (1 - share) * average + share * method.prototypes.weight.detach()
    assert method.center.tolist() == pytest.approx(center, rel=1e-12)
    torch.testing.assert_close(method.target_prototypes.weight.detach(), average, rtol=1e-12, atol=0)


def test_a_relation_compares_with_the_other_images_and_with_a_queue() -> None:
    """The queue takes the targets of a step's last relation, the newest first, and gives what it has."""
    method = given(SimCLR(nn.Identity(), feature_dim=WIDTH, settings=SimCLRConfig(output=WIDTH)))
    assert isinstance(method, SimCLR)
    settings = RelationConfig(temperature=0.2, target_temperature=0.05, queue=10)
    method.relation = Relation(settings, width=WIDTH).double()
    queue: list[list[float]] = []
    for step in range(3):
        views = {name: rows(10 * step + seed) for seed, name in enumerate(("s1", "s2", "h1", "h2"))}
        edges = []
        for source, target in (("h1", "s1"), ("h2", "s2")):
            z, y = views[source].tolist(), views[target].tolist()
            for i in range(ROWS):
                bank = [*y[:i], *y[i + 1 :], *queue]
                taught, own = ([cosine(row[i], other) for other in bank] for row in (y, z))
                logits = [value / 0.2 for value in own]
                edges.append(cross_entropy(softmax([value / 0.05 for value in taught]), logits))
        assert total(method, "h1->s1[relation], h2->s2[relation]", views) == pytest.approx(mean(edges), rel=1e-12)
        queue = [*views["s2"].tolist(), *queue][:10]
    views["h1"].requires_grad_()
    views["s1"].requires_grad_()
    Objective(method, ViewGraph.parse("h1->s1[relation]"))(views).total.backward()
    assert views["s1"].grad is None
    assert views["h1"].grad is not None
    assert views["h1"].grad.abs().max() > 1e-6
