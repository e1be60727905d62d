"""A user's mistake, said in one line: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class DsslError(ValueError):
    """Anything that the person at the keyboard can mend; the command line prints it without a traceback."""


class Stopped(Exception):
    """A training inside a larger job was stopped by a signal, after it had saved itself."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal} and saved; the same command resumes it")
        self.signal = signal


def choices(what: str, given: str, possible: Iterable[str]) -> DsslError:
    """The error for an unknown name: names the nearest one and lists all that exist."""
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DsslError(f"unknown {what} {given!r}: {hint}possible are {', '.join(names)}")


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Say in one line that the memory was not enough for ``what``, and what to do about it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has no class of its own for it on a CPU
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise DsslError(f"out of memory with {what}: {advice} ({' '.join(str(error).split())[:200]})") from error
