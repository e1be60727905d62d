"""What numba keeps of compiled kernels between starts."""

import logging
from contextlib import suppress
from pathlib import Path

_logger = logging.getLogger("dssl")


def forget(folder: str | None, *, module: str) -> None:
    """Delete what numba kept of a module's kernels: a full disk or a power cut left half of it."""
    if folder is None:
        return
    _logger.warning("the compiled kernels in %s are damaged and are made anew", folder)
    for path in Path(folder).glob(f"{module}.*.nb[ci]"):
        with suppress(OSError):
            path.unlink()
