"""Paired comparison: against scipy, a hand-made bootstrap, and cases worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from dssl.evaluation.comparison import bootstrap_interval, compare, mcnemar


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_two_sided_binomial_test(won: int, lost: int) -> None:
    expected = binomtest(won, won + lost, 0.5).pvalue if won + lost else 1.0
    assert mcnemar(won, lost) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(1, 4) == pytest.approx(2 * (1 + 5) / 32)
    assert mcnemar(0, 0) == 1.0
    assert 0 < mcnemar(30_000, 31_000) < 1e-4  # no overflow, and not rounded to nothing


def test_bootstrap_is_that_of_resampled_images() -> None:
    differences = np.array([1.0] * 30 + [-1.0] * 12 + [0.0] * 158)
    generator = np.random.default_rng(5)
    resampled = differences[generator.integers(0, 200, (20_000, 200))].mean(axis=1)
    low, high = bootstrap_interval(differences, seed=0)
    assert low == pytest.approx(np.quantile(resampled, 0.025), abs=0.006)
    assert high == pytest.approx(np.quantile(resampled, 0.975), abs=0.006)
    # and near the normal interval of the mean
    half = 1.96 * differences.std() / math.sqrt(200)
    assert (low, high) == pytest.approx((0.09 - half, 0.09 + half), abs=0.006)
    assert bootstrap_interval(differences, seed=0) == (low, high)
    assert bootstrap_interval(np.zeros(7), seed=0) == (0.0, 0.0)


def test_one_prediction_per_image() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1])
    before = np.array([0, 1, 1, 1, 1, 0])
    after = np.array([0, 0, 0, 1, 0, 0])
    found = compare(labels, before=before, after=after, classes=("cat", "dog", "never seen"))
    assert (found.before, found.after) == pytest.approx((50, 400 / 6))
    assert found.difference == pytest.approx(100 / 6)
    assert (found.won, found.lost, found.p_value) == (2, 1, 1.0)
    assert (found.won_rows, found.lost_rows) == ((1, 2), (4,))
    assert [(one.name, one.images, one.won, one.lost) for one in found.classes] == [("cat", 3, 2, 0), ("dog", 3, 0, 1)]
    assert [one.before for one in found.classes] == pytest.approx([100 / 3, 200 / 3])
    assert [one.after for one in found.classes] == pytest.approx([100, 100 / 3])
    assert found.interval[0] < 0 < found.interval[1]
    assert found.verdict == "no difference shown"


def test_several_draws_of_labels_count_as_one_image() -> None:
    labels = np.zeros(4, np.int64)
    before = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    after = np.array([[0, 0, 0, 1], [0, 0, 0, 1]])
    found = compare(labels, before=before, after=after, classes=("only",))
    assert (found.draws, found.images, found.p_value) == (2, 4, None)
    assert (found.before, found.after) == pytest.approx((37.5, 75))
    assert (found.won, found.lost, found.won_rows) == (3, 0, (2, 1))
    # repeating a draw adds no images, so the interval stays as wide
    once = compare(labels, before=before[:1], after=after[:1], classes=("only",))
    twice = compare(labels, before=before[[0, 0]], after=after[[0, 0]], classes=("only",))
    assert twice.interval == once.interval


def test_verdict_follows_the_interval() -> None:
    labels = np.zeros(100, np.int64)
    wrong, right = np.ones(100, np.int64), np.zeros(100, np.int64)
    assert compare(labels, before=wrong, after=right, classes=("only",)).verdict == "better"
    assert compare(labels, before=right, after=wrong, classes=("only",)).verdict == "worse"
    assert compare(labels, before=right, after=right, classes=("only",)).verdict == "no difference shown"


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(
    ("won", "lost", "verdict"),
    [(5, 0, "no difference shown"), (6, 0, "better"), (7, 1, "no difference shown"), (0, 5, "no difference shown")],
)
def test_a_few_images_that_change_show_nothing(won: int, lost: int, verdict: str, draws: int) -> None:
    """Resampled, they exclude zero; a fair coin falls like this in more than 5 % of cases."""
    labels = np.zeros(1000, np.int64)
    before, after = np.zeros((draws, 1000), np.int64), np.zeros((draws, 1000), np.int64)
    before[:, :won], after[:, won : won + lost] = 1, 1
    found = compare(labels, before=before, after=after, classes=("only",))
    low, high = found.interval
    assert low > 0 or high < 0
    if draws == 1:
        assert found.verdict == verdict
        assert (mcnemar(won, lost) < 0.05) == (verdict == "better")
    elif won + lost < 6:
        assert found.verdict == "no difference shown"
