"""Images in tar shards, as WebDataset writes them: indexed by their headers, read in place, each with one ``pread``.

The standard library's tarfile parses the headers, one at a time: what is damaged or missing is named, and the search goes on
behind it.
"""

from __future__ import annotations

import functools
import io
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import check_length, open_regular
from dssl.data.index import Container, endings_of, kind_option
from dssl.data.scale import Range
from dssl.data.shards import Found, Recent, Shards, check_unchanged
from dssl.errors import DsslError
from dssl.files import printable

_OPEN = 128  # shards whose descriptors are kept; a process may have a thousand
_LABEL_BYTES = 1 << 20
_LABEL_KEYS = ("class", "label", "cls")  # of a .json member, the first that is there
_UNUSABLE = {
    tarfile.LNKTYPE: "a hard link, which is not followed",
    tarfile.SYMTYPE: "a symbolic link, which is not followed",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a FIFO",
}


class Tar(Shards):
    """The images in tar files, in the order of the files and of their members."""

    def __init__(self, shards: Found, *, channels: int = 3, value_range: Range | None = None) -> None:
        if shards.columns:
            raise DsslError(f"{shards.name}#{shards.columns}: tar files have no columns; only Parquet files do")
        photos = value_range is None
        scan = functools.partial(_scan, endings=endings_of(photos=photos))
        version = (*kind_option(photos=photos), b"stems")  # the index of an earlier version may have other labels
        super().__init__(shards, scan, version=version, sized=True, channels=channels, value_range=value_range)
        count = len(shards.paths)
        self.name = f"{shards.name} ({len(self.index):,} images in {count:,} shard{'s' if count != 1 else ''})"
        self.shards = np.searchsorted(self.index.records["container"], np.arange(count + 1))
        index = self.index
        self._files: Recent[int, _File] = Recent(lambda shard: _File(index.container(shard)), keep=_OPEN)

    def content(self, index: int) -> bytearray:
        record = self.index.records[index]
        size = int(record["size"])
        check_length(size)
        content = bytearray(size)
        file = self._file(int(record["container"]))
        if os.preadv(file.descriptor, [content], int(record["offset"])) < size:
            raise ValueError("the shard ends within it")
        return content

    def read_ahead(self, shards: NDArray[np.int64]) -> None:
        """Have the system read whole shards, in sequence, before their images are asked for."""
        if hasattr(os, "posix_fadvise"):
            for shard in shards.tolist():
                with suppress(OSError, ValueError):  # who needs an image of it will say what is wrong
                    os.posix_fadvise(self._file(shard).descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def _file(self, shard: int) -> _File:
        """A shard, open; one that has changed since it was indexed is an error."""
        file = self._files.at(shard)
        check_unchanged(os.fstat(file.descriptor), self.index, shard)
        return file


class _File:
    """An open shard, closed when nobody reads from it any more."""

    def __init__(self, path: bytes) -> None:
        self.descriptor, _ = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _scan(path: bytes, *, endings: frozenset[bytes]) -> Container:
    """The images of one shard and their labels, whichever come first."""
    try:
        descriptor, size = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            shard = Container(time=os.fstat(descriptor).st_mtime_ns, length=size)
            labels: dict[bytes, dict[bytes, bytes]] = {b"cls": {}, b"json": {}}
            stems: list[bytes] = []
            for member, problem in _members(file, path=path, size=size):
                name = member.name.encode("utf-8", "surrogateescape").removeprefix(b"./")
                folder, _, last = name.rpartition(b"/")
                stem, dot, ending = last.rpartition(b".")
                stem, ending = folder + b"/" + (stem if dot else last), ending.lower() if dot else b""
                if last.startswith(b"."):
                    continue
                if ending in labels and problem is None:
                    label = _label(descriptor, member, is_text=ending == b"cls")
                    if label is not None and labels[ending].setdefault(stem, label) != label:
                        raise DsslError(f"{printable(path)}: two members {printable(name)} with different labels")
                elif ending in endings or (problem is not None and not ending):
                    if name.startswith(b"/") or b".." in folder.split(b"/"):
                        problem = "its name leads out of the archive"
                    if problem is not None:
                        shard.skipped.append((name, problem))
                        continue
                    shard.names.append(name)
                    shard.offsets.append(member.offset_data)
                    shard.sizes.append(member.size)
                    stems.append(stem)
                else:
                    shard.ignored += 1
    except OSError as error:
        raise DsslError(f"{printable(path)}: {error.strerror}; expected a tar file") from error
    shard.labels = _labels_of(stems, labels[b"cls"] | labels[b"json"], path)
    return shard


def _labels_of(stems: list[bytes], labels: dict[bytes, bytes], path: bytes) -> list[bytes | None]:
    """The label of each image, by the longest stem: of ``a.b.png`` that in ``a.b.cls``, or else in ``a.cls``.

    Failing both, it is the one below the key ``a`` that belongs to no other image, as in ``a.label.cls``.
    """
    others: dict[bytes, set[bytes]] = {}
    for stem in labels.keys() - set(stems):
        others.setdefault(_key(stem), set()).add(labels[stem])
    matched: list[bytes | None] = []
    for stem in stems:
        key, label = _key(stem), labels.get(stem)
        while label is None and len(stem) > len(key):
            stem = stem[: stem.rindex(b".")]
            label = labels.get(stem)
        if label is None and key in others:
            if len(others[key]) > 1:
                raise DsslError(
                    f"{printable(path)}: several labels for {printable(key.removeprefix(b'/'))}; expected one"
                )
            (label,) = others[key]
        matched.append(label)
    return matched


def _key(stem: bytes) -> bytes:
    """What the members of one sample share: the path up to the first dot of its last part."""
    folder, slash, last = stem.rpartition(b"/")
    return folder + slash + last.partition(b".")[0]


def _label(descriptor: int, member: tarfile.TarInfo, *, is_text: bool) -> bytes | None:
    """The label in a .cls or .json member; None where it holds none."""
    if member.size > _LABEL_BYTES:
        return None
    content = os.pread(descriptor, member.size, member.offset_data)
    if is_text:
        return content.strip() or None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return None
    value = next((record[key] for key in _LABEL_KEYS if key in record), None) if isinstance(record, dict) else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        return None
    return str(value).encode(errors="backslashreplace")  # JSON may hold half a surrogate


class _Headers(tarfile.TarFile):
    """A tar whose headers are read by whoever opens it."""

    def next(self) -> None:
        """Nothing: the constructor calls it, and would fail for a damaged first header."""


def _members(file: io.BufferedReader, *, path: bytes, size: int) -> Iterator[tuple[tarfile.TarInfo, str | None]]:
    """Every member but folders, and the reason why its bytes cannot be used; damage is a member whose name says where."""
    if size == 0:
        raise DsslError(f"{printable(path)}: the file is empty; expected a tar file")
    start = file.peek(tarfile.BLOCKSIZE)
    headers = _Headers(fileobj=file, encoding="utf-8")
    place, ended = 0, False
    damage: int | None = None  # where it begins
    while place < size:
        file.seek(place)
        try:
            member = tarfile.TarInfo.fromtarfile(headers)
            stated = member.pax_headers.get("size", str(member.size))
            if member.size < 0 or headers.offset <= place or stated != str(member.size):
                raise ValueError("a size that no member can have")  # tarfile would read the same header for ever
        except OSError:
            raise
        except Exception:  # a damaged header fails in any way
            if damage is None and not ended:
                file.seek(place)
                ended = file.read(tarfile.BLOCKSIZE) == bytes(
                    tarfile.BLOCKSIZE
                )  # unless a hole or a second archive follows
                damage = None if ended else place
            place += tarfile.BLOCKSIZE
            continue
        if damage is not None:
            yield tarfile.TarInfo(f"byte {damage}"), f"damaged header: {place - damage:,} bytes are lost"
        place, ended, damage = headers.offset, False, None
        problem = _UNUSABLE.get(member.type)
        if member.issparse():
            problem = "a sparse file: pack it again with `tar` and without --sparse"
        elif member.isreg() and member.offset_data + member.size > size:
            problem, ended = "the shard is truncated within it", True  # one line is enough
        if problem is not None or member.isreg():
            yield member, problem
    if damage == 0 and start[257:262] != b"ustar":
        raise DsslError(f"{printable(path)}: not a tar file; expected one, and not compressed")
    if damage is not None:
        yield tarfile.TarInfo(f"byte {damage}"), "damaged header: the rest of the shard is lost"
    elif not ended:
        yield tarfile.TarInfo(f"byte {size}"), "the shard has no end mark: images may be missing behind its last"
