"""RandomResizedCrop and Pillow's antialiased bilinear resize in its own fixed-point arithmetic."""

import math

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it has none
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dssl.augment.kernels import CROP_ATTEMPTS
from dssl.augment.kernels.geometry import copy

_BITS = 22  # Pillow keeps 32 - 8 - 2 bits of a weight
_HALF = 1 << (_BITS - 1)


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
    """One row per output index: first source index, number of taps, then the weights, zero where unused.

    There are at least four weights, so that a loop over four rows never asks how many there are.
    """
    scale = length / size
    stretch = max(scale, 1.0)
    most = max(math.ceil(stretch) * 2 + 1, 4)
    taps = np.zeros((size, 2 + most), np.int32)
    raw = np.empty(most, np.float64)
    inverse = 1.0 / stretch
    for i in range(size):
        centre = (i + 0.5) * scale
        start = max(int(centre - stretch + 0.5), 0)
        stop = min(int(centre + stretch + 0.5), length)
        row = taps[i]
        total = 0.0
        for k in range(stop - start):
            distance = abs((k + start - centre + 0.5) * inverse)
            weight = 1.0 - distance if distance < 1.0 else 0.0
            raw[k] = weight
            total += weight
        weights = row[2:]
        for k in range(stop - start):
            weights[k] = int(0.5 + raw[k] / total * (1 << _BITS))
        row[0] = start
        row[1] = stop - start
    return taps


@intrinsic
def _weigh(typing_context, words, start, weights, begin, count, out, place):
    """Sixteen bytes at once: out[place] = the weighted sum of ``count`` groups of four words, as bytes.

    LLVM does not find this by itself, so the vectors are written out. It turns them into what the processor has.
    """
    signature = types.void(words, types.uint64, weights, types.uint64, types.uint64, out, types.uint64)

    def generate(context, builder, signature, arguments):
        start, begin, count, place = arguments[1], arguments[3], arguments[4], arguments[6]
        words, weights, out = (
            context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 2, 5)
        )
        word, index = ir.IntType(32), ir.IntType(64)
        sums, pixels = ir.VectorType(word, 16), ir.VectorType(ir.IntType(8), 16)
        undefined, four = ir.Constant(sums, ir.Undefined), ir.Constant(index, 4)
        total = cgutils.alloca_once_value(builder, ir.Constant(sums, [_HALF] * 16))
        with cgutils.for_range(builder, count, intp=index) as loop:
            offset = builder.mul(builder.add(start, loop.index), four)
            source = builder.bitcast(builder.gep(words, [offset]), pixels.as_pointer())
            values = builder.zext(builder.load(source, align=4), sums)
            weight = builder.load(builder.gep(weights, [builder.add(begin, loop.index)]))
            first = builder.insert_element(undefined, weight, ir.Constant(word, 0))
            everywhere = builder.shuffle_vector(first, undefined, ir.Constant(sums, [0] * 16))
            builder.store(builder.add(builder.load(total), builder.mul(values, everywhere)), total)
        result = builder.trunc(builder.lshr(builder.load(total), ir.Constant(sums, [_BITS] * 16)), pixels)
        target = builder.bitcast(builder.gep(out, [builder.mul(place, four)]), pixels.as_pointer())
        builder.store(result, target, align=4)
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True)
def _word(pixel):
    """Red, green and blue in the bytes of one 32-bit word."""
    green, blue = np.uint32(pixel[1]) << np.uint32(8), np.uint32(pixel[2]) << np.uint32(16)
    return np.uint32(np.uint32(pixel[0]) | np.uint32(green) | np.uint32(blue))


@njit(nogil=True)
def _pack(row0, row1, row2, row3, words):
    """Four rows of pixels, interleaved word by word."""
    for x in range(row0.shape[0]):
        words[x, 0] = _word(row0[x])
        words[x, 1] = _word(row1[x])
        words[x, 2] = _word(row2[x])
        words[x, 3] = _word(row3[x])


@njit(nogil=True)
def _unpack(words, which, planes):
    """One of the four rows, as channels x size."""
    red, green, blue = planes[0], planes[1], planes[2]
    for x in range(red.size):
        value = words[x, which]
        red[x] = np.uint8(value)
        green[x] = np.uint8(value >> np.uint32(8))
        blue[x] = np.uint8(value >> np.uint32(16))


@njit(nogil=True)
def _horizontal(image, top, left, height, width, target):
    """Rows of an interleaved image, resized in width, into rows of ``target``: height x channels x size.

    Colour goes four rows at a time, each pixel a word of four bytes, so that one vector holds all its sums.
    """
    channels, size = target.shape[1], target.shape[2]
    if width == size:
        for y in range(height):
            row = image[top + y, left : left + width]
            for c in range(channels):
                new = target[y, c]
                for x in range(size):
                    new[x] = row[x, c]
        return
    taps = _weights(width, size)
    if channels != 3:
        for y in range(height):
            for c in range(channels):
                row, new = image[top + y, left : left + width, c], target[y, c]
                for x in range(size):
                    line, start = taps[x, 2:], np.uint64(taps[x, 0])
                    total = np.int64(_HALF)
                    for k in range(taps[x, 1]):
                        total += line[k] * np.int64(row[start + np.uint64(k)])
                    new[x] = np.uint8(total >> _BITS)
        return
    # every output reads the same number of pixels, those past its own with weight zero: a branch on their number would
    # be guessed wrong too often. Unsigned indices spare numba the question whether they are negative.
    widest = taps[:, 1].max()
    columns = np.uint64(taps.shape[1])
    weights = taps.reshape(taps.size)
    words = np.zeros((width + taps.shape[1], 4), np.uint32)
    out = np.empty((size, 4), np.uint32)
    flat_words, flat_out = words.reshape(words.size), out.reshape(out.size)
    for y in range(0, height, 4):
        y1, y2, y3 = min(y + 1, height - 1), min(y + 2, height - 1), min(y + 3, height - 1)
        box = image[:, left : left + width]
        _pack(box[top + y], box[top + y1], box[top + y2], box[top + y3], words)
        for x in range(np.uint64(size)):
            begin = x * columns
            start = np.uint64(weights[begin])
            _weigh(flat_words, start, weights, begin + np.uint64(2), np.uint64(widest), flat_out, x)
        _unpack(out, 0, target[y])
        _unpack(out, 1, target[y1])
        _unpack(out, 2, target[y2])
        _unpack(out, 3, target[y3])


@njit(nogil=True)
def _vertical_row(rows, row, sums, out):
    """One output row; every product and sum is cut to 32 bits, which is what lets LLVM use narrow vectors."""
    length, last = out.size, rows.shape[0] - 1
    first, count = np.int64(row[0]), row[1]
    w0, w1, w2, w3 = row[2], row[3], row[4], row[5]
    row0, row1 = rows[first], rows[min(first + 1, last)]
    if count <= 2:
        for x in range(length):
            value = np.int32(np.int32(w0 * np.int32(row0[x])) + np.int32(w1 * np.int32(row1[x])))
            out[x] = np.uint8(np.int32(value + np.int32(_HALF)) >> _BITS)
        return
    row2, row3 = rows[min(first + 2, last)], rows[min(first + 3, last)]
    if count <= 4:
        for x in range(length):
            value = np.int32(np.int32(w0 * np.int32(row0[x])) + np.int32(w1 * np.int32(row1[x])))
            other = np.int32(np.int32(w2 * np.int32(row2[x])) + np.int32(w3 * np.int32(row3[x])))
            out[x] = np.uint8(np.int32(np.int32(value + other) + np.int32(_HALF)) >> _BITS)
        return
    sums[:length] = _HALF
    for k in range(count):
        weight, here = row[2 + k], rows[first + k]
        for x in range(length):
            sums[x] = np.int32(sums[x] + np.int32(weight * np.int32(here[x])))
    for x in range(length):
        out[x] = np.uint8(sums[x] >> _BITS)


@njit(nogil=True)
def resized_crop(image, top, left, height, width, workspace, target):
    """A box of an interleaved image, resized into the square planes of ``target``."""
    channels, size = target.shape[0], target.shape[1]
    length = max(size, width) * channels
    sums = np.empty(length, np.int32)
    line = np.empty(length, np.uint8)
    if height > size and height - size > 2 * (width - size):
        # Pillow's rule for the order of its two passes; each rounds to uint8, so the order shows in the result
        taps = _weights(height, size)
        squeezed = workspace[: size * width * channels].reshape(size, width, channels)
        rows = image[top : top + height].reshape(height, image.shape[1] * channels)
        part = rows[:, left * channels : (left + width) * channels]
        for y in range(size):
            _vertical_row(part, taps[y], sums, squeezed[y].reshape(width * channels))
        wide = np.empty((size, channels, size), np.uint8)
        _horizontal(squeezed, 0, 0, size, width, wide)
        for y in range(size):
            for c in range(channels):
                copy(wide[y, c], target[c, y])
        return
    narrow = workspace[: height * channels * size].reshape(height, channels, size)
    _horizontal(image, top, left, height, width, narrow)
    if height == size:
        for y in range(size):
            for c in range(channels):
                copy(narrow[y, c], target[c, y])
        return
    taps = _weights(height, size)
    rows = narrow.reshape(height, channels * size)
    out = line[: channels * size]
    for y in range(size):
        _vertical_row(rows, taps[y], sums, out)
        for c in range(channels):
            copy(out[c * size :], target[c, y])
