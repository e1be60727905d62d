import math

import numpy as np
import pytest

from dssl.report import strength


def test_change_is_the_mean_absolute_difference() -> None:
    first = np.array([[[[0, 10, 255]]], [[[5, 5, 5]]]], dtype=np.uint8)
    second = np.array([[[[255, 7, 0]]], [[[5, 5, 6]]]], dtype=np.uint8)
    assert strength.change(first, second).tolist() == [pytest.approx((255 + 3 + 255) / 3), pytest.approx(1 / 3)]


def test_one_flat_colour_is_flat_whatever_the_colour() -> None:
    red = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    red[..., 0] = 255
    assert strength.spread(red).tolist() == [0.0]
    assert strength.nearly_flat(red).tolist() == [True]


def test_spread_by_hand() -> None:
    image = np.zeros((1, 1, 2, 3), dtype=np.uint8)
    image[0, 0, 1] = (20, 0, 40)  # deviations 10, 0 and 20 around the channels' means
    assert strength.spread(image)[0] == pytest.approx(math.sqrt((100 + 0 + 400) / 3))
    assert strength.spread(image[..., :1])[0] == pytest.approx(10)


def test_spread_equals_the_textbook_on_large_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 300, 200, 3), dtype=np.uint8)
    images[1] = 255
    expected = [math.sqrt(np.mean([np.var(image[..., c].astype(np.float64)) for c in range(3)])) for image in images]
    assert strength.spread(images).tolist() == pytest.approx(expected)
    assert strength.spread(images)[1] == 0


def test_the_threshold_divides() -> None:
    below, above = (np.zeros((1, 1, 2, 1), dtype=np.uint8) for _ in range(2))
    below[0, 0, 1] = math.ceil(2 * strength.FLAT_BELOW) - 1
    above[0, 0, 1] = math.ceil(2 * strength.FLAT_BELOW)
    assert strength.nearly_flat(below).tolist() == [True]
    assert strength.nearly_flat(above).tolist() == [False]


def test_farther_in_pixels() -> None:
    original = np.full((3, 4, 4, 3), 100, dtype=np.uint8)
    standard = np.full_like(original, 110)
    heavy = np.stack([np.full((4, 4, 3), level, dtype=np.uint8) for level in (80, 105, 90)])
    assert strength.farther(original, standard, heavy).tolist() == [True, False, False]


def test_farther_in_features_is_by_angle_and_not_by_length() -> None:
    originals, standard = np.float32([[1, 0]] * 3), np.float32([[5, 1]] * 3)
    heavy = np.float32([[1, 1], [100, 1], [0, 0]])
    assert strength.farther_in_features(originals, standard, heavy).tolist() == [True, False, True]
