"""Operations on the value of each pixel: Pillow's blends, gray and hue, in float32 where Pillow uses float, and tone curves.

A tone curve's new value of a byte depends on its old value and the channel's histogram alone.
"""

import numpy as np
from numba import njit

_RED, _GREEN, _BLUE = np.float32(19595), np.float32(38470), np.float32(7471)
_ROUND, _SHIFT = np.float32(32768), np.float32(2.0**-16)
_SIXTH, _6_255THS, _255TH = 1.0 / 6.0, 6.0 / 255.0, 1.0 / 255.0
_ZERO, _HALF, _ONE, _TOP = np.float32(0), np.float32(0.5), np.float32(1), np.float32(255)


@njit(nogil=True)
def _luma(r, g, b):
    """Pillow's L as a whole float32; every partial sum is below 2**24, so nothing is rounded."""
    return np.float32(
        np.int32((np.float32(r) * _RED + np.float32(g) * _GREEN + np.float32(b) * _BLUE + _ROUND) * _SHIFT)
    )


@njit(nogil=True)
def byte(value):
    """Clipped and truncated, as Pillow stores a float."""
    value = value if value > _ZERO else _ZERO
    value = value if value < _TOP else _TOP
    return np.uint8(np.int32(value))


@njit(nogil=True)
def brightness(row, factor):
    """A blend with black."""
    for i in range(row.size):
        row[i] = byte(np.float32(row[i]) * factor)


@njit(nogil=True)
def contrast(planes, factor):
    """A blend with the rounded mean of the image's gray; where there is no colour, of each channel by itself."""
    channels, length = planes.shape
    total = np.int64(0)
    if channels == 3:
        red, green, blue = planes[0], planes[1], planes[2]
        for i in range(length):
            total += np.int32(_luma(red[i], green[i], blue[i]))
    for c in range(channels):
        row = planes[c]
        if channels != 3:
            total = np.int64(0)
            for i in range(length):
                total += row[i]
        mean = np.float32(int(total / length + 0.5))
        for i in range(length):
            row[i] = byte(mean + factor * (np.float32(row[i]) - mean))


@njit(nogil=True)
def color(planes, factor):
    """A blend with each pixel's gray; one channel is its own gray and stays as it is."""
    if planes.shape[0] != 3:
        return
    red, green, blue = planes[0], planes[1], planes[2]
    for i in range(red.size):
        r, g, b = np.float32(red[i]), np.float32(green[i]), np.float32(blue[i])
        gray = _luma(r, g, b)
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
        gray = np.uint8(np.int32(_luma(red[i], green[i], blue[i])))
        red[i] = gray
        green[i] = gray
        blue[i] = gray


@njit(nogil=True)
def hue(planes, shift):
    """Pillow's RGB -> HSV, hue + shift modulo 256, HSV -> RGB; one channel has no hue and stays as it is.

    Pillow mixes float and double. Where single precision or a multiplication stands for its double precision or its
    division here, the result was compared for every possible input; the angle needs double precision. There is no
    branch in the loop: both sides of every choice are computed, so that LLVM can vectorise it.
    """
    if planes.shape[0] != 3:
        return
    red, green, blue = planes[0], planes[1], planes[2]
    move = np.float64(shift)
    for i in range(red.size):
        r, g, b = np.float32(red[i]), np.float32(green[i]), np.float32(blue[i])
        top = r if r > g else g
        top = top if top > b else b
        low = r if r < g else g
        low = low if low < b else b
        spread = top - low
        safe = spread if spread > _ZERO else _ONE
        is_red = r == top
        is_green = g == top
        base = 0.0 if is_red else (2.0 if is_green else 4.0)
        plus = (top - (b if is_red else (r if is_green else g))) / safe
        minus = (top - (g if is_red else (b if is_green else r))) / safe
        angle = np.float64(np.float32(base + np.float64(plus) - np.float64(minus))) * _SIXTH + 1.0
        angle = angle - 1.0 if angle >= 1.0 else angle
        turned = np.float64(np.int32(np.float64(np.float32(angle)) * 255.0)) + move
        turned = turned - 256.0 if turned >= 256.0 else turned
        saturation = np.int32(spread / (top if top > _ZERO else _ONE) * _TOP)
        amount = np.float32(np.float64(saturation) * _255TH)
        sixth = turned * _6_255THS
        sector = np.int32(sixth)
        part = np.float32(sixth - np.float64(sector))
        part = part if (sector & np.int32(1)) == 1 else _ONE - part
        v = np.uint8(np.int32(top))
        p = np.uint8(np.int32(top * (_ONE - amount) + _HALF))
        q = np.uint8(np.int32(top * (_ONE - amount * part) + _HALF))
        sector = np.int32(0) if sector == 6 else sector
        flat = amount == _ZERO  # no spread: the value itself, at any hue
        new_r = v if (sector == 0) | (sector == 5) | flat else (q if (sector == 1) | (sector == 4) else p)
        new_g = v if (sector == 1) | (sector == 2) | flat else (q if (sector == 0) | (sector == 3) else p)
        new_b = v if (sector == 3) | (sector == 4) | flat else (q if (sector == 2) | (sector == 5) else p)
        red[i] = new_r
        green[i] = new_g
        blue[i] = new_b


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
