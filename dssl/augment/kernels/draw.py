"""The plan of many images without the interpreter's lock: random numbers, decisions, and the numbers of every step.

A view's policy arrives as a script: rows of whole numbers (what, slot, step, then four that depend on what) and of floats.
The arithmetic is that of the first version of this program, operation by operation: a plan never changes by a bit.
"""

import itertools
import math

import numpy as np
from numba import njit

from dssl.augment import kernels as code

STEP = np.uint64(0x9E3779B97F4A7C15)  # the generator of dssl/rng.py, number by number
_ORDERS = np.array(list(itertools.permutations(range(4))))
_QUADRILLION = 1e15


@njit(nogil=True)
def mix(value):
    value = np.uint64(value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = np.uint64(value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(value ^ (value >> np.uint64(31)))


@njit(nogil=True)
def _start(stream, index):
    """Where the numbers of one image in one stream begin."""
    return mix(mix(np.uint64(index) * STEP + stream) ^ stream)


@njit(nogil=True)
def _uniform(start, slot):
    """The random number of a slot, in [0, 1)."""
    return np.float64(mix(start + np.uint64(slot + 1) * STEP) >> np.uint64(11)) * 2.0**-53


@njit(nogil=True)
def _fifteen_digits(value):
    """Python's ``round(value, 15)`` for -1 .. 1: to the nearest decimal, by the exact product and not its rounded one."""
    size = abs(value)
    product = size * _QUADRILLION
    # Dekker's product: the sum of product and rest is exact. Splitting is by 27 bits.
    big = size * 134217729.0
    high = big - (big - size)
    low = size - high
    other_big = _QUADRILLION * 134217729.0
    other_high = other_big - (other_big - _QUADRILLION)
    other_low = _QUADRILLION - other_high
    rest = ((high * other_high - product) + high * other_low + low * other_high) + low * other_low
    whole = np.floor(product)
    above = (product - whole - 0.5) + rest
    if above > 0.0 or (above == 0.0 and whole % 2.0 == 1.0):
        whole += 1.0
    return math.copysign(whole / _QUADRILLION, value)


@njit(nogil=True)
def _matrix(out, a, b, c, d, e, f):
    out[0], out[1], out[2], out[3], out[4], out[5] = a, b, c, d, e, f


@njit(nogil=True)
def _cutout(out, value, draw, other_draw, size):
    left = np.trunc(max(draw * size - value / 2, 0.0))
    top = np.trunc(max(other_draw * size - value / 2, 0.0))
    out[0], out[1] = left, top
    out[2], out[3] = np.trunc(min(left + value, size)), np.trunc(min(top + value, size))


@njit(nogil=True)
def _hue(value):
    """A whole number of 255ths of a turn, as a byte."""
    return np.trunc(value) % 256.0 + 0.0  # the sum turns -0 into 0


@njit(nogil=True)
def _encode(encoding, number, value, draw, other_draw, size, out):
    """The numbers that a kernel gets for an operation at a value."""
    if encoding in (code.SHARE_X, code.SHARE_Y, code.SHARE_SIDE, code.SHARE_AROUND):
        value = value * size
    if encoding == code.PLAIN:
        out[0] = value
    elif encoding == code.WHOLE:
        out[0] = np.trunc(value)
    elif encoding == code.BITS:
        out[0] = max(np.trunc(value), 1.0)
    elif encoding == code.THRESHOLD:
        out[0] = np.ceil(value)
    elif encoding == code.DEGREES:
        # rounded to 15 digits as Pillow does
        angle = -(value % 360.0 * (math.pi / 180.0))
        cosine, sine = _fifteen_digits(math.cos(angle)), _fifteen_digits(math.sin(angle))
        centre = size / 2
        _matrix(out, cosine, sine, cosine * -centre + sine * -centre + 0.0 + centre,
                -sine, cosine, -sine * -centre + cosine * -centre + 0.0 + centre)  # fmt: skip
    elif encoding == code.SHEAR_X:
        _matrix(out, 1.0, value, 0.0, 0.0, 1.0, 0.0)
    elif encoding == code.SHEAR_Y:
        _matrix(out, 1.0, 0.0, 0.0, value, 1.0, 0.0)
    elif encoding in (code.SHIFT_X, code.SHARE_X):
        _matrix(out, 1.0, 0.0, value, 0.0, 1.0, 0.0)
    elif encoding in (code.SHIFT_Y, code.SHARE_Y):
        _matrix(out, 1.0, 0.0, 0.0, 0.0, 1.0, value)
    elif encoding in (code.SIDE, code.SHARE_SIDE):
        _cutout(out, value, draw, other_draw, size)
    elif encoding == code.TURNS:
        out[0] = _hue(value * 255.0)
    elif encoding == code.SEEDED:
        out[0], out[3], out[4] = value, draw, other_draw
    elif encoding == code.ROOT:
        out[0] = value * math.sqrt(size / 128)
    elif encoding == code.SHARE_AROUND:
        angle = 2 * math.pi * draw
        _matrix(out, 1.0, 0.0, value * math.cos(angle), 0.0, 1.0, value * math.sin(angle))
    else:
        out[0], out[1], out[2], out[3] = number, value, draw, other_draw


@njit(nogil=True)
def _operate(row, number, integers, start, size, out):
    """One operation of a table at its magnitude; returns its kernel. ``integers`` says which slots hold which draws."""
    magnitude, own = number[0], integers[6]
    if integers[5] >= 0:
        magnitude *= _uniform(start, integers[5])
        if number[1] != 0.0:
            magnitude = np.floor(magnitude)
    low, high = row[3], row[4]
    value = magnitude / code.MAGNITUDES * (high - low) + low
    if _uniform(start, own) >= 0.5:
        if row[5] == code.NEGATE:
            value = -value
        elif row[5] == code.MIRROR:
            value = 2.0 - value
    _encode(row[0], row[2], value, _uniform(start, own + 1), _uniform(start, own + 2), size, out)
    return np.int32(row[1])


@njit(nogil=True)
def _box_radius(sigma):
    """The radius of the three box passes that stand for a Gaussian, in the mixture of float and double of Pillow's C."""
    single = np.float32(sigma)
    square = np.float32(np.float32(single * single) / np.float32(3))
    length = np.float64(np.float32(math.sqrt(12.0 * np.float64(square) + 1.0)))
    whole = np.float32(np.floor((length - 1.0) / 2.0))
    one = np.float32(1)
    next_one = np.float32(whole + one)
    odd = np.float32(np.float32(np.float32(2) * whole) + one)
    part = np.float32(odd * np.float32(np.float32(whole * next_one) - np.float32(np.float32(3) * square)))
    below = np.float32(np.float32(6) * np.float32(square - np.float32(next_one * next_one)))
    return np.float64(np.float32(whole + np.float32(part / below)))


@njit(nogil=True)
def _jitter(integers, number, start, offsets, codes, values):
    """Four factors in a random order; a bit of ``integers[3]`` is set for each that can change something."""
    slot, step = integers[1], integers[2]
    order = _ORDERS[int(_uniform(start, slot + 4) * _ORDERS.shape[0])]
    for place in range(4):
        which = order[place]
        draw = _uniform(start, slot + which)
        begin = offsets[step + place]
        if which < 3:
            values[begin] = number[2 * which] + number[2 * which + 1] * draw
        else:
            values[begin] = _hue((2.0 * draw - 1.0) * number[6] * 255.0)
        codes[step + place] = code.BRIGHTNESS + which if integers[3] >> which & 1 else code.SKIP


@njit(nogil=True)
def _draw_view(script, numbers, rows, first, stop, start, offsets, size, codes, values):
    """One view of one image, into its rows of the plan; True where a custom operation is among the steps."""
    custom = False
    place = first
    while place < stop:
        integers, number = script[place], numbers[place]
        what, slot, step = integers[0], integers[1], integers[2]
        place += 1
        if what == code.GO_BELOW:
            if not _uniform(start, slot) < number[0]:
                place = integers[3]
            continue
        if what == code.GO_LESS:
            if not _uniform(start, slot) < _uniform(start, slot + 1):
                place = integers[3]
            continue
        if what == code.GO:
            place = integers[3]
            continue
        out = values[offsets[step] :]
        if what == code.PUT:
            codes[step] = integers[3]
            for k in range(integers[4]):
                out[k] = number[k]
        elif what == code.DRAW_CROP:
            codes[step] = code.CROP
            out[0], out[1] = number[0], number[1]
            for k in range(2 + 2 * code.CROP_ATTEMPTS):
                out[2 + k] = _uniform(start, slot + k)
        elif what == code.DRAW_JITTER:
            _jitter(integers, number, start, offsets, codes, values)
        elif what == code.DRAW_BLUR:
            codes[step] = code.BLUR
            out[0] = _box_radius(number[0] + number[1] * _uniform(start, slot))
        elif what == code.DRAW_JIGSAW:
            codes[step] = code.JIGSAW
            tiles = integers[3]
            draws = np.empty(tiles * tiles)
            for k in range(draws.size):
                draws[k] = _uniform(start, slot + k)
            out[0] = tiles
            out[1 : 1 + draws.size] = np.argsort(draws, kind="mergesort")  # which is the stable one
        elif what == code.DRAW_CORRUPTION:
            codes[step] = integers[3]
            out[0], out[1], out[2] = number[0], number[1], number[2]
            out[3], out[4] = _uniform(start, slot + 1), _uniform(start, slot + 2)
        elif what == code.DRAW_VALUE:
            row = rows[integers[3]]
            codes[step] = np.int32(row[1])
            _encode(row[0], row[2], number[0], _uniform(start, slot), _uniform(start, slot + 1), size, out)
        else:
            chosen = integers[3] + int(_uniform(start, slot) * integers[4])
            codes[step] = _operate(rows[chosen], number, integers, start, size, out)
        custom |= codes[step] == code.CUSTOM
    return custom


@njit(nogil=True)
def draw_all(indices, streams, script, numbers, rows, bounds, offsets, size, codes, values):
    """All views of all images; True where a custom operation is among the steps of any."""
    custom = False
    for image in range(indices.size):
        for view in range(streams.size):
            start = _start(streams[view], indices[image])
            custom |= _draw_view(script, numbers, rows, bounds[view], bounds[view + 1], start, offsets, size,
                                 codes[image], values[image])  # fmt: skip
    return custom
