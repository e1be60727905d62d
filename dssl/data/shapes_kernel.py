"""The drawing of `shapes`: signed fields of ten figures, textures and clutter, painted back to front.

Only +, -, *, / and square roots are used on pixels, all exactly rounded, so that every machine draws the same bytes.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dssl.files import forget_kernels

CLASSES = ("disk", "ring", "square", "triangle", "cross", "star", "crescent", "bars", "dumbbell", "frame")
LINE, BLOB = 10, 11  # clutter, painted like the figures
FIELDS = 18
KIND, X, Y, COS, SIN, SIZE, COLOUR, SHADE, TEXTURE, WAVE_X, WAVE_Y, PHASE = 0, 1, 2, 3, 4, 5, 6, 9, 12, 13, 14, 15
SOLID, STRIPES, CHECKS, RAMP = 0, 1, 2, 3


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
    if kind == 5:  # a point is in a five-pointed star if at most one of the five lines has it outside
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


def _paint(objects: NDArray[np.float64], noise: NDArray[np.uint8], strength: NDArray[np.float64],
           out: NDArray[np.uint8]) -> None:  # fmt: skip
    """Draw images: objects is N x K x FIELDS (the first one is the background), noise N x H x W x 3 bytes."""
    size = out.shape[1]
    canvas = np.zeros((size, size, 3))
    for image in range(out.shape[0]):
        for item in range(objects.shape[1]):
            shape = objects[image, item]
            kind = int(shape[KIND])
            if kind < -1:
                continue
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
                    value = canvas[row, column, channel] + strength[image] * (
                        noise[image, row, column, channel] - 127.5
                    )
                    out[image, row, column, channel] = np.uint8(min(255.0, max(0.0, value + 0.5)))


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code, kept for the next start wherever there is a place that can be written to."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # a read-only installation and no home
        return numba.njit(nogil=True)(function)


def load() -> Callable[..., None]:
    """The compiled ``_paint``; rebuilt where numba's cached copy is damaged."""
    global _figure, _painter
    with _lock:
        if _painter is None:
            _figure, painter = compiled(_field), compiled(_paint)
            nothing = np.zeros((0, 1, 1, 3), np.uint8)
            try:
                painter(np.zeros((0, 1, FIELDS)), nothing, np.zeros(0), nothing.copy())
            except Exception:  # a damaged cache fails in any way; without it a real error comes back
                forget_kernels(painter.stats.cache_path, module=Path(__file__).stem)
                _figure, painter = compiled(_field), compiled(_paint)
            _painter = painter
    painted: Callable[..., None] = _painter
    return painted


_lock = threading.Lock()
_figure: Any = None
_painter: Any = None
