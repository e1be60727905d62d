"""Mean and deviation against NumPy's own."""

import numpy as np
import pytest

from dssl.data import Source, measure, open_source
from dssl.errors import DsslError


class Pictures(Source):
    name, fingerprint = "pictures", "p"

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def image(self, index):
        return self.images[index]


def test_equal_images_weigh_equally_whatever_their_size():
    generator = np.random.default_rng(1)
    large, small = generator.integers(0, 256, (60, 50, 3), np.uint8), generator.integers(0, 99, (5, 6, 3), np.uint8)
    found, count = measure(Pictures([large, small]))
    mean = (large.mean((0, 1)) + small.mean((0, 1))) / 2
    square = ((large.astype(float) ** 2).mean((0, 1)) + (small.astype(float) ** 2).mean((0, 1))) / 2
    assert np.allclose(found.mean, mean / 255, atol=1e-12)
    assert np.allclose(found.std, np.sqrt(square - mean**2) / 255, atol=1e-12)
    assert count == 2


def test_all_images_against_numpy():
    source = open_source("shapes:300")
    pixels = np.stack([source.image(index) for index in range(300)]).reshape(-1, 3) / 255
    found, count = measure(source, sample=None)
    assert count == 300
    assert np.allclose(found.mean, pixels.mean(0), atol=1e-9)
    assert np.allclose(found.std, pixels.std(0), atol=1e-9)
    assert measure(source, sample=None, threads=1) == (found, 300)
    part = measure(source, sample=100)
    assert part[1] == 100
    assert part == measure(source, sample=100)
    assert part != measure(source, sample=100, seed=1)


def test_constant_images_can_still_be_divided_by():
    found, _ = measure(Pictures([np.full((4, 4, 1), 255, np.uint8)] * 3))
    assert found.mean == (1.0,)
    assert found.std == (1 / 255,)


def test_nothing_readable(tmp_path):
    (tmp_path / "x.jpg").write_bytes(b"no")
    with pytest.raises(DsslError):
        measure(open_source(str(tmp_path)))
