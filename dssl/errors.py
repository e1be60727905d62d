"""A user's mistake, said in one line: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable


class DsslError(ValueError):
    """Anything that the person at the keyboard can mend; the command line prints it without a traceback."""


def choices(what: str, given: str, possible: Iterable[str]) -> DsslError:
    """The error for an unknown name: names the nearest one and lists all that exist."""
    names = sorted(possible)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DsslError(f"unknown {what} {given!r}: {hint}possible are {', '.join(names)}")
