"""What numba caches of compiled kernels between starts."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_logger = logging.getLogger("dssl")


@contextmanager
def first_alone(folder: str | None, *, kept: str) -> Iterator[None]:
    """Let one process at a time fill a cache in which no file is named like ``kept``: the processes after it find its result.

    Otherwise every process of a node would compile the same kernels at its first start, and all of them share its cores.
    """
    with ExitStack() as stack:
        if folder is not None and not any(Path(folder).glob(kept)):
            with suppress(
                OSError
            ):  # a folder that cannot be written, or a disk without locks: each compiles for itself
                Path(folder).mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(Path(folder, "compiling.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def forget(folder: str | None, *, module: str) -> None:
    """Delete what numba cached of a module's kernels: a full disk or a power cut has damaged it."""
    if folder is None:
        return
    _logger.warning("the compiled kernels in %s are damaged and will be rebuilt", folder)
    for path in Path(folder).glob(f"{module}.*.nb[ci]"):
        with suppress(OSError):
            path.unlink()
