"""What LLVM does not find by itself, written out as vectors of bytes; it turns them into what the processor has.

All arrays are one-dimensional, all places count their elements, and nobody checks them.
"""

from collections.abc import Iterable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has none
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BITS = 22  # of a weight: Pillow keeps 32 - 8 - 2
HALF = 1 << (BITS - 1)
_BYTE, _WORD, _INDEX = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_PLACE = types.uint64


def _load(builder: Any, data: Any, place: Any, count: int) -> Any:
    """So many bytes."""
    pointer = builder.bitcast(builder.gep(data, [place]), ir.VectorType(_BYTE, count).as_pointer())
    return builder.load(pointer, align=1)


def _store(builder: Any, vector: Any, data: Any, place: Any) -> None:
    pointer = builder.bitcast(builder.gep(data, [place]), vector.type.as_pointer())
    builder.store(vector, pointer, align=1)


def _shuffle(builder: Any, one: Any, other: Any, order: Iterable[int]) -> Any:
    """Elements of two vectors, of which the second continues the numbers of the first."""
    places = list(order)
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_WORD, len(places)), places))


def _data(context: Any, builder: Any, signature: Any, arguments: Any, *numbers: int) -> list[Any]:
    return [context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in numbers]


@intrinsic
def pack(typing_context, image, first, second, third, fourth, words, place):
    """Four pixels of four rows of colour, each pixel a word (whose last byte means nothing), side by side."""
    signature = types.void(image, *(_PLACE,) * 4, words, _PLACE)

    def generate(context, builder, signature, arguments):
        image, words = _data(context, builder, signature, arguments, 0, 5)
        rows = [_load(builder, image, start, 12) for start in arguments[1:5]]
        upper, lower = (_shuffle(builder, rows[k], rows[k + 1], range(24)) for k in (0, 2))
        order = [12 * row + 3 * x + min(c, 2) for x in range(4) for row in range(4) for c in range(4)]
        _store(builder, _shuffle(builder, upper, lower, order), words, arguments[6])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def weigh(typing_context, words, start, weights, begin, step, count, out, place):
    """Sixteen bytes at once: the weighted sum of ``count`` groups of four words; a weight follows the last by ``step``."""
    signature = types.void(words, _PLACE, weights, _PLACE, _PLACE, _PLACE, out, _PLACE)

    def generate(context, builder, signature, arguments):
        words, weights, out = _data(context, builder, signature, arguments, 0, 2, 6)
        start, begin, step, count, place = (arguments[k] for k in (1, 3, 4, 5, 7))
        sums = ir.VectorType(_WORD, 16)
        undefined = ir.Constant(sums, ir.Undefined)
        total = cgutils.alloca_once_value(builder, ir.Constant(sums, [HALF] * 16))
        with cgutils.for_range(builder, count, intp=_INDEX) as loop:
            offset = builder.add(start, builder.mul(loop.index, ir.Constant(_INDEX, 16)))
            values = builder.zext(_load(builder, words, offset, 16), sums)
            weight = builder.load(builder.gep(weights, [builder.add(begin, builder.mul(loop.index, step))]))
            first = builder.insert_element(undefined, weight, ir.Constant(_WORD, 0))
            everywhere = _shuffle(builder, first, undefined, [0] * 16)
            builder.store(builder.add(builder.load(total), builder.mul(values, everywhere)), total)
        shifted = builder.lshr(builder.load(total), ir.Constant(sums, [BITS] * 16))
        _store(builder, builder.trunc(shifted, ir.VectorType(_BYTE, 16)), out, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def unpack(typing_context, words, place, planes, first, second, third, fourth, step):
    """The reverse of ``pack``, for sixteen pixels: four places for red; green and blue follow by ``step`` each."""
    signature = types.void(words, _PLACE, planes, *(_PLACE,) * 5)

    def generate(context, builder, signature, arguments):
        words, planes = _data(context, builder, signature, arguments, 0, 2)
        # four pixels are 4 x 16 bytes; transposed, a word has one channel of one row
        order = [16 * x + channel for channel in range(16) for x in range(4)]
        fours = []
        for k in range(4):
            start = builder.add(arguments[1], ir.Constant(_INDEX, 64 * k))
            pixels = _load(builder, words, start, 64)
            transposed = _shuffle(builder, pixels, pixels, order)
            fours.append(builder.bitcast(transposed, ir.VectorType(_WORD, 16)))
        eights = [zipped for k in (0, 2) for zipped in _zipped(builder, fours[k], fours[k + 1])]
        wide = [builder.bitcast(vector, ir.VectorType(_INDEX, 8)) for vector in eights]
        rows = [zipped for k in (0, 1) for zipped in _zipped(builder, wide[k], wide[k + 2])]
        for row, start in zip(rows, arguments[3:7], strict=True):
            values = builder.bitcast(row, ir.VectorType(_BYTE, 64))
            for channel in range(3):
                part = _shuffle(builder, values, values, range(16 * channel, 16 * channel + 16))
                _store(
                    builder, part, planes, builder.add(start, builder.mul(arguments[7], ir.Constant(_INDEX, channel)))
                )
        return context.get_dummy_value()

    return signature, generate


def _zipped(builder: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """The elements of two vectors in turn, as two vectors."""
    count = one.type.count
    order = [place for k in range(count) for place in (k, count + k)]
    return _shuffle(builder, one, other, order[:count]), _shuffle(builder, one, other, order[count:])


@intrinsic
def interleave(typing_context, planes, red, green, blue, out, place):
    """Sixteen pixels of three planes, pixel by pixel."""
    signature = types.void(planes, _PLACE, _PLACE, _PLACE, out, _PLACE)

    def generate(context, builder, signature, arguments):
        planes, out = _data(context, builder, signature, arguments, 0, 4)
        red, green, blue = (_load(builder, planes, start, 16) for start in arguments[1:4])
        both, third = _shuffle(builder, red, green, range(32)), _shuffle(builder, blue, blue, range(32))
        order = [16 * channel + x for x in range(16) for channel in range(3)]
        _store(builder, _shuffle(builder, both, third, order), out, arguments[5])
        return context.get_dummy_value()

    return signature, generate
