"""RandomResizedCrop and Pillow's antialiased bilinear resize in its own fixed-point arithmetic."""

import math

import numpy as np
from numba import njit

from dssl.augment.kernels import CROP_ATTEMPTS
from dssl.augment.kernels.vectors import BITS, HALF, pack, unpack, weigh

_SHIFT, _ROUND = np.int32(BITS), np.int32(HALF)


@njit(nogil=True)
def crop_box(height, width, values):
    """Top, left, height, width of a random crop, by torchvision's rule: ten attempts, then the centre."""
    low, high = values[0], values[1]
    log_ratio = math.log(4.0 / 3.0)
    area = height * width
    for attempt in range(CROP_ATTEMPTS):
        target = area * (low + (high - low) * values[2 + 2 * attempt])
        ratio = math.exp(-log_ratio + 2.0 * log_ratio * values[3 + 2 * attempt])
        w = round(math.sqrt(target * ratio))
        h = round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(values[2 + 2 * CROP_ATTEMPTS] * (height - h + 1))
            left = int(values[3 + 2 * CROP_ATTEMPTS] * (width - w + 1))
            return top, left, h, w
    w, h = width, height
    if width * 4 < height * 3:
        h = round(width / (3.0 / 4.0))
    elif width * 3 > height * 4:
        w = round(height * (4.0 / 3.0))
    h, w = max(1, min(h, height)), max(1, min(w, width))
    return (height - h) // 2, (width - w) // 2, h, w


@njit(nogil=True)
def _weights(length, size):
    """For each output index its first source index and number of taps, and their weights: taps x size, zero where unused.

    There are at least four weights, so that a loop over four rows never asks how many there are. The inner loops go over the
    indices, which lets LLVM use vectors.
    """
    scale = length / size
    stretch = max(scale, 1.0)
    most = max(math.ceil(stretch) * 2 + 1, 4)
    first, count = np.empty(size, np.int64), np.empty(size, np.int64)
    centre, total = np.empty(size, np.float64), np.zeros(size, np.float64)
    raw, weights = np.empty((most, size), np.float64), np.empty((most, size), np.int32)
    inverse = 1.0 / stretch
    for i in range(size):
        centre[i] = (i + 0.5) * scale
        first[i] = max(int(centre[i] - stretch + 0.5), 0)
        count[i] = min(int(centre[i] + stretch + 0.5), length) - first[i]
    for k in range(most):
        line = raw[k]
        for i in range(size):
            distance = abs((k + first[i] - centre[i] + 0.5) * inverse)
            weight = 1.0 - distance if (distance < 1.0) & (k < count[i]) else 0.0
            line[i] = weight
            total[i] += weight
    for k in range(most):
        line, whole = raw[k], weights[k]
        for i in range(size):
            whole[i] = np.int32(0.5 + line[i] / total[i] * (1 << BITS))
    return first, count, weights


# Places are unsigned, which spares numba the question whether they are negative, and lines are not slices: numba counts the
# references to a slice, which takes longer than a line of 224 bytes.


@njit(nogil=True)
def _weighed(words, first, weights, size, widest, resized):
    """All outputs of four rows. A number of taps that is known lets LLVM unroll the loop over them."""
    step = np.uint64(size)
    for x in range(step):
        start, place = np.uint64(16) * np.uint64(first[x]), np.uint64(16) * x
        if widest == 2:
            weigh(words, start, weights, x, step, np.uint64(2), resized, place)
        elif widest <= 4:
            weigh(words, start, weights, x, step, np.uint64(4), resized, place)
        else:
            weigh(words, start, weights, x, step, np.uint64(widest), resized, place)


@njit(nogil=True)
def _horizontal(image, top, left, height, width, size, new, row_step, plane_step):
    """Rows of an interleaved image, resized in width: row y of channel c goes to y * row_step + c * plane_step.

    Colour goes four rows at a time, each pixel a word of four bytes, so that one vector holds all its sums.
    """
    channels = image.shape[2]
    stride = image.shape[1] * channels
    corner = top * stride + left * channels
    old = image.reshape(image.size)
    first, count, taps = _weights(width, size)
    weights = taps.reshape(taps.size)
    if channels != 3 or width < 4 or size < 16:
        for y in range(height):
            for c in range(channels):
                for x in range(size):
                    start = corner + y * stride + first[x] * channels + c
                    total = np.int64(HALF)
                    for k in range(count[x]):
                        total += taps[k, x] * np.int64(old[start + k * channels])
                    new[y * row_step + c * plane_step + x] = np.uint8(total >> BITS)
        return
    # every output reads the same number of pixels, those past its own with weight zero: a branch on their number would
    # be guessed wrong too often
    widest = count.max()
    words = np.zeros((width + taps.shape[0]) * 16, np.uint8)
    resized = words if width == size else np.empty(size * 16, np.uint8)
    for y in range(0, height, 4):
        y1, y2, y3 = min(y + 1, height - 1), min(y + 2, height - 1), min(y + 3, height - 1)
        row0, row1 = np.uint64(corner + y * stride), np.uint64(corner + y1 * stride)
        row2, row3 = np.uint64(corner + y2 * stride), np.uint64(corner + y3 * stride)
        for part in range(0, width, 4):
            at = np.uint64(min(part, width - 4))  # the last four may be done twice
            place = np.uint64(3) * at
            pack(old, row0 + place, row1 + place, row2 + place, row3 + place, words, np.uint64(16) * at)
        if width != size:
            _weighed(words, first, weights, size, widest, resized)
        row0, row1 = np.uint64(y * row_step), np.uint64(y1 * row_step)
        row2, row3 = np.uint64(y2 * row_step), np.uint64(y3 * row_step)
        for part in range(0, size, 16):
            at = np.uint64(min(part, size - 16))
            unpack(resized, np.uint64(16) * at, new, row0 + at, row1 + at, row2 + at, row3 + at, np.uint64(plane_step))


@njit(nogil=True)
def _vertical(old, corner, stride, height, pieces, length, size, new, row_step, plane_step):
    """Rows of ``pieces`` x ``length`` bytes, resized in height: piece c of row y goes to y * row_step + c * plane_step.

    Every product and sum is cut to 32 bits, which is what lets LLVM use narrow vectors.
    """
    first, count, weights = _weights(height, size)
    sums = np.empty(length, np.int32)
    for y in range(size):
        taps = count[y]
        w0, w1, w2, w3 = weights[0, y], weights[1, y], weights[2, y], weights[3, y]
        for c in range(pieces):
            start, to = corner + first[y] * stride + c * length, np.uint64(y * row_step + c * plane_step)
            row0, row1 = np.uint64(start), np.uint64(start + min(1, taps - 1) * stride)
            row2, row3 = np.uint64(start + min(2, taps - 1) * stride), np.uint64(start + min(3, taps - 1) * stride)
            if taps <= 2:
                for x in range(np.uint64(length)):
                    value = np.int32(np.int32(w0 * np.int32(old[row0 + x])) + np.int32(w1 * np.int32(old[row1 + x])))
                    new[to + x] = np.uint8(np.int32(value + _ROUND) >> _SHIFT)
            elif taps <= 4:
                for x in range(np.uint64(length)):
                    value = np.int32(np.int32(w0 * np.int32(old[row0 + x])) + np.int32(w1 * np.int32(old[row1 + x])))
                    other = np.int32(np.int32(w2 * np.int32(old[row2 + x])) + np.int32(w3 * np.int32(old[row3 + x])))
                    new[to + x] = np.uint8(np.int32(np.int32(value + other) + _ROUND) >> _SHIFT)
            else:
                for x in range(np.uint64(length)):
                    sums[x] = _ROUND
                for k in range(taps):
                    weight, row = weights[k, y], np.uint64(start + k * stride)
                    for x in range(np.uint64(length)):
                        sums[x] = np.int32(sums[x] + np.int32(weight * np.int32(old[row + x])))
                for x in range(np.uint64(length)):
                    new[to + x] = np.uint8(sums[x] >> _SHIFT)


@njit(nogil=True)
def resized_crop(image, top, left, height, width, workspace, target):
    """A box of an interleaved image, resized into the square planes of ``target``."""
    channels, size = target.shape[0], target.shape[1]
    new = target.reshape(target.size)
    if height > size and height - size > 2 * (width - size):
        # Pillow's rule for the order of its two passes; each rounds to uint8, so the order shows in the result
        line, stride = width * channels, image.shape[1] * channels
        squeezed = workspace[: size * line].reshape(size, width, channels)
        corner = top * stride + left * channels
        _vertical(image.reshape(image.size), corner, stride, height, 1, line, size, workspace, line, 0)
        _horizontal(squeezed, 0, 0, size, width, size, new, size, size * size)
    elif height == size:
        _horizontal(image, top, left, height, width, size, new, size, size * size)
    else:
        line = channels * size
        _horizontal(image, top, left, height, width, size, workspace, line, size)
        _vertical(workspace, 0, line, height, channels, size, size, new, size, size * size)
