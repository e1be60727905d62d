"""Custom operations: a numba kernel on planes, or any function on a uint8 array."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl.augment.kernels import codes as code
from dssl.augment.operations import OPERATIONS, Floats, Operation
from dssl.augment.policy import RESERVED
from dssl.errors import DsslError

Planes = NDArray[np.uint8]
Runner = Callable[[Planes, Planes, float, float, float], None]

_runners: list[Runner] = []


def _add(name: str, runner: Runner, *, low: float, high: float, default: float | None, unit: str) -> None:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise DsslError(f"operation name {name!r}: expected letters, digits, '-' and '_', starting with a letter")
    if name in OPERATIONS or name in RESERVED:
        raise DsslError(f"an operation or policy named {name!r} already exists; choose another name")
    number = len(_runners)
    OPERATIONS[name] = Operation(name, code.CUSTOM, code.NUMBERED, unit, low, high, default=default, number=number)
    _runners.append(runner)


def add_kernel(name: str, kernel: Any, *, low: float, high: float, unit: str = "value") -> None:
    """Makes ``kernel(source, target, value, draw, other_draw)`` a policy: ``name(value)``.

    ``source`` and ``target`` are uint8, channels x height x width, C-contiguous; the kernel fills the target. The draws
    are random numbers in [0, 1), the same whenever this image, epoch, view and seed meet again. Compile it with
    ``numba.njit(nogil=True, cache=True)`` so that threads run it side by side.
    """
    if not low <= high:
        raise DsslError(f"the values of operation {name!r} run from {low:g} to {high:g}; the first must be the smaller")
    _add(name, kernel, low=low, high=high, default=None, unit=unit)


def add_function(name: str, function: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> None:
    """Makes any function from image to image (uint8, height x width x channels) a policy: ``name``.

    It is called by several threads at once. What it draws by itself is not repeated with the seed.
    """

    def runner(source: Planes, target: Planes, value: float, draw: float, other_draw: float) -> None:
        image = np.ascontiguousarray(source.transpose(1, 2, 0))
        result = np.asarray(function(image))
        if result.dtype != np.uint8 or result.shape != image.shape:
            raise DsslError(
                f"operation {name!r} returned {result.dtype} of shape {result.shape}; "
                f"it must return uint8 of shape {image.shape}"
            )
        target[:] = result.transpose(2, 0, 1)

    _add(name, runner, low=0, high=0, default=0, unit="")


def run_custom(numbers: Floats, source: Planes, target: Planes) -> None:
    """Run the operation that the numbers of a plan select."""
    runner = _runners[int(numbers[0])]
    runner(source, target, float(numbers[1]), float(numbers[2]), float(numbers[3]))
