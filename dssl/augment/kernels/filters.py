"""Neighbourhood operations: sharpness and Gaussian blur."""

import numpy as np
from numba import njit

from dssl.augment.kernels.color import byte
from dssl.augment.kernels.lines import copy


@njit(nogil=True)
def sharpness(source, target, factor):
    """A blend with the 3x3 smoothed image (weights 1, centre 5, over 13); the border has no neighbours and stays.

    The loop runs over all planes as one line, and the borders are put back afterwards: long loops are what vector
    units like, and at 32 pixels a row is too short for one.
    """
    channels, height, width = source.shape
    old, new = source.reshape(source.size), target.reshape(target.size)
    thirteenth, half, four = np.float32(1.0 / 13.0), np.float32(0.5), np.float32(4)
    columns = np.empty(old.size, np.float32)
    inner = old.size - 2 * width
    above, here, below, middle = old[:inner], old[width:], old[2 * width :], columns[width:]
    for i in range(inner):
        middle[i] = np.float32(above[i]) + np.float32(here[i]) + np.float32(below[i])
    inner -= 2
    first, second, third = columns[width:], columns[width + 1 :], columns[width + 2 :]
    centre, out = old[width + 1 :], new[width + 1 :]
    for i in range(inner):
        value = np.float32(centre[i])
        # a sum is never halfway between multiples of 13, so the rounding of float32 cannot matter
        mean = (first[i] + second[i] + third[i] + four * value) * thirteenth + half
        smooth = np.float32(np.int32(mean))
        out[i] = byte(smooth + factor * (value - smooth))
    for c in range(channels):
        copy(source[c, 0], target[c, 0])
        copy(source[c, height - 1], target[c, height - 1])
        for y in range(1, height - 1):
            target[c, y, 0] = source[c, y, 0]
            target[c, y, width - 1] = source[c, y, width - 1]


@njit(nogil=True)
def _rounded(whole, sums, edge, ends):
    total = np.uint32(np.uint32(whole * np.uint32(sums)) + np.uint32(edge * np.uint32(ends)))
    return np.uint8(np.uint32(total + np.uint32(1 << 23)) >> np.uint32(24))


@njit(nogil=True)
def _box(old, new, stride, radius, whole, edge):
    """One box pass over a whole array as if it were one line with this stride; the ends of real lines come out wrong."""
    reach = (radius + 1) * stride
    length = old.size - 2 * reach
    if length <= 0:
        return
    begin, end, out = old[:length], old[2 * reach :], new[reach:]
    if radius == 0:
        middle = old[reach:]
        for i in range(length):
            out[i] = _rounded(whole, np.uint32(middle[i]), edge, np.uint32(begin[i]) + np.uint32(end[i]))
    elif radius == 1:
        before, middle, after = old[stride:], old[reach:], old[3 * stride :]
        for i in range(length):
            sums = np.uint32(before[i]) + np.uint32(middle[i]) + np.uint32(after[i])
            out[i] = _rounded(whole, sums, edge, np.uint32(begin[i]) + np.uint32(end[i]))
    else:
        sums_of = np.zeros(length, np.uint32)
        for k in range(1, 2 * radius + 2):
            part = old[k * stride :]
            for i in range(length):
                sums_of[i] = np.uint32(sums_of[i] + np.uint32(part[i]))
        for i in range(length):
            out[i] = _rounded(whole, sums_of[i], edge, np.uint32(begin[i]) + np.uint32(end[i]))


@njit(nogil=True)
def _box_end(old, new, at, lines, step, stride, length, radius, whole, edge):
    """One box pass at place ``at`` of every line; beyond its ends a line repeats itself.

    Line i begins at i * step. Unsigned indices spare the question whether they are negative.
    """
    last = length - 1
    near, far = np.uint64(max(at - radius - 1, 0) * stride), np.uint64(min(at + radius + 1, last) * stride)
    before, after = np.uint64(max(at - 1, 0) * stride), np.uint64(min(at + 1, last) * stride)
    middle = np.uint64(at * stride)
    leap = np.uint64(step)
    for line in range(np.uint64(lines)):
        begin = line * leap
        sums = np.uint32(old[begin + middle])
        if radius == 1:
            sums = np.uint32(sums + np.uint32(old[begin + before]) + np.uint32(old[begin + after]))
        elif radius > 1:
            for k in range(1, radius + 1):
                left, right = np.uint64(max(at - k, 0) * stride), np.uint64(min(at + k, last) * stride)
                sums = np.uint32(sums + np.uint32(old[begin + left]) + np.uint32(old[begin + right]))
        ends = np.uint32(old[begin + near]) + np.uint32(old[begin + far])
        new[begin + middle] = _rounded(whole, sums, edge, ends)


@njit(nogil=True)
def _pass(source, target, across, radius, whole, edge):
    """One box pass along the rows (``across``) or the columns of every plane."""
    channels, height, width = source.shape
    old, new = source.reshape(source.size), target.reshape(target.size)
    length = width if across else height
    _box(old, new, 1 if across else width, radius, whole, edge)
    for place in range(2 * min(radius + 1, length)):
        at = place // 2 if place % 2 == 0 else length - 1 - place // 2
        if across:
            _box_end(old, new, at, channels * height, width, 1, length, radius, whole, edge)
        else:
            for c in range(channels):
                plane, other = source[c].reshape(height * width), target[c].reshape(height * width)
                _box_end(plane, other, at, width, 1, width, length, radius, whole, edge)


@njit(nogil=True)
def blur(planes, other, radius):
    """Pillow's GaussianBlur: three box passes along each axis, rounded to uint8 each time; the result is in ``planes``."""
    reach = int(radius)
    whole = np.uint32(np.float32(1 << 24) / (np.float32(radius) * np.float32(2) + np.float32(1)))
    edge = np.uint32(((1 << 24) - (2 * reach + 1) * np.int64(whole)) // 2)
    _pass(planes, other, True, reach, whole, edge)
    _pass(other, planes, True, reach, whole, edge)
    _pass(planes, other, True, reach, whole, edge)
    _pass(other, planes, False, reach, whole, edge)
    _pass(planes, other, False, reach, whole, edge)
    _pass(other, planes, False, reach, whole, edge)
