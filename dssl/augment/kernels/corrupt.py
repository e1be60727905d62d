"""Corruptions of photographs by the formulas of ImageNet-C: noise, blur, weather, digital.

``values`` are up to three constants, then two draws in [0, 1). Noise is a function of the first draw and the place of the pixel.
Results are truncated to bytes, as there.
"""

import math
from statistics import NormalDist

import numpy as np
from numba import njit

from dssl.augment import kernels as code
from dssl.augment.kernels.color import byte
from dssl.augment.kernels.draw import STEP, mix

_NORMAL = NormalDist()
_QUANTILES = np.array([_NORMAL.inv_cdf((place + 0.5) / 65536) for place in range(65536)], np.float32)
# beyond a border: its pixel, or a mirror image with the border's pixel twice or once
_NEAREST, _TWICE, _ONCE = -1, 0, 1
_BARELY = np.float32(1 / 512)  # a sum of weights may be a little below 1, and truncation would take a whole level

# annex K of the JPEG standard
_LUMA = np.array([
    [16, 11, 10, 16, 24, 40, 51, 61], [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56], [14, 17, 22, 29, 51, 87, 80, 62],
    [18, 22, 37, 56, 68, 109, 103, 77], [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101], [72, 92, 95, 98, 112, 100, 103, 99],
])  # fmt: skip
_CHROMA = np.full((8, 8), 99)
_CHROMA[:4, :4] = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]
_COSINES = np.cos(np.outer(np.arange(8), 2 * np.arange(8) + 1) * np.pi / 16) * math.sqrt(2)
_COSINES[0] = 1.0


@njit(nogil=True)
def _words(draw, count):
    """Random numbers of 64 bits."""
    start = mix(np.uint64(draw * 2.0**53))
    words = np.empty(count, np.uint64)
    for i in range(count):
        words[i] = mix(start + np.uint64(i + 1) * STEP)
    return words


@njit(nogil=True)
def _shares(draw, count):
    """At least ``count`` random numbers of 16 bits: 65,536 equal shares of a distribution are fine enough for bytes."""
    return _words(draw, (count + 3) // 4).view(np.uint16)


@njit(nogil=True)
def _noise(kind, old, new, amount, draw):
    shares = _shares(draw, old.size)
    if kind == code.IMPULSE:
        pepper, salt = round(amount / 2 * 65536), round(amount * 65536)
        for i in range(old.size):
            new[i] = 0 if shares[i] < pepper else 255 if shares[i] < salt else old[i]
    elif kind == code.SPECKLE:
        scale = np.float32(amount)
        for i in range(old.size):
            value = np.float32(old[i])
            new[i] = byte(value + value * (scale * _QUANTILES[shares[i]]))
    else:
        scale = np.float32(255 * amount)
        for i in range(old.size):
            new[i] = byte(np.float32(old[i]) + scale * _QUANTILES[shares[i]])


@njit(nogil=True)
def _shot(old, new, photons, draw):
    """Poisson: the smallest count whose cumulative probability reaches the share, from a guess by the normal distribution on."""
    shares = _shares(draw, old.size)
    most = int(photons + 8 * math.sqrt(photons) + 10)
    cumulative = np.empty((256, most + 1))
    cumulative[:, 0] = -1.0
    for i in range(old.size):
        value = np.int64(old[i])
        rate, row = value * photons / 255, cumulative[value]
        if row[0] < 0.0:
            term = total = math.exp(-rate)
            row[0] = total
            for count in range(1, most + 1):
                term *= rate / count
                total += term
                row[count] = total
        share, normal = (shares[i] + 0.5) / 65536, np.float64(_QUANTILES[shares[i]])
        count = min(max(int(rate + math.sqrt(rate) * normal + normal * normal / 6), 0), most)
        while count < most and row[count] < share:
            count += 1
        while count > 0 and row[count - 1] >= share:
            count -= 1
        new[i] = byte(np.float32(count * 255 / photons) + _BARELY)


@njit(nogil=True)
def _inside(place, length, border):
    """Where a place beyond the ends of a line lies in it."""
    if border == _NEAREST or length == 1:
        return min(max(place, 0), length - 1)
    place %= 2 * (length - border)
    return place if place < length else 2 * length - 1 - border - place


@njit(nogil=True)
def _gaussian(length, sigma, truncate, border):
    """The matrix by which a line is blurred."""
    matrix = np.zeros((length, length), np.float32)
    reach = int(truncate * sigma + 0.5)
    weights = np.ones(2 * reach + 1)
    for k in range(reach):
        weights[k] = weights[2 * reach - k] = math.exp(-0.5 * ((reach - k) / sigma) ** 2)
    weights /= weights.sum()
    for place in range(length):
        for k in range(weights.size):
            matrix[place, _inside(place + k - reach, length, border)] += np.float32(weights[k])
    return matrix


@njit(nogil=True)
def _zooming(length, factor):
    """The matrix by which the middle of a line is stretched over all of it: linear, from first to last pixel."""
    matrix = np.zeros((length, length), np.float32)
    middle = math.ceil(length / factor)
    longer = round(middle * factor)
    scale = (middle - 1) / (longer - 1) if longer > 1 else 0.0
    for place in range(length):
        position = (place + (longer - length) // 2) * scale
        low = int(position)
        first = (length - middle) // 2 + low
        part = position - low
        matrix[place, first] += np.float32(1 - part)
        matrix[place, min(first + 1, length - 1)] += np.float32(part)
    return matrix


@njit(nogil=True)
def _shrinking(length, fewer):
    """The matrix by which a line is averaged over fewer, equally long parts: a pixel counts if its centre is in a part."""
    matrix = np.zeros((fewer, length), np.float32)
    scale = length / fewer
    for place in range(fewer):
        begin, end = int(place * scale + 0.5), int((place + 1) * scale + 0.5)
        for k in range(begin, end):
            matrix[place, k] = np.float32(1 / (end - begin))
    return matrix


@njit(nogil=True)
def _turned(matrix, stack):
    """The product of a matrix and an array of rows x channels x columns, as columns x channels x rows: twice is both axes."""
    rows, channels, columns = matrix.shape[0], stack.shape[1], stack.shape[2]
    flat = stack.reshape(stack.shape[0], channels * columns)
    line = np.empty(channels * columns, np.float32)
    result = np.empty((columns, channels, rows), np.float32)
    for y in range(rows):
        line[:] = np.float32(0)
        for k in range(matrix.shape[1]):
            weight = matrix[y, k]
            if weight != 0:
                here = flat[k]
                for x in range(line.size):
                    line[x] += weight * here[x]
        for c in range(channels):
            for x in range(columns):
                result[x, c, y] = line[c * columns + x]
    return result


@njit(nogil=True)
def _stacked(planes):
    """Rows x channels x columns, as floats."""
    stack = np.empty((planes.shape[1], planes.shape[0], planes.shape[2]), np.float32)
    for c in range(planes.shape[0]):
        stack[:, c] = planes[c]
    return stack


@njit(nogil=True)
def _unstacked(stack, target):
    for c in range(target.shape[0]):
        for y in range(target.shape[1]):
            for x in range(target.shape[2]):
                target[c, y, x] = byte(stack[y, c, x] + _BARELY)


@njit(nogil=True)
def _zoom_blur(source, target, step, count):
    stack = _stacked(source)
    total = stack.copy()
    for place in range(count):
        matrix = _zooming(source.shape[1], 1 + place * step)
        total += _turned(matrix, _turned(matrix, stack))
    _unstacked(total / np.float32(count + 1), target)


@njit(nogil=True)
def _pixelate(source, target, share):
    size = source.shape[1]
    fewer = max(int(size * share), 1)
    matrix = _shrinking(size, fewer)
    columns = _stacked(source.transpose(0, 2, 1))  # first, as in Pillow; each pass rounds
    small = np.floor(_turned(matrix, np.floor(_turned(matrix, columns) + np.float32(0.5))) + np.float32(0.5))
    for c in range(target.shape[0]):
        for y in range(size):
            for x in range(size):
                target[c, y, x] = np.uint8(small[int((x + 0.5) * fewer / size), c, int((y + 0.5) * fewer / size)])


@njit(nogil=True)
def _convolve(source, target, kernel, border):
    """Every pixel becomes the sum of its neighbours, weighted by a square of odd side."""
    channels, height, width = source.shape
    reach = kernel.shape[0] // 2
    down, right = np.nonzero(kernel)
    padded = np.empty((height + 2 * reach, width + 2 * reach), np.float32)
    line = np.empty(width, np.float32)
    for c in range(channels):
        for x in range(padded.shape[1]):
            column = _inside(x - reach, width, border)
            for y in range(height):
                padded[reach + y, x] = source[c, y, column]
        for y in range(reach):
            padded[y] = padded[reach + _inside(y - reach, height, border)]
            padded[reach + height + y] = padded[reach + _inside(height + y, height, border)]
        for y in range(height):
            line[:] = _BARELY
            for tap in range(down.size):
                weight, here = kernel[down[tap], right[tap]], padded[y + down[tap], right[tap] :]
                for x in range(width):
                    line[x] += weight * here[x]
            for x in range(width):
                target[c, y, x] = byte(line[x])


@njit(nogil=True)
def _disk(radius, softness):
    """A disk that weighs 1, its rim softened by a Gaussian of 3 x 3 pixels, or 5 x 5 if it is large."""
    rim = 1 if radius <= 8 else 2
    reach = int(radius) + rim
    sharp = np.zeros((2 * reach + 1, 2 * reach + 1), np.float32)
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            sharp[reach + y, reach + x] = np.float32(y * y + x * x <= radius * radius)
    sharp /= sharp.sum()
    matrix = _gaussian(2 * reach + 1, softness, rim / softness, _TWICE)
    return _turned(matrix, _turned(matrix, sharp.reshape(sharp.shape[0], 1, sharp.shape[1])))[:, 0].copy()


@njit(nogil=True)
def _streak(radius, sigma, angle):
    """A line from the middle outwards, of pixels between which it is shared out, with the weights of one half of a Gaussian."""
    length = int(min(2 * radius, 4 * sigma) + 0.5)
    kernel = np.zeros((2 * length + 3, 2 * length + 3), np.float32)
    for place in range(length + 1):
        weight = math.exp(-0.5 * (place / sigma) ** 2)
        y, x = length + 1 + place * math.sin(angle), length + 1 + place * math.cos(angle)
        top, left = int(y), int(x)
        kernel[top, left] += np.float32(weight * (top + 1 - y) * (left + 1 - x))
        kernel[top, left + 1] += np.float32(weight * (top + 1 - y) * (x - left))
        kernel[top + 1, left] += np.float32(weight * (y - top) * (left + 1 - x))
        kernel[top + 1, left + 1] += np.float32(weight * (y - top) * (x - left))
    return kernel / kernel.sum()


@njit(nogil=True)
def _plasma(size, decay, draw):
    """Clouds from 0 to 1 by diamonds and squares on a torus, whose side is a power of two."""
    side = 2
    while side < size:
        side *= 2
    words = _words(draw, side * side)
    plane = np.zeros((side, side))
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        for round_ in range(2):  # centres of squares, then the middles of their edges
            for y in range(0, side, half):
                for x in range(0, side, half):
                    odd = (y // half) % 2 + (x // half) % 2
                    if odd != 2 - round_:
                        continue
                    up, down, left, right = (y - half) % side, (y + half) % side, (x - half) % side, (x + half) % side
                    if round_ == 0:
                        total = plane[up, left] + plane[up, right] + plane[down, left] + plane[down, right]
                    else:
                        total = plane[up, x] + plane[down, x] + plane[y, left] + plane[y, right]
                    share = np.float64(words[y * side + x] >> np.uint64(11)) * 2.0**-53
                    plane[y, x] = total / 4 + wobble * wobble * (2 * share - 1)
        step, wobble = half, wobble / decay
    plane -= plane.min()
    return plane / plane.max()


@njit(nogil=True)
def _fog(source, target, strength, decay, draw):
    top = source.max() / 255
    clouds = _plasma(source.shape[1], decay, draw)
    scale = top / (top + strength)
    for c in range(source.shape[0]):
        for y in range(source.shape[1]):
            for x in range(source.shape[2]):
                value = (source[c, y, x] + 255 * strength * clouds[y, x]) * scale
                target[c, y, x] = byte(np.float32(value) + _BARELY)


@njit(nogil=True)
def _brighten(old, new, amount):
    """A larger value in the sense of HSV; hue and saturation stay."""
    for i in range(old.shape[1]):
        value = np.float32(old[0, i])
        for c in range(1, old.shape[0]):
            value = max(value, np.float32(old[c, i]))
        brighter = min(value + np.float32(255 * amount), np.float32(255))
        for c in range(old.shape[0]):
            changed = np.float32(old[c, i]) * brighter / value if value > 0 else brighter
            new[c, i] = byte(changed + _BARELY)


@njit(nogil=True)
def _saturate(old, new, factor, offset):
    """Another saturation in the sense of HSV; gray counts as red of saturation 0, and one channel stays as it is."""
    if old.shape[0] != 3:
        new[:] = old
        return
    for i in range(old.shape[1]):
        top = np.float64(max(old[0, i], old[1, i], old[2, i]))
        saturation = (top - min(old[0, i], old[1, i], old[2, i])) / max(top, 1.0)
        wanted = min(max(saturation * factor + offset, 0.0), 1.0)
        for c in range(3):
            share = (top - old[c, i]) / saturation if saturation > 0 else (0.0 if c == 0 else top)
            new[c, i] = byte(np.float32(top - share * wanted) + _BARELY)


@njit(nogil=True)
def _fade(old, new, factor):
    """Towards the mean of each channel."""
    for c in range(old.shape[0]):
        mean = old[c].mean()
        for i in range(old.shape[1]):
            new[c, i] = byte(np.float32((old[c, i] - mean) * factor + mean) + _BARELY)


@njit(nogil=True)
def _elastic(source, target, strength, sigma, reach, draw):
    """A random affine map, then random shifts of each pixel, smoothed; one bilinear interpolation for both."""
    channels, height, width = source.shape
    shares = _shares(draw, 6 + 2 * height * width)
    corner = np.empty(6)  # shifts (x, y) of three corners of a square around the middle
    for k in range(6):
        corner[k] = reach * ((shares[k] + 0.5) / 32768 - 1)
    field = np.empty((height, 2, width), np.float32)
    flat = field.reshape(field.size)
    for k in range(flat.size):
        flat[k] = np.float32((shares[6 + k] + 0.5) / 32768 - 1)
    matrix = _gaussian(height, sigma, 3.0, _TWICE)
    field = _turned(matrix, _turned(matrix, field))
    middle, side = height // 2, max(2 * (height // 3), 1)
    # x' = x + shift of the corner (+, -) + slopes times the distances from it; inverted below
    down_x, down_y = (corner[0] - corner[2]) / side, (corner[1] - corner[3]) / side
    right_x, right_y = (corner[2] - corner[4]) / side, (corner[3] - corner[5]) / side
    far, near = middle + side / 2, middle - side / 2
    determinant = (1 + right_x) * (1 + down_y) - right_y * down_x
    for y in range(height):
        for x in range(width):
            moved_x = x + strength * field[y, 0, x] - far - corner[2]
            moved_y = y + strength * field[y, 1, x] - near - corner[3]
            from_x = far + ((1 + down_y) * moved_x - down_x * moved_y) / determinant
            from_y = near + ((1 + right_x) * moved_y - right_y * moved_x) / determinant
            left, top = math.floor(from_x), math.floor(from_y)
            part_x, part_y = from_x - left, from_y - top
            x0, x1 = _inside(left, width, _ONCE), _inside(left + 1, width, _ONCE)
            y0, y1 = _inside(top, height, _ONCE), _inside(top + 1, height, _ONCE)
            for c in range(channels):
                plane = source[c]
                above = plane[y0, x0] * (1 - part_x) + plane[y0, x1] * part_x
                below = plane[y1, x0] * (1 - part_x) + plane[y1, x1] * part_x
                target[c, y, x] = byte(np.float32(above * (1 - part_y) + below * part_y) + _BARELY)


@njit(nogil=True)
def _coded(plane, table, quality):
    """What a JPEG file of this quality leaves of a plane, whose sides are multiples of 8.

    Each one-dimensional transform is rounded to the whole numbers that libjpeg's holds, so that the same coefficients are kept.
    """
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    first, second, units = np.empty((8, 8)), np.empty((8, 8)), np.empty((8, 8))
    for u in range(8):
        for v in range(8):
            units[u, v] = min(max((table[u, v] * scale + 50) // 100, 1), 255)
    for top in range(0, plane.shape[0], 8):
        for left in range(0, plane.shape[1], 8):
            for y in range(8):
                for v in range(8):
                    total = 0.0
                    for x in range(8):
                        total += (plane[top + y, left + x] - 128) * _COSINES[v, x]
                    first[y, v] = math.floor(4 * total + 0.5)
            for u in range(8):
                for v in range(8):
                    total = 0.0
                    for y in range(8):
                        total += _COSINES[u, y] * first[y, v]
                    total = math.floor(total / 4 + 0.5)
                    unit = units[u, v]
                    second[u, v] = math.copysign(math.floor((abs(total) + 4 * unit) / (8 * unit)), total) * unit
            for y in range(8):
                for v in range(8):
                    total = 0.0
                    for u in range(8):
                        total += _COSINES[u, y] * second[u, v]
                    first[y, v] = math.floor(4 * total + 0.5)
            for y in range(8):
                for x in range(8):
                    total = 0.0
                    for v in range(8):
                        total += first[y, v] * _COSINES[v, x]
                    plane[top + y, left + x] = min(max(math.floor(total / 32 + 128.5), 0.0), 255.0)


@njit(nogil=True)
def _jpeg(source, target, quality):
    """Baseline JPEG as libjpeg writes and reads it by default: chroma of half the side, interpolated when it is read."""
    channels, size = source.shape[0], source.shape[1]
    padded = (size + 15) // 16 * 16
    luma, blue, red = np.empty((padded, padded)), np.empty((padded, padded)), np.empty((padded, padded))
    for y in range(padded):
        row = min(y, size - 1)
        for x in range(padded):
            column = min(x, size - 1)
            if channels == 1:
                luma[y, x] = source[0, row, column]
                continue
            r, g, b = float(source[0, row, column]), float(source[1, row, column]), float(source[2, row, column])
            luma[y, x] = math.floor(0.299 * r + 0.587 * g + 0.114 * b + 0.5)
            blue[y, x] = math.floor(128.499999 - 0.168735892 * r - 0.331264108 * g + 0.5 * b)
            red[y, x] = math.floor(128.499999 + 0.5 * r - 0.418687589 * g - 0.081312411 * b)
    _coded(luma, _LUMA, quality)
    if channels == 1:
        for y in range(size):
            for x in range(size):
                target[0, y, x] = np.uint8(luma[y, x])
        return
    half = padded // 2
    small = np.empty((2, half, half))
    for which in range(2):
        chroma = blue if which == 0 else red
        for y in range(half):
            for x in range(half):
                total = chroma[2 * y, 2 * x] + chroma[2 * y, 2 * x + 1]
                total += chroma[2 * y + 1, 2 * x] + chroma[2 * y + 1, 2 * x + 1]
                small[which, y, x] = math.floor((total + 1 + x % 2) / 4)
        _coded(small[which], _CHROMA, quality)
        last = (size + 1) // 2 - 1
        for y in range(size):
            near, far = y // 2, min(max(y // 2 + 2 * (y % 2) - 1, 0), last)
            for x in range(size):
                here, beside = x // 2, min(max(x // 2 + 2 * (x % 2) - 1, 0), last)
                total = 9 * small[which, near, here] + 3 * small[which, far, here]
                total += 3 * small[which, near, beside] + small[which, far, beside]
                chroma[y, x] = math.floor((total + 8 - x % 2) / 16) - 128
    for y in range(size):
        for x in range(size):
            u, v = blue[y, x], red[y, x]
            target[0, y, x] = byte(np.float32(luma[y, x] + math.floor(1.402 * v + 0.5)))
            target[1, y, x] = byte(np.float32(luma[y, x] + math.floor(0.5 - 0.344136286 * u - 0.714136286 * v)))
            target[2, y, x] = byte(np.float32(luma[y, x] + math.floor(1.772 * u + 0.5)))


@njit(nogil=True)
def corrupt(kind, source, target, values):
    """The corruption that a code names, into ``target``; False for any other code."""
    channels, pixels = source.shape[0], source.shape[1] * source.shape[2]
    old, new = source.reshape(channels, pixels), target.reshape(channels, pixels)
    if kind == code.NOISE or kind == code.IMPULSE or kind == code.SPECKLE:
        _noise(kind, old.reshape(old.size), new.reshape(new.size), values[0], values[3])
    elif kind == code.SHOT:
        _shot(old.reshape(old.size), new.reshape(new.size), values[0], values[3])
    elif kind == code.GAUSSIAN:
        matrix = _gaussian(source.shape[1], values[0], 4.0, _NEAREST)
        _unstacked(_turned(matrix, _turned(matrix, _stacked(source))), target)
    elif kind == code.DEFOCUS:
        _convolve(source, target, _disk(values[0], values[1]), _ONCE)
    elif kind == code.MOTION:
        _convolve(source, target, _streak(values[0], values[1], (values[3] - 0.5) * math.pi / 2), _NEAREST)
    elif kind == code.ZOOM:
        _zoom_blur(source, target, values[0], int(values[1]))
    elif kind == code.FOG:
        _fog(source, target, values[0], values[1], values[3])
    elif kind == code.BRIGHTEN:
        _brighten(old, new, values[0])
    elif kind == code.ADD:
        amount = np.float32(255 * values[0])
        for c in range(channels):
            for i in range(pixels):
                new[c, i] = byte(np.float32(old[c, i]) + amount)
    elif kind == code.FADE:
        _fade(old, new, values[0])
    elif kind == code.SATURATE:
        _saturate(old, new, values[0], values[1])
    elif kind == code.ELASTIC:
        _elastic(source, target, values[0], values[1], values[2], values[3])
    elif kind == code.PIXELATE:
        _pixelate(source, target, values[0])
    elif kind == code.JPEG:
        _jpeg(source, target, int(values[0]))
    else:
        return False
    return True
