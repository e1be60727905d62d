"""`shapes`: a labelled set of small pictures that the program draws itself, to try things out without any download.

Ten figures in random pose, size, texture and colour over clutter. An image is a patch of a loose lattice, randomly shifted and
turned, of figures of one class, each with its own pose and paint: two crops of an image share its class and little else, and
images of a class share no pixel. Colour, position and orientation say nothing about the class: they are drawn without looking
at it. All images have the same ground, since its tint would be an easier way to tell images apart than the figures are.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.types import Image  # which imports torch, and a look at data does not need it

SIZE = 32
TRAIN_COUNT, TEST_COUNT = 10_000, 2_000
VERSION = 2  # part of the random stream and of the fingerprint: raise it whenever the drawn bytes change
_TEST_START = 1 << 40  # the index of the first test image of the same generator; no training count reaches it
_CLUTTER, _FIGURES, _DRAWS = 6, 9, 20
_GROUND = 128.0
# by class: all figures cover the same area on average, or the amount of ground that one sees would give the class away
_SCALE = np.array([0.87, 0.95, 0.91, 1.13, 1.05, 1.03, 1.13, 1.01, 1.26, 1.04])
_BLOCK = 500


class Shapes:
    """The built-in set; `count` images of one split, all drawn when it is opened (30 MB for 10,000)."""

    def __init__(self, count: int | None = None, *, split: Literal["train", "test"] = "train") -> None:
        from dssl.data.shapes_kernel import CLASSES

        count = count if count is not None else (TRAIN_COUNT if split == "train" else TEST_COUNT)
        if not 1 <= count <= 1_000_000:
            raise DsslError(f"shapes:{count}: the number of images must be between 1 and 1,000,000")
        start = 0 if split == "train" else _TEST_START
        indices = np.arange(start, start + count, dtype=np.int64)
        self.name = f"shapes ({split}, {count:,} images)"
        self.fingerprint = hashlib.sha256(f"shapes {VERSION} {start} {count}".encode()).hexdigest()[:32]
        self.classes: tuple[str, ...] | None = CLASSES
        self.labels: NDArray[np.int64] | None = classes_of(indices)
        self._images: NDArray[np.uint8] = draw(indices)
        self._split = split

    def __len__(self) -> int:
        """The number of images."""
        return len(self._images)

    def image(self, index: int) -> Image:
        """One image, 32 x 32 x 3."""
        image: Image = self._images[index]
        return image

    def label_of(self, index: int) -> str:
        """What to call this image on a page."""
        return f"shapes {self._split} {index}"


def classes_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each image of the generator: equally many of each in any ten neighbours."""
    return indices % 10


def draw(indices: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The generator's images of these indices: N x 32 x 32 x 3."""
    from dssl.data.shapes_kernel import load

    paint = load()
    images = np.empty((len(indices), SIZE, SIZE, 3), np.uint8)

    def block(start: int) -> None:
        part = indices[start : start + _BLOCK]
        noise_bits = rng.bits(rng.key(0, "shapes", VERSION, "noise"), part, SIZE * SIZE * 3 // 8)
        noise = noise_bits.astype("<u8").view(np.uint8).reshape(len(part), SIZE, SIZE, 3)
        objects, strength = _plan(part)
        paint(objects, noise, strength, images[start : start + _BLOCK])

    with ThreadPoolExecutor(max_workers=4, thread_name_prefix="dssl-shapes") as pool:
        list(pool.map(block, range(0, len(indices), _BLOCK)))
    return images


def _plan(indices: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Everything that is painted, as arrays: N x objects x FIELDS, and the strength of the noise of each image."""
    from dssl.data import shapes_kernel as k

    count, total = len(indices), 1 + _CLUTTER + _FIGURES
    draws = rng.uniforms(rng.key(0, "shapes", VERSION, "plan"), indices, total * _DRAWS).reshape(count, total, _DRAWS)
    objects = np.zeros((count, total, k.FIELDS))
    clutter, figures = slice(1, 1 + _CLUTTER), slice(1 + _CLUTTER, None)

    # kind, place and size
    turn = 2 * np.pi * draws[..., 0]
    # rounded, since the last bit of a cosine depends on the machine's mathematics library
    objects[..., k.COS], objects[..., k.SIN] = np.round(np.cos(turn), 6), np.round(np.sin(turn), 6)
    objects[..., k.X : k.Y + 1] = SIZE * draws[..., 1:3]
    objects[:, figures, k.X : k.Y + 1] = _lattice(draws[:, 0], draws[:, figures, 1:3])
    objects[:, 0, k.KIND] = -1  # the background covers all
    objects[:, clutter, k.KIND] = np.where(draws[:, clutter, 3] < 0.5, k.LINE, k.BLOB)
    objects[:, clutter, k.SIZE] = 3 + 7 * draws[:, clutter, 4]
    objects[:, figures, k.KIND] = classes_of(indices)[:, None]
    objects[:, figures, k.SIZE] = _SCALE[classes_of(indices)][:, None] * (5 + 2.5 * draws[:, figures, 4])

    # paint: a light and a shade of it, weakly coloured, so that colour tells images apart no better than form does
    contrast = np.sign(draws[..., 6] - 0.5) * (60 + 40 * draws[..., 5])
    contrast[:, clutter] *= 0.35
    colour = _GROUND + contrast[..., None] + 24 * (draws[..., 7:10] - 0.5)
    objects[..., k.COLOUR : k.COLOUR + 3] = colour
    objects[..., k.SHADE : k.SHADE + 3] = colour + 50 * (draws[..., 10:11] - 0.5)
    objects[:, 0, k.COLOUR : k.COLOUR + 3] = _GROUND
    objects[..., k.TEXTURE] = np.floor(4 * draws[..., 11])
    wave, pitch = 2 * np.pi * draws[..., 12], 1 / (1.5 + 4 * draws[..., 13])
    objects[..., k.WAVE_X], objects[..., k.WAVE_Y] = (
        np.round(pitch * np.cos(wave), 6),
        np.round(pitch * np.sin(wave), 6),
    )
    objects[..., k.PHASE] = 2 * draws[..., 14]
    objects[:, 0, k.TEXTURE] = k.SOLID
    return objects, np.full(count, 0.06)


def _lattice(place: NDArray[np.float64], jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the figures are: a 3 x 3 lattice around the centre, N x 9 x 2, from draws of the lattice and of each figure."""
    pitch = 12.5 + 3 * place[:, 1]
    turn = 2 * np.pi * place[:, 2]
    along, across = np.round(pitch * np.cos(turn), 6)[:, None], np.round(pitch * np.sin(turn), 6)[:, None]
    nodes = np.array([[x, y] for y in (-1, 0, 1) for x in (-1, 0, 1)]) + (place[:, None, 15:17] - 0.5)
    nodes += 0.3 * (jitter - 0.5)
    x, y = nodes[..., 0], nodes[..., 1]
    return SIZE / 2 + np.stack([x * along - y * across, x * across + y * along], axis=-1)
