"""Random numbers are pure functions, uniform, and independent between indices, slots and keys."""

import hashlib

import numpy as np
import pytest

from dssl import rng

EXPECTED = "10712c6529d51650ac07305b9203f55de04f51b4a787bea7c6b789c9f34e48ec"
EXPECTED_ORDER = [4, 5, 1, 0, 3, 6, 7, 8, 2, 9]


def test_numbers_are_fixed_for_all_time() -> None:
    """A change here makes every old run another run: raise the checkpoint's format version if it must happen."""
    draws = rng.bits(rng.key(0, "view", 3, "h1"), np.arange(1000), 8)
    assert hashlib.sha256(draws.tobytes()).hexdigest() == EXPECTED
    assert rng.permutation(rng.key(1, "order", 0), 10).tolist() == EXPECTED_ORDER


def test_any_subset_gives_the_same_rows() -> None:
    key = rng.key(5, "x")
    whole = rng.uniforms(key, np.arange(100), 6)
    some = np.array([97, 3, 3, 50])
    np.testing.assert_array_equal(rng.uniforms(key, some, 6), whole[some])
    np.testing.assert_array_equal(rng.uniforms(key, some, 2), whole[some, :2])


@pytest.mark.parametrize("names", [("a", 1), ("a1",), (1, "a"), ("a", "1"), ("a", 1, "")])
def test_keys_differ(names: tuple[str | int, ...]) -> None:
    others = [rng.key(0, *other) for other in [("a", 1), ("a1",), (1, "a"), ("a", "1"), ("a", 1, "")] if other != names]
    assert rng.key(0, *names) not in others
    assert rng.key(0, *names) != rng.key(1, *names)


def test_uniform_and_uncorrelated() -> None:
    draws = rng.uniforms(rng.key(0, "u"), np.arange(20_000), 5)
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    expected = draws.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square with 49 degrees of freedom: p about 2e-5
    assert draws.min() >= 0
    assert draws.max() < 1
    between_slots = np.corrcoef(draws.T)[np.triu_indices(5, 1)]
    between_rows = np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]
    other_key = np.corrcoef(draws[:, 0], rng.uniforms(rng.key(1, "u"), np.arange(20_000), 1)[:, 0])[0, 1]
    assert np.abs([*between_slots, between_rows, other_key]).max() < 0.03  # four standard errors


def test_permutation_is_one_and_every_place_is_likely() -> None:
    orders = np.stack([rng.permutation(rng.key(0, "order", epoch), 8) for epoch in range(4000)])
    assert (np.sort(orders, axis=1) == np.arange(8)).all()
    counts = np.stack([np.bincount(orders[:, place], minlength=8) for place in range(8)])
    assert np.abs(counts - 500).max() < 90  # four standard deviations
