"""Where derived files live, and how files are written so that no reader ever sees half of one."""

import errno
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_logger = logging.getLogger("dssl")
_PARTIAL = ".part"
_READING_UMASK = threading.Lock()
"""The system tells the umask only when it is set: two threads at once could leave it at 0."""


def cache_folder() -> Path | None:
    """The user's cache folder for this program; None if there is no place for one (no home, for instance)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # noqa: PTH117 (the specification says that a relative value is to be ignored)
        return Path(base) / "dssl"
    try:
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dssl"
    except RuntimeError:
        return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file that takes the place of ``path`` at the end: after a crash there is the old file or the new one, complete.

    Everything in this program that replaces a file does it through this. A link keeps pointing to its file, which is replaced;
    a device or a pipe, such as /dev/stdout, is written into.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            yield temporary
            with temporary.open("rb") as content, path.open("wb") as device:
                shutil.copyfileobj(content, device)
        return
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        with _READING_UMASK:
            umask = os.umask(0)
            os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes private files, and so does safetensors
        os.replace(temporary, path)  # noqa: PTH105 (the only one of the program, by the name that people look for)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file in one go, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(part)


def write_text(path: Path, text: str) -> None:
    """Write text atomically; a character that UTF-8 cannot hold, as in a file name in another encoding, becomes its escape."""
    write_atomically(path, [text.encode("utf-8", errors="backslashreplace")])


def read_table(path: Path) -> dict[str, Any]:
    """The object in a JSON file of ours; empty if there is none, or it is damaged."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def is_partial(path: Path, *, of: str) -> bool:
    """Whether this is what a kill left of writing ``of``."""
    return path.name.startswith(f".{of}.") and path.suffix == _PARTIAL


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable, if its file system can (vboxsf and some of FUSE cannot)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def printable(text: str | bytes | Path) -> str:
    """The text without line breaks, terminal escapes or invalid UTF-8: each such character as a Python escape."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


@contextmanager
def first_alone(folder: str | None, *, kept: str) -> Iterator[None]:
    """Let one process at a time fill numba's cache if no file in it is named like ``kept``: the next ones find its result.

    Otherwise every process of a node would compile the same kernels at its first start, and all of them share its cores.
    """
    with ExitStack() as stack:
        if folder is not None and not any(Path(folder).glob(kept)):
            # a folder that cannot be written, or a disk without locks: each compiles for itself
            with suppress(OSError):
                Path(folder).mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(Path(folder, "compiling.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def forget_kernels(folder: str | None, *, module: str) -> None:
    """Delete numba's cache of a module's kernels, which a full disk or a power cut left incomplete."""
    if folder is None:
        return
    _logger.warning("the compiled kernels in %s are damaged and will be rebuilt", folder)
    for path in Path(folder).glob(f"{module}.*.nb[ci]"):
        with suppress(OSError):
            path.unlink()
