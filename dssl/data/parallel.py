"""One function over many images, in threads, with the results in order and few of them in memory."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dssl.data.sources import thread_count

T = TypeVar("T")
_WINDOW = 256


def in_threads(function: Callable[[int], T], items: Sequence[int], *, threads: int | None = None) -> Iterator[T]:
    """``map(function, items)``, at most 256 items ahead; an error ends it at once."""
    with ThreadPoolExecutor(max_workers=thread_count(threads), thread_name_prefix="dssl-map") as pool:
        for begin in range(0, len(items), _WINDOW):
            yield from pool.map(function, items[begin : begin + _WINDOW])
