"""Measures without labels, against their formulae."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.decomposition import PCA

from dssl.evaluation.quality import alignment, retrieval, uniformity
from dssl.methods.losses import effective_rank, spread
from dssl.report.pictures import layout, map_picture, pca, retrieve


def test_effective_rank_is_that_of_the_singular_values(real: Any) -> None:
    singular = np.linalg.svd(real.train.double().numpy(), compute_uv=False)
    shares = singular / singular.sum()
    shares = shares[shares > 0]
    assert effective_rank(real.train) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-3)
    assert effective_rank(torch.ones(50, 8)) == pytest.approx(1)
    assert effective_rank(torch.eye(8).repeat(3, 1)) == pytest.approx(8)
    assert effective_rank(torch.zeros(4, 3)) == 0


def test_uniformity_is_over_pairs_of_different_images(real: Any) -> None:
    unit = F.normalize(real.test[:60].double(), dim=1)
    pairs = [float((-2 * (unit[i] - unit[j]).square().sum()).exp()) for i in range(60) for j in range(60) if i != j]
    assert uniformity(real.test[:60], block=7) == pytest.approx(math.log(np.mean(pairs)), rel=1e-9)
    assert uniformity(torch.ones(5, 3)) == pytest.approx(0, abs=1e-9)
    assert uniformity(torch.zeros(20, 3)) == pytest.approx(0, abs=1e-9)  # a dead encoder is a point too


def test_alignment_and_spread_at_their_ends() -> None:
    one = torch.eye(4)
    assert alignment(one, 3 * one) == pytest.approx(0)
    assert alignment(one, -one) == pytest.approx(4)
    assert alignment(one, one.flip(0)) == pytest.approx(2)
    assert float(spread(torch.ones(10, 4))) == pytest.approx(0, abs=1e-6)
    torch.manual_seed(0)
    assert float(spread(torch.randn(20_000, 16))) == pytest.approx(1, abs=0.02)


def test_map_axes_are_those_of_scikit_learn(real: Any) -> None:
    ours = pca(real.test)
    theirs = PCA(n_components=2, svd_solver="full").fit_transform(F.normalize(real.test.double(), dim=1).numpy())
    for axis in range(2):
        assert abs(np.corrcoef(ours[:, axis], theirs[:, axis])[0, 1]) == pytest.approx(1, abs=1e-6)
    assert np.array_equal(ours, pca(real.test))
    assert pca(torch.randn(5, 1)).shape == (5, 2)


def test_layouts_and_picture(real: Any) -> None:
    kind, rows, points = layout(real.test[:80], seed=0)
    assert kind == "t-SNE"  # scikit-learn is there
    assert sorted(rows) == list(range(80))
    assert points.shape == (80, 2)
    kind, rows, points = layout(real.test[:10], seed=0)
    assert kind == "PCA"
    assert np.array_equal(points, pca(real.test[:10][torch.from_numpy(rows)]))
    # a dead encoder has one point for all images, on which scikit-learn's t-SNE crashes
    assert layout(torch.ones(80, 16), seed=0)[0] == "PCA"
    spread = np.random.default_rng(0).random((80, 2))
    drawn = map_picture(spread, lambda number: np.full((8, 6, 3), number, np.uint8), cells=(10, 5))
    assert drawn.size == (360, 180)
    assert len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 10


def test_retrieval_finds_the_nearest_others() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0, 2.1])
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    rows = np.array([10, 11, 12, 13, 14])
    nearest = retrieve(features, rows, queries=5, count=2, seed=0)
    assert {query: [index for index, _ in others] for query, others in nearest.items()} == {
        10: [11, 12], 11: [10, 12], 12: [11, 10], 13: [14, 12], 14: [13, 12],
    }  # fmt: skip
    assert nearest[10][0][1] == pytest.approx(math.cos(0.1))
    assert retrieve(features[:1], rows[:1], queries=5, count=2, seed=0) == {}


def test_retrieval_counts_the_views_that_find_their_own_image() -> None:
    first = torch.tensor([[2.0, 0.1], [0.1, 3.0], [-1.0, 0.2], [0.2, 1.0]])
    second = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-5.0, 0.0], [1.0, 0.2]])
    assert retrieval(first, second) == 0.75  # the last one is nearest to another
    assert retrieval(first, first.flip(0)) == 0
