"""Custom operations: kernels and functions beside the built-in ones, and what is refused."""

import numpy as np
import pytest
from numba import njit
from torchvision.transforms import functional

from dssl.augment import ViewMaker, add_function, add_kernel
from dssl.errors import DsslError
from dssl.graph import View
from tests.augment.made import digest, images, make


@njit(nogil=True)
def _roll(source, target, value, draw, other_draw):
    shift = int(value * draw * source.shape[2])
    for c in range(source.shape[0]):
        for y in range(source.shape[1]):
            for x in range(source.shape[2]):
                target[c, y, (x + shift) % source.shape[2]] = source[c, y, x]


def test_operations_of_ones_own():
    add_kernel("test-roll", _roll, low=0, high=1)
    add_function("test-mirror", lambda image: image[::-1])
    views = [
        View(name="s", policy="standard"),
        View(name="r", policy="test-roll(0.5) > invert", source="s"),
        View(name="m", policy="gray > test-mirror", source="s"),
        View(name="t", policy="0.5*test-mirror | 0.5*identity", source="m"),
    ]
    maker = ViewMaker(views, size=32, seed=0)
    out = make(maker, images(40), np.arange(40))
    rolled = 255 - out["r"].astype(int)
    shifts = set()
    for s, r, m, t in zip(out["s"], rolled, out["m"], out["t"], strict=True):
        found = [k for k in range(32) if np.array_equal(np.roll(s, k, axis=1), r)]
        assert len(found) == 1
        shifts.add(found[0])
        assert np.array_equal(m[::-1], make_gray(s))
        assert np.array_equal(t, m) or np.array_equal(t, m[::-1])
    assert max(shifts) <= 16
    assert len(shifts) > 8
    assert not np.array_equal(out["t"], out["m"])
    plan, many = maker.plan(np.arange(40), epoch=2), maker.allocate(40)
    maker.apply_many(plan, 0, images(40), many, 0)
    assert digest(many) == digest(out)


def make_gray(image: np.ndarray) -> np.ndarray:
    return np.asarray(functional.to_grayscale(functional.to_pil_image(image), 3))


def test_bad_operations_of_ones_own_are_refused():
    for name in ("rotate", "standard", "heavy", "ra", "1st", "a b", ""):
        with pytest.raises(DsslError):
            add_function(name, lambda image: image)
    with pytest.raises(DsslError, match="test-backwards"):
        add_kernel("test-backwards", _roll, low=1, high=0)
    add_function("test-shrinks", lambda image: image[1:])
    maker = ViewMaker([View(name="v", policy="resize > test-shrinks")], size=8, seed=0)
    with pytest.raises(DsslError, match=r"test-shrinks.*\(7, 8, 3\).*\(8, 8, 3\)"):
        make(maker, images(1), np.arange(1))
