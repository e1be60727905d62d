"""Views for the tests of the maker, without torch, which the second process of a test would have to import."""

import hashlib

import numpy as np

from dssl.augment import ViewMaker
from dssl.graph import View

FOUR = (
    View(name="s1", policy="standard"),
    View(name="h1", policy="0.9*ra(2,9) | 0.1*jigsaw(4)", source="s1"),
    View(name="s2", policy="standard"),
    View(name="h2", policy="ua", source="s2"),
)


def images(count: int, height: int = 32, width: int = 32, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, height, width, channels)).astype(np.uint8)


def make(maker: ViewMaker, pictures: np.ndarray, indices: np.ndarray, *, epoch: int = 2) -> dict[str, np.ndarray]:
    plan, out = maker.plan(indices, epoch=epoch), maker.allocate(len(indices))
    for row, index in enumerate(indices):
        maker.apply_many(plan, row, [pictures[index]], out, row)
    return out


def digest(views: dict[str, np.ndarray]) -> str:
    return hashlib.blake2b(b"".join(name.encode() + views[name].tobytes() for name in sorted(views))).hexdigest()
