"""Where derived files live, and how they are written so that nobody ever sees half of one."""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path | None:
    """The user's cache folder for this program; None where there is no place for one (no home, for instance)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # noqa: PTH117 (the specification says that a relative value is to be ignored)
        return Path(base) / "dssl"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "dssl"
    return home / ".cache" / "dssl"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file in the same folder that becomes ``path`` at the end of the block; an error leaves no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # noqa: PTH101  # mkstemp makes private files
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file by a temporary one in the same folder: after a crash there is the old file or the new one, whole."""
    with replacing(path) as file:
        for part in parts:
            file.write(part)


def write_text(path: Path, text: str) -> None:
    """Write text atomically; a character that UTF-8 cannot hold, as in a file name in another encoding, becomes its escape."""
    write_atomically(path, [text.encode("utf-8", errors="backslashreplace")])


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def printable(text: str | bytes) -> str:
    """The text without line breaks, terminal escapes or invalid UTF-8: each such character as a Python escape."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
