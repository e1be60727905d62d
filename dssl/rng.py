"""Every random number of the program is a pure function of (seed, purpose, epoch, index, name).

There is no state to save or to restore: whoever asks for the same thing gets the same number, on any number of threads,
processes and machines, and from any start step.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, the increment of SplitMix64


def key(seed: int, *names: str | int) -> int:
    """A 64-bit key for one stream of numbers: ``key(seed, "view", epoch, "h1")``."""
    text = "\x1f".join([str(int(seed)), *(f"{type(name).__name__[0]}{name}" for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection of 64 bits in which every input bit flips half of the output bits."""
    shifted = values >> np.uint64(30)  # in place from here on: every batch draws about ten thousand numbers
    shifted ^= values
    shifted *= np.uint64(0xBF58476D1CE4E5B9)
    other = shifted >> np.uint64(27)
    shifted ^= other
    shifted *= np.uint64(0x94D049BB133111EB)
    np.right_shift(shifted, np.uint64(31), out=other)
    shifted ^= other
    return shifted


def bits(stream: int, index: NDArray[np.int64], slots: int) -> NDArray[np.uint64]:
    """``slots`` random 64-bit numbers for each index: an array of len(index) x slots."""
    counter = np.ascontiguousarray(index, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        rows = _mix(_mix(counter * _STEP + np.uint64(stream)) ^ np.uint64(stream))
        return _mix(rows[:, None] + np.arange(1, slots + 1, dtype=np.uint64) * _STEP)


def uniforms(stream: int, index: NDArray[np.int64], slots: int) -> NDArray[np.float64]:
    """Like ``bits``, as floats in [0, 1)."""
    drawn = bits(stream, index, slots)
    drawn >>= np.uint64(11)
    floats = drawn.astype(np.float64)
    floats *= 2.0**-53
    return floats


def permutation(stream: int, length: int) -> NDArray[np.int64]:
    """A random order of 0 .. length-1 that does not depend on the version of NumPy."""
    draws = bits(stream, np.arange(length, dtype=np.int64), 1)[:, 0]
    return np.argsort(draws, kind="stable").astype(np.int64)


def sample(stream: int, length: int, count: int) -> NDArray[np.int64]:
    """At most ``count`` of 0 .. length-1, without replacement, in ascending order."""
    return np.sort(permutation(stream, length)[:count])
