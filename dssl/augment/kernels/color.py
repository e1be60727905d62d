"""Operations on the value of each pixel: Pillow's blends, gray and hue, in float32 where Pillow uses float, and tone curves.

A tone curve's new value of a byte depends on its old value and the channel's histogram alone.
"""

import numpy as np
from numba import njit

_RED, _GREEN, _BLUE, _ROUND = np.uint32(19595), np.uint32(38470), np.uint32(7471), np.uint32(32768)
_ZERO, _HALF, _ONE, _TWO, _FOUR, _SIX = (np.float32(value) for value in (0, 0.5, 1, 2, 4, 6))
_255, _256, _510, _765, _1020 = (np.float32(value) for value in (255, 256, 510, 765, 1020))
_255_SQUARED = np.float32(1.0 / 255.0**2)
_LITTLE = np.float32(0.001)
_BLOCK = 4096


@njit(nogil=True)
def _luma(r, g, b):
    """Pillow's L; every sum and product is cut to 32 bits, which is what lets LLVM use narrow vectors."""
    both = np.uint32(np.uint32(np.uint32(r) * _RED) + np.uint32(np.uint32(g) * _GREEN))
    return np.uint32(np.uint32(both + np.uint32(np.uint32(np.uint32(b) * _BLUE) + _ROUND)) >> np.uint32(16))


@njit(nogil=True)
def byte(value):
    """Truncated and clipped, as Pillow stores a float; in this order, since processors clip whole numbers as they store them."""
    whole = np.int32(value)
    whole = whole if whole > np.int32(0) else np.int32(0)
    whole = whole if whole < np.int32(255) else np.int32(255)
    return np.uint8(whole)


@njit(nogil=True)
def brightness(row, factor):
    """A blend with black."""
    for i in range(row.size):
        row[i] = byte(np.float32(row[i]) * factor)


@njit(nogil=True)
def _blend(row, level, factor):
    for i in range(row.size):
        row[i] = byte(level + factor * (np.float32(row[i]) - level))


@njit(nogil=True)
def contrast(planes, factor):
    """A blend with the rounded mean of the image's gray; where there is no colour, of each channel by itself."""
    channels, length = planes.shape
    total = np.int64(0)
    if channels == 3:
        for start in range(0, length, _BLOCK):  # the sum of a block needs only 32 bits
            stop = min(start + _BLOCK, length)
            red, green, blue = planes[0, start:stop], planes[1, start:stop], planes[2, start:stop]
            part = np.uint32(0)
            for i in range(red.size):
                part = np.uint32(part + _luma(red[i], green[i], blue[i]))
            total += part
        _blend(planes.reshape(planes.size), np.float32(int(total / length + 0.5)), factor)
        return
    for c in range(channels):
        row = planes[c]
        total = np.int64(0)
        for i in range(length):
            total += row[i]
        _blend(row, np.float32(int(total / length + 0.5)), factor)


@njit(nogil=True)
def color(planes, factor):
    """A blend with each pixel's gray; one channel is its own gray and stays as it is."""
    if planes.shape[0] != 3:
        return
    red, green, blue = planes[0], planes[1], planes[2]
    for i in range(red.size):
        r, g, b = np.float32(red[i]), np.float32(green[i]), np.float32(blue[i])
        gray = np.float32(np.int32(_luma(red[i], green[i], blue[i])))
        red[i] = byte(gray + factor * (r - gray))
        green[i] = byte(gray + factor * (g - gray))
        blue[i] = byte(gray + factor * (b - gray))


@njit(nogil=True)
def grayscale(planes):
    """Every channel becomes the gray; one channel stays as it is."""
    if planes.shape[0] != 3:
        return
    red, green, blue = planes[0], planes[1], planes[2]
    for i in range(red.size):
        gray = np.uint8(_luma(red[i], green[i], blue[i]))
        red[i] = gray
        green[i] = gray
        blue[i] = gray


@njit(nogil=True)
def _largest(r, g, b):
    larger = r if r > g else g
    return larger if larger > b else b


@njit(nogil=True)
def _smallest(r, g, b):
    smaller = r if r < g else g
    return smaller if smaller < b else b


@njit(nogil=True)
def _clipped(value):
    value = value if value > _ZERO else _ZERO
    return value if value < _255 else _255


@njit(nogil=True)
def hue(planes, shift):
    """Pillow's RGB -> HSV, hue + shift modulo 256, HSV -> RGB; one channel has no hue and stays as it is.

    Pillow mixes float and double. This is single precision, which gave every colour the same bytes at five shifts. There is no
    branch in the loop: both sides of every choice are computed, so that LLVM can vectorise it.
    """
    if planes.shape[0] != 3:
        return
    red, green, blue = planes[0], planes[1], planes[2]
    move = np.float32(shift)
    for i in range(red.size):
        r, g, b = np.int32(red[i]), np.int32(green[i]), np.int32(blue[i])
        most, least = _largest(r, g, b), _smallest(r, g, b)
        middle = np.int32(np.int32(np.int32(r + g) + b) - np.int32(most + least))
        top, spread = np.float32(most), np.float32(np.int32(most - least))
        part = np.float32(np.int32(most - middle)) / (spread if spread > _ZERO else _ONE)
        is_red, is_green = r == most, g == most
        base = _ZERO if is_red else (_TWO if is_green else _FOUR)
        rises = (b if is_red else (r if is_green else g)) == least
        # rounded once in either case, as in Pillow, since the first sum is a small whole number
        turn = ((base + _ONE) - part if rises else (base - _ONE) + part) / _SIX
        turn = turn + _ONE if turn < _ZERO else turn
        # whole numbers of 255ths are the only ones near a step: whether such a turn, which is rounded, lies below it shows
        # in turn * 255 - angle, here without rounding
        angle = np.floor(turn * _255 + _LITTLE)
        angle = angle - _ONE if (turn * _256 - angle) - turn < _ZERO else angle
        angle += move
        angle = angle - _256 if angle >= _256 else angle
        saturation = np.floor(spread / (top if top > _ZERO else _ONE) * _255)
        # a channel loses up to top * saturation / 255, by how far the angle (in sixths of a circle, times 255) is from it
        loss, sixths, rounded = top * saturation * _255_SQUARED, angle * _SIX, top + _HALF
        red[i] = np.uint8(np.int32(rounded - loss * _clipped(_510 - abs(sixths - _765))))
        green[i] = np.uint8(np.int32(rounded - loss * _clipped(abs(sixths - _510) - _255)))
        blue[i] = np.uint8(np.int32(rounded - loss * _clipped(abs(sixths - _1020) - _255)))


@njit(nogil=True)
def invert(row):
    """255 minus the value."""
    for i in range(row.size):
        row[i] = np.uint8(row[i] ^ np.uint8(255))


@njit(nogil=True)
def posterize(row, bits):
    """Keeps the highest bits."""
    mask = np.uint8(0xFF & ~(2 ** (8 - bits) - 1))
    for i in range(row.size):
        row[i] = np.uint8(row[i] & mask)


@njit(nogil=True)
def solarize(row, threshold):
    """Inverts the values at or above the threshold (0 .. 256, a whole number)."""
    for i in range(row.size):
        value = np.int32(row[i])
        row[i] = np.uint8(np.int32(255) ^ value if value >= threshold else value)


@njit(nogil=True)
def solarize_add(row, amount):
    """Adds, clips, then inverts what is at or above 128."""
    for i in range(row.size):
        value = np.int32(np.int32(row[i]) + amount)
        value = np.int32(255) if value > 255 else value
        value = np.int32(0) if value < 0 else value
        row[i] = np.uint8(np.int32(255) ^ value if value >= 128 else value)


@njit(nogil=True)
def _histogram(row, histogram):
    # four counters per value: equal neighbours would otherwise wait for each other's store
    parts = np.zeros((4, 256), np.int32)
    length = row.size
    whole = length - length % 4
    for i in range(0, whole, 4):
        parts[0, row[i]] += 1
        parts[1, row[i + 1]] += 1
        parts[2, row[i + 2]] += 1
        parts[3, row[i + 3]] += 1
    for i in range(whole, length):
        parts[0, row[i]] += 1
    for value in range(256):
        histogram[value] = parts[0, value] + parts[1, value] + parts[2, value] + parts[3, value]


@njit(nogil=True)
def _curve(row, table, strength):
    """Looks every value up, after blending the table with the identity as Image.blend would the images."""
    factor = np.float32(strength)
    curve = np.empty(256, np.uint8)
    for value in range(256):
        old = np.float32(value)
        curve[value] = np.uint8(np.int32(old + factor * (np.float32(table[value]) - old)))
    for i in range(row.size):
        row[i] = curve[row[i]]


@njit(nogil=True)
def autocontrast(planes, strength):
    """Stretches each channel to 0 .. 255."""
    table = np.empty(256, np.int64)
    for c in range(planes.shape[0]):
        row = planes[c]
        lowest, highest = np.uint8(255), np.uint8(0)
        for i in range(row.size):
            lowest = min(lowest, row[i])
            highest = max(highest, row[i])
        low, high = np.int64(lowest), np.int64(highest)
        if high <= low:
            continue
        scale = 255.0 / (high - low)
        offset = -low * scale
        for value in range(256):
            table[value] = min(max(int(value * scale + offset), 0), 255)
        _curve(row, table, strength)


@njit(nogil=True)
def equalize(planes, strength):
    """Pillow's histogram equalisation of each channel."""
    histogram = np.empty(256, np.int64)
    table = np.empty(256, np.int64)
    for c in range(planes.shape[0]):
        row = planes[c]
        _histogram(row, histogram)
        last = 255
        while histogram[last] == 0:
            last -= 1
        step = (row.size - histogram[last]) // 255
        if step == 0:
            continue
        running = step // 2
        for value in range(256):
            table[value] = min(running // step, 255)
            running += histogram[value]
        _curve(row, table, strength)
