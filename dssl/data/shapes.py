"""`shapes` and `figures`: labelled sets of small images that the program draws itself, to try things without a download.

Ten figures in random pose, size, texture and colour over clutter. An image is a patch of a loose lattice, randomly shifted and
turned, of figures of one class, each with its own pose and paint: two crops of an image share its class and little else, and
images of a class share no pixel. Colour, position and orientation say nothing about the class: they are drawn without looking
at it. All images have the same background, since its tint would tell images apart more easily than the figures do.
In `figures`, the easier set, the figures are nearly upright and in plain, bright colours: a network learns it in a minute.

Only +, -, *, / and square roots are used on pixels, all exactly rounded, so that every machine draws the same bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.data.pipeline import thread_pool
from dssl.data.source import InMemory, Split
from dssl.errors import DsslError
from dssl.files import forget_kernels

CLASSES = ("disk", "ring", "square", "triangle", "cross", "star", "crescent", "bars", "dumbbell", "frame")
SIDE = 32
TRAIN_COUNT, TEST_COUNT = 10_000, 2_000
Drawing = Literal["shapes", "figures"]
# part of the random stream and of the fingerprint: raise a version whenever the drawn bytes change
VERSIONS: dict[Drawing, int] = {"shapes": 2, "figures": 1}
_TEST_START = 1 << 40  # the index of the first test image of the same generator; no training count reaches it
_CLUTTER, _FIGURES, _DRAWS = 6, 9, 20
_GROUND = 128.0
_NOISE: dict[Drawing, float] = {"shapes": 0.06, "figures": 0.15}
# by class: all figures cover the same area on average, or the visible share of background would give the class away
_SCALE = np.array([0.87, 0.95, 0.91, 1.13, 1.05, 1.03, 1.13, 1.01, 1.26, 1.04])
_BLOCK = 500

# an object to paint: its class or one of two kinds of clutter, its pose, and its paint, by the number of the field
LINE, BLOB = 10, 11
SOLID, STRIPES, CHECKS, RAMP = 0, 1, 2, 3
KIND, X, Y, COS, SIN, SIZE, COLOUR, SHADE, TEXTURE, WAVE_X, WAVE_Y, PHASE = 0, 1, 2, 3, 4, 5, 6, 9, 12, 13, 14, 15
FIELDS = 18


class Shapes(InMemory):
    """A built-in set; `count` images of one split, all drawn when it is opened (30 MB for 10,000)."""

    def __init__(self, count: int | None = None, *, split: Split = "train", drawing: Drawing = "shapes") -> None:
        count = count if count is not None else (TRAIN_COUNT if split == "train" else TEST_COUNT)
        if not 1 <= count <= 1_000_000:
            raise DsslError(f"{drawing}:{count}: the number of images must be between 1 and 1,000,000")
        start = 0 if split == "train" else _TEST_START
        indices = np.arange(start, start + count, dtype=np.int64)
        super().__init__(
            draw(indices, drawing),
            labels=labels_of(indices),
            classes=CLASSES,
            name=f"{drawing} ({split}, {count:,} images)",
            caption=f"{drawing} {split}",
            fingerprint=hashlib.sha256(f"{drawing} {VERSIONS[drawing]} {start} {count}".encode()).hexdigest()[:32],
        )


def labels_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class of each image of the generator: each occurs once in any ten neighbours."""
    return indices % 10


def draw(indices: NDArray[np.int64], drawing: Drawing = "shapes") -> NDArray[np.uint8]:
    """The images of these indices: N x 32 x 32 x 3."""
    paint = load_painter()
    images = np.empty((len(indices), SIDE, SIDE, 3), np.uint8)

    def block(start: int) -> None:
        part = indices[start : start + _BLOCK]
        noise_bits = rng.bits(rng.key(0, drawing, VERSIONS[drawing], "noise"), part, SIDE * SIDE * 3 // 8)
        noise = noise_bits.astype("<u8").view(np.uint8).reshape(len(part), SIDE, SIDE, 3)
        paint(_plan(part, drawing), noise, _NOISE[drawing], images[start : start + _BLOCK])

    with thread_pool(4, "dssl-shapes") as pool:
        list(pool.map(block, range(0, len(indices), _BLOCK)))
    return images


def _plan(indices: NDArray[np.int64], drawing: Drawing) -> NDArray[np.float64]:
    """Everything that is painted, as an array: N x objects x FIELDS."""
    count, total = len(indices), 1 + _CLUTTER + _FIGURES
    draws = rng.uniforms(rng.key(0, drawing, VERSIONS[drawing], "plan"), indices, total * _DRAWS).reshape(
        count, total, _DRAWS
    )
    objects = np.zeros((count, total, FIELDS))
    clutter, figures = slice(1, 1 + _CLUTTER), slice(1 + _CLUTTER, None)

    # kind, place and size
    turn = 2 * np.pi * draws[..., 0]
    if drawing == "figures":  # upright, give or take 11 degrees
        turn[:, figures] = 0.06 * (turn[:, figures] - np.pi)
    # rounded, since the last bit of a cosine depends on the machine's mathematics library
    objects[..., COS], objects[..., SIN] = np.round(np.cos(turn), 6), np.round(np.sin(turn), 6)
    objects[..., X : Y + 1] = SIDE * draws[..., 1:3]
    objects[:, figures, X : Y + 1] = _lattice(draws[:, 0], draws[:, figures, 1:3])
    objects[:, 0, KIND] = -1  # the background covers everything
    objects[:, clutter, KIND] = np.where(draws[:, clutter, 3] < 0.5, LINE, BLOB)
    objects[:, clutter, SIZE] = 3 + 7 * draws[:, clutter, 4]
    objects[:, figures, KIND] = labels_of(indices)[:, None]
    objects[:, figures, SIZE] = _SCALE[labels_of(indices)][:, None] * (5 + 2.5 * draws[:, figures, 4])

    # paint: a light and a shade of it, weakly coloured, so that colour tells images apart no better than form does
    contrast = np.sign(draws[..., 6] - 0.5) * (60 + 40 * draws[..., 5])
    contrast[:, clutter] *= 0.35
    tint = np.full((total, 1), 24.0)
    if drawing == "figures":  # they differ in colour as much as in brightness
        tint[figures] = 144.0
    colour = _GROUND + contrast[..., None] + tint * (draws[..., 7:10] - 0.5)
    objects[..., COLOUR : COLOUR + 3] = colour
    objects[..., SHADE : SHADE + 3] = colour + 50 * (draws[..., 10:11] - 0.5)
    objects[:, 0, COLOUR : COLOUR + 3] = _GROUND
    objects[..., TEXTURE] = np.floor(4 * draws[..., 11])
    wave, pitch = 2 * np.pi * draws[..., 12], 1 / (1.5 + 4 * draws[..., 13])
    objects[..., WAVE_X], objects[..., WAVE_Y] = (np.round(pitch * np.cos(wave), 6), np.round(pitch * np.sin(wave), 6))
    objects[..., PHASE] = 2 * draws[..., 14]
    objects[:, 0, TEXTURE] = SOLID
    if drawing == "figures":
        objects[:, figures, TEXTURE] = SOLID
    return objects


def _lattice(place: NDArray[np.float64], jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the figures are: a 3 x 3 lattice around the centre, N x 9 x 2, from draws of the lattice and of each figure."""
    pitch = 12.5 + 3 * place[:, 1]
    turn = 2 * np.pi * place[:, 2]
    along, across = np.round(pitch * np.cos(turn), 6)[:, None], np.round(pitch * np.sin(turn), 6)[:, None]
    nodes = np.array([[x, y] for y in (-1, 0, 1) for x in (-1, 0, 1)]) + (place[:, None, 15:17] - 0.5)
    nodes += 0.3 * (jitter - 0.5)
    x, y = nodes[..., 0], nodes[..., 1]
    return SIDE / 2 + np.stack([x * along - y * across, x * across + y * along], axis=-1)


def _field(kind: int, x: float, y: float) -> Any:
    """Signed distance-like value, negative inside, of a figure of radius about 1 around the origin."""
    ax, ay = abs(x), abs(y)
    radius = np.sqrt(x * x + y * y)
    if kind == 0:
        return radius - 0.92
    if kind == 1:
        return abs(radius - 0.76) - 0.23
    if kind == 2:
        return max(ax, ay) - 0.78
    if kind == 3:
        return max(-y - 0.55, max(0.8660254 * x + 0.5 * y, -0.8660254 * x + 0.5 * y) - 0.55)
    if kind == 4:
        return min(max(ax - 1.0, ay - 0.27), max(ax - 0.27, ay - 1.0))
    if kind == 5:  # a point is in a five-pointed star if it is outside at most one of the five lines
        largest, second = -9.0, -9.0
        for side in range(5):
            value = _STAR[side, 0] * x + _STAR[side, 1] * y - 0.40
            if value > largest:
                largest, second = value, largest
            elif value > second:
                second = value
        return second
    if kind == 6:
        dx = x - 0.48
        return max(radius - 1.0, 0.78 - np.sqrt(dx * dx + y * y))
    if kind == 7:
        return max(ax - 0.95, abs(ay - 0.58) - 0.26)
    if kind == 8:
        dx = ax - 0.66
        return min(np.sqrt(dx * dx + y * y) - 0.42, max(ax - 0.66, ay - 0.15))
    if kind == 9:
        return abs(max(ax, ay) - 0.66) - 0.18
    if kind == LINE:
        return max(ax - 1.0, ay - 0.10)
    return np.sqrt(x * x + 3.0 * y * y) - 0.8


_STAR = np.array([[0.0, 1.0], [0.95105652, 0.30901699], [0.58778525, -0.80901699], [-0.58778525, -0.80901699],
                  [-0.95105652, 0.30901699]])  # fmt: skip


def _paint(objects: NDArray[np.float64], noise: NDArray[np.uint8], strength: float, out: NDArray[np.uint8]) -> None:
    """Draw images: objects is N x K x FIELDS (the first one is the background), noise N x H x W x 3 bytes."""
    size = out.shape[1]
    canvas = np.zeros((size, size, 3))
    for image in range(out.shape[0]):
        for item in range(objects.shape[1]):
            shape = objects[image, item]
            kind = int(shape[KIND])
            texture = int(shape[TEXTURE])
            reach = 1.3 * shape[SIZE] + 1.0
            top, bottom, left, right = 0, size, 0, size
            if kind >= 0:
                top, bottom = max(0, int(shape[Y] - reach)), min(size, int(shape[Y] + reach) + 1)
                left, right = max(0, int(shape[X] - reach)), min(size, int(shape[X] + reach) + 1)
            for row in range(top, bottom):
                for column in range(left, right):
                    dx, dy = column + 0.5 - shape[X], row + 0.5 - shape[Y]
                    cover = 1.0
                    if kind >= 0:
                        u = (dx * shape[COS] + dy * shape[SIN]) / shape[SIZE]
                        v = (dy * shape[COS] - dx * shape[SIN]) / shape[SIZE]
                        cover = 0.5 - _figure(kind, u, v) * shape[SIZE]
                        if cover <= 0.0:
                            continue
                        cover = min(1.0, cover)
                    mix = 0.0
                    if texture != SOLID:
                        wave = dx * shape[WAVE_X] + dy * shape[WAVE_Y] + shape[PHASE]
                        mix = abs(wave - 2.0 * np.floor(wave * 0.5) - 1.0)  # a triangle wave of period 2
                        if texture == CHECKS:
                            other = dy * shape[WAVE_X] - dx * shape[WAVE_Y] + shape[PHASE]
                            other = abs(other - 2.0 * np.floor(other * 0.5) - 1.0)
                            mix = mix + other - 2.0 * mix * other
                        if texture != RAMP:
                            mix = min(1.0, max(0.0, 2.0 * mix - 0.5))
                    for channel in range(3):
                        colour = shape[COLOUR + channel] * (1.0 - mix) + shape[SHADE + channel] * mix
                        canvas[row, column, channel] += (colour - canvas[row, column, channel]) * cover
        for row in range(size):
            for column in range(size):
                for channel in range(3):
                    value = canvas[row, column, channel] + strength * (noise[image, row, column, channel] - 127.5)
                    out[image, row, column, channel] = np.uint8(min(255.0, max(0.0, value + 0.5)))


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code, cached for the next start where some folder is writable."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # a read-only installation and no home folder
        return numba.njit(nogil=True)(function)


def load_painter() -> Callable[..., None]:
    """The compiled ``_paint``; a damaged cache of it is rebuilt."""
    global _figure, _painter
    with _lock:
        if _painter is None:
            _figure, painter = compiled(_field), compiled(_paint)
            nothing = np.zeros((0, 1, 1, 3), np.uint8)
            try:
                painter(np.zeros((0, 1, FIELDS)), nothing, 0.0, nothing.copy())
            except Exception:  # a damaged cache can fail in any way; a real error comes back without it
                forget_kernels(painter.stats.cache_path, module=Path(__file__).stem)
                _figure, painter = compiled(_field), compiled(_paint)
            _painter = painter
    painted: Callable[..., None] = _painter
    return painted


_lock = threading.Lock()
_figure: Any = None
_painter: Any = None
