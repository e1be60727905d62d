"""Archives from elsewhere: only named members are read, into memory; nothing is unpacked, no path or link in them is followed."""

import gzip
import io
import tarfile
import zlib
from collections.abc import Container, Iterator
from pathlib import Path

LIMIT = 256_000_000
"""Bytes that an archive may unpack to; CIFAR-10 has 184 million, and a bomb of a few kilobytes any number."""


def read_members(
    archive: Path, wanted: Container[str], *, largest: int, limit: int = LIMIT
) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted regular files of a .tar.gz that have at most ``largest`` bytes.

    Raises ValueError for what is no whole archive, or one that unpacks to more than ``limit`` bytes, headers included.
    """
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=_Bounded(stream, limit), mode="r|") as members:
            for member in members:
                if member.name in wanted and member.isreg() and member.size <= largest:
                    content = members.extractfile(member)
                    yield member.name, content.read() if content is not None else b""
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(str(error)) from error


class _Bounded(io.RawIOBase):
    """A stream that ends in an error after so many bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self._stream, self._limit, self._seen = stream, limit, 0

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self._seen += len(content)
        if self._seen > self._limit:
            raise ValueError(f"it unpacks to more than {self._limit:,} bytes")
        return content
