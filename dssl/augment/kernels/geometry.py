"""Operations that move pixels or look at their neighbours: flip, affine warps, cutout, JigSaw, sharpness, Gaussian blur."""

import math

import numpy as np
from numba import njit

from dssl.augment.kernels.color import byte


# plain loops: numba's assignment to a slice takes two to three times as long
@njit(nogil=True)
def copy(old, new):
    """As many values as ``new`` has."""
    for i in range(new.size):
        new[i] = old[i]


@njit(nogil=True)
def flip(source, target):
    """Mirrors left and right."""
    channels, height, width = source.shape
    for c in range(channels):
        for y in range(height):
            old, new = source[c, y], target[c, y]
            for x in range(np.uint64(width)):  # unsigned: numba need not ask whether an index is negative
                new[x] = old[np.uint64(width - 1) - x]


@njit(nogil=True)
def _floor_coordinate(value):
    return -1 if value < 0.0 else int(value)


@njit(nogil=True)
def _gather(old, plane, places, begin, end, new, row, width, channels):
    """Row ``row`` of every channel from places in its plane; zeros before ``begin`` and from ``end`` on.

    Places are unsigned, which spares numba the question whether they are negative, and rows are not slices, whose references
    numba would count.
    """
    line = np.uint64(row * width)
    for c in range(channels):
        start = np.uint64(c * plane) + line
        for x in range(np.uint64(begin)):
            new[start + x] = 0
        for x in range(np.uint64(end), np.uint64(width)):
            new[start + x] = 0
    if channels == 3:  # all three at once, since to load a place costs as much as to load a pixel
        green, blue = np.uint64(plane), np.uint64(2 * plane)
        for x in range(np.uint64(begin), np.uint64(end)):
            place, to = np.uint64(places[x]), line + x
            new[to], new[green + to], new[blue + to] = old[place], old[green + place], old[blue + place]
    else:
        for c in range(channels):
            start = np.uint64(c * plane)
            for x in range(np.uint64(begin), np.uint64(end)):
                new[start + line + x] = old[start + np.uint64(places[x])]


@njit(nogil=True)
def _shift(old, plane, place, begin, end, new, row, width, channels):
    """As ``_gather``, from neighbouring places: the pixel at ``begin`` comes from ``place``."""
    for c in range(channels):
        start, source = np.uint64(c * plane + row * width), np.uint64(c * plane + place)
        for x in range(np.uint64(begin)):
            new[start + x] = 0
        for x in range(np.uint64(end - begin)):
            new[start + np.uint64(begin) + x] = old[source + x]
        for x in range(np.uint64(end), np.uint64(width)):
            new[start + x] = 0


@njit(nogil=True)
def _scale_translate(source, target, a):
    """Pillow's path for a matrix without rotation or shear: coordinates are summed in double, then truncated."""
    channels, height, width = source.shape
    plane = height * width
    old, new = source.reshape(source.size), target.reshape(target.size)
    columns, places = np.empty(width, np.int64), np.empty(width, np.int64)
    position = a[2] + a[0] * 0.5
    for x in range(width):
        columns[x] = _floor_coordinate(position)
        position += a[0]
    begin, end = 0, width
    while begin < end and not 0 <= columns[begin] < width:
        begin += 1
    while end > begin and not 0 <= columns[end - 1] < width:
        end -= 1
    position = a[5] + a[4] * 0.5
    for y in range(height):
        row = _floor_coordinate(position)
        position += a[4]
        if not 0 <= row < height or begin == end:
            _shift(old, plane, 0, width, width, new, y, width, channels)
        elif a[0] == 1.0:
            _shift(old, plane, row * width + columns[begin], begin, end, new, y, width, channels)
        else:
            for x in range(begin, end):
                places[x] = row * width + columns[x]
            _gather(old, plane, places, begin, end, new, y, width, channels)


@njit(nogil=True)
def affine(source, target, a):
    """Image.transform(size, AFFINE, a) with nearest neighbours, zeros outside, in 16.16 fixed point."""
    if a[1] == 0.0 and a[3] == 0.0:
        _scale_translate(source, target, a)
        return
    channels, height, width = source.shape
    plane = height * width
    a0, a1 = math.floor(a[0] * 65536.0 + 0.5), math.floor(a[1] * 65536.0 + 0.5)
    a3, a4 = math.floor(a[3] * 65536.0 + 0.5), math.floor(a[4] * 65536.0 + 0.5)
    row_x = math.floor((a[2] + a[0] * 0.5 + a[1] * 0.5) * 65536.0 + 0.5)
    row_y = math.floor((a[5] + a[3] * 0.5 + a[4] * 0.5) * 65536.0 + 0.5)
    old, new = source.reshape(source.size), target.reshape(target.size)
    places = np.empty(width, np.int64)
    for y in range(height):
        if a0 == 65536 and a3 == 0:  # a horizontal shear moves whole rows
            row, shift = row_y >> 16, row_x >> 16
            begin, end = max(0, -shift), min(width, width - shift)
            if 0 <= row < height and begin < end:
                _shift(old, plane, row * width + begin + shift, begin, end, new, y, width, channels)
            else:
                _shift(old, plane, 0, width, width, new, y, width, channels)
        else:
            for x in range(width):
                column, row = (row_x + x * a0) >> 16, (row_y + x * a3) >> 16
                inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                places[x] = row * width + column if inside else -1
            begin, end = 0, width  # a line crosses the image once: what is inside is in one piece
            while begin < end and places[begin] < 0:
                begin += 1
            while end > begin and places[end - 1] < 0:
                end -= 1
            _gather(old, plane, places, begin, end, new, y, width, channels)
        row_x += a1
        row_y += a4


@njit(nogil=True)
def cutout(planes, left, top, right, bottom):
    """Fills a rectangle, far edges included, with the paper's gray (other than colour: the luma of it)."""
    channels, height, width = planes.shape
    for c in range(channels):
        fill = 123 if channels != 3 or c == 1 else (125 if c == 0 else 114)
        for y in range(max(top, 0), min(bottom + 1, height)):
            row = planes[c, y, max(left, 0) : min(right + 1, width)]
            for x in range(row.size):
                row[x] = fill


@njit(nogil=True)
def jigsaw(source, target, tiles, order):
    """Tile i of the result is tile order[i] of the source.

    Where the size is not a multiple of ``tiles`` the tiles differ by one pixel; a larger place repeats its tile's last
    row or column.
    """
    channels, height, width = source.shape
    for place in range(tiles * tiles):
        tile = int(order[place])
        new_y, new_x = place // tiles, place % tiles
        old_y, old_x = tile // tiles, tile % tiles
        top, bottom = new_y * height // tiles, (new_y + 1) * height // tiles
        left, right = new_x * width // tiles, (new_x + 1) * width // tiles
        from_top, from_bottom = old_y * height // tiles, (old_y + 1) * height // tiles
        from_left, from_right = old_x * width // tiles, (old_x + 1) * width // tiles
        span = min(right - left, from_right - from_left)
        for c in range(channels):
            for y in range(bottom - top):
                row = min(from_top + y, from_bottom - 1)
                new, old = target[c, top + y], source[c, row]
                copy(old[from_left:], new[left : left + span])
                for x in range(left + span, right):
                    new[x] = old[from_right - 1]


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
