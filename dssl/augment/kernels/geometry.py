"""Operations that move pixels: flip, affine warps, cutout, JigSaw."""

import math

import numpy as np
from numba import njit

from dssl.augment.kernels.lines import clear, copy


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
def _scale_translate(source, target, a):
    """Pillow's path for a matrix without rotation or shear: coordinates are summed in double, then truncated."""
    channels, height, width = source.shape
    columns = np.empty(width, np.int64)
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
        inside = 0 <= row < height
        for c in range(channels):
            new = target[c, y]
            if not inside:
                clear(new)
                continue
            old = source[c, row]
            clear(new[:begin])
            clear(new[end:])
            if a[0] == 1.0 and begin < end:
                start = columns[begin]
                copy(old[start:], new[begin:end])
            else:
                for x in range(begin, end):
                    new[x] = old[columns[x]]


@njit(nogil=True)
def _gather(pixels, target, y, places, begin, end):
    """Part of a row of every channel from places in its pixels; those of colour at once, since to load a place costs as much."""
    if len(pixels) == 3:
        red, green, blue = pixels[0], pixels[1], pixels[2]
        new_red, new_green, new_blue = target[0, y], target[1, y], target[2, y]
        for x in range(np.uint64(begin), np.uint64(end)):
            place = np.uint64(places[x])
            new_red[x], new_green[x], new_blue[x] = red[place], green[place], blue[place]
    else:
        for c in range(len(pixels)):
            old, new = pixels[c], target[c, y]
            for x in range(np.uint64(begin), np.uint64(end)):
                new[x] = old[np.uint64(places[x])]


@njit(nogil=True)
def affine(source, target, a):
    """Image.transform(size, AFFINE, a) with nearest neighbours, zeros outside, in 16.16 fixed point."""
    if a[1] == 0.0 and a[3] == 0.0:
        _scale_translate(source, target, a)
        return
    channels, height, width = source.shape
    a0, a1 = math.floor(a[0] * 65536.0 + 0.5), math.floor(a[1] * 65536.0 + 0.5)
    a3, a4 = math.floor(a[3] * 65536.0 + 0.5), math.floor(a[4] * 65536.0 + 0.5)
    row_x = math.floor((a[2] + a[0] * 0.5 + a[1] * 0.5) * 65536.0 + 0.5)
    row_y = math.floor((a[5] + a[3] * 0.5 + a[4] * 0.5) * 65536.0 + 0.5)
    pixels = source.reshape(channels, height * width)  # once: numba takes as long for it as for a row
    places = np.empty(width, np.int64)
    for y in range(height):
        if a0 == 65536 and a3 == 0:  # a horizontal shear moves whole rows
            row, shift = row_y >> 16, row_x >> 16
            begin, end = max(0, -shift), min(width, width - shift)
            for c in range(channels):
                new = target[c, y]
                if 0 <= row < height and begin < end:
                    clear(new[:begin])
                    clear(new[end:])
                    copy(source[c, row, begin + shift :], new[begin:end])
                else:
                    clear(new)
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
            for c in range(channels):
                clear(target[c, y, :begin])
                clear(target[c, y, end:])
            _gather(pixels, target, y, places, begin, end)
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
