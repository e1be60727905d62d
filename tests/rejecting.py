"""Assert what an error states, and not how it is worded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dssl.errors import DsslError


def states(text: str, *facts: object) -> None:
    """Fails unless the text has each fact: a path, a value, an option, a name.

    A fact counts only where it stands alone: 0 is not found in 10, nor h1 in h12.
    """
    for fact in facts:
        assert re.search(rf"(?<![\w.]){re.escape(str(fact))}(?!\w)", text), f"{fact!r} is not in {text!r}"


@contextmanager
def rejects(*facts: object, error: type[Exception] = DsslError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Fails unless the block raises an error of one line that states each fact."""
    with pytest.raises(error) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    states(str(caught.value), *facts)
