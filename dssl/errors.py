"""A user's mistake, reported in one line: what was given, what was expected, what to do; and the checks of settings."""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DsslError(ValueError):
    """A mistake that the user can fix; the command line prints it without a traceback."""


class Stopped(Exception):
    """A training inside a larger job was stopped by a signal, after it had saved itself if it has a folder."""

    def __init__(self, signal: int, *, saved: bool = True) -> None:
        super().__init__(f"stopped by signal {signal}" + (" and saved; the same command resumes it" if saved else ""))
        self.signal = signal


def one_line(error: object, *, longest: int = 200) -> str:
    """What another library's error says, without line breaks, cut if it is too long; its kind if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]}..."


def choices(what: str, given: str, possible: Iterable[str]) -> DsslError:
    """The error for an unknown name: names the nearest one and lists all that exist."""
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DsslError(f"unknown {what} {given!r}: {hint}choose from {', '.join(names)}")


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Report in one line that memory did not suffice for ``what``, and what to do about it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # on a CPU torch raises a plain RuntimeError
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise DsslError(f"out of memory with {what}: {advice} ({one_line(error)})") from error


LARGEST = {"image_size": 4096, "epochs": 1_000_000, "threads": 1024, "head": 65_536, "queue": 1_000_000}
"""A larger value is a typing mistake, and the machine would fail with a worse message."""


def require(condition: bool, name: str, given: object, expected: str) -> None:
    if not condition:
        raise DsslError(f"{name} is {given}, expected {expected}")


def within(name: str, value: float | None, interval: str) -> None:
    """Refuse a number outside an interval such as ``[0, 1)``; None, a setting that is not given, is in all of them."""
    if value is None:
        return
    low, high = map(float, interval[1:-1].split(","))
    from_low, to_high = interval.startswith("["), interval.endswith("]")
    above = value >= low if from_low else value > low
    below = value <= high if to_high else value < high
    expected = f"{'at least' if from_low else 'above'} {low:g}"
    if math.isfinite(high):
        expected += f" and {'at most' if to_high else 'below'} {high:,.0f}"
    require(above and below, name, value, expected)
