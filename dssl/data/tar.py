"""Images in tar shards, as WebDataset writes them: indexed by their headers, read in place, each with one ``pread``.

POSIX, GNU and old tars are read, also if parts of one are damaged or missing. The standard library's tarfile takes six times as
long, does not say what is lost, and, in Python 3.11, never ends for a member of negative size.
"""

from __future__ import annotations

import functools
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import check_length, open_regular
from dssl.data.index import endings_of, kind_option
from dssl.data.scale import Range
from dssl.data.shards import COMPRESSED, Found, Recent, Scanned, Shards, check_unchanged
from dssl.errors import DsslError
from dssl.files import printable

_OPEN = 128  # shards whose descriptors are kept; a process may have a thousand
_LABEL_BYTES = 1 << 20
_LABEL_KEYS = ("class", "label", "cls")  # of a .json member, the first that is there
_BLOCK = 512
_AT_ONCE = 1 << 20
_LONGEST = 1 << 20  # bytes of a long name or of extended attributes
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_FILES = (b"0", b"\0", b"7")
_OTHERS = {
    b"1": "a hard link, which is not followed",
    b"2": "a symbolic link, which is not followed",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a folder",
    b"6": "a FIFO",
}
_LONG_NAME, _LONG_LINK, _EXTENDED, _SPARSE = b"L", b"K", (b"x", b"X"), b"S"


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


def _scan(path: bytes, *, endings: frozenset[bytes]) -> Scanned:
    """The images of one shard and their labels, whichever come first."""
    try:
        descriptor, size = open_regular(path)
    except OSError as error:
        raise DsslError(f"{printable(path)}: {error.strerror}; expected a tar file") from error
    with io.FileIO(descriptor, "rb") as file:
        found = Scanned(time=os.fstat(descriptor).st_mtime_ns, length=size)
        labels: dict[bytes, dict[bytes, bytes]] = {b"cls": {}, b"json": {}}
        stems: list[bytes] = []
        try:
            for member in _members(file.fileno(), path=path, size=size):
                name = member.name.removeprefix(b"./")
                folder, _, last = name.rpartition(b"/")
                stem, dot, ending = last.rpartition(b".")
                stem, ending = folder + b"/" + (stem if dot else last), ending.lower() if dot else b""
                if last.startswith(b"."):
                    continue
                if ending in labels and member.problem is None:
                    label = _label(file.fileno(), member, is_text=ending == b"cls")
                    if label is not None and labels[ending].setdefault(stem, label) != label:
                        raise DsslError(f"{printable(path)}: two members {printable(name)} with different labels")
                elif ending in endings or (member.problem is not None and not ending):
                    if name.startswith(b"/") or b".." in folder.split(b"/"):
                        member.problem = "its name leads out of the archive"
                    if member.problem is not None:
                        found.skipped.append((name, member.problem))
                        continue
                    found.names.append(name)
                    found.offsets.append(member.offset)
                    found.sizes.append(member.size)
                    stems.append(stem)
                else:
                    found.ignored += 1
        except OSError as error:
            raise DsslError(f"{printable(path)}: {error.strerror}: its members cannot be listed") from error
    found.labels = _labels_of(stems, labels[b"cls"] | labels[b"json"], path)
    return found


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


def _label(descriptor: int, member: _Member, *, is_text: bool) -> bytes | None:
    """The label in a .cls or .json member; None where it holds none."""
    if member.size > _LABEL_BYTES:
        return None
    few = member.size <= _BLOCK
    content = member.start[: member.size] if few else os.pread(descriptor, member.size, member.offset)
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


@dataclass(slots=True)
class _Member:
    """A file in a tar; ``problem`` is the reason why its bytes cannot be used."""

    name: bytes
    offset: int
    size: int
    start: bytes
    """Its first bytes, up to a block: all of a label."""
    problem: str | None = None


def _members(descriptor: int, *, path: bytes, size: int) -> Iterator[_Member]:
    """Every member but folders; damage is a member with a problem, whose name says where, and the search goes on behind it."""
    place, ended = 0, False
    name: bytes | None = None
    length: int | None = None
    sparse = False
    if size == 0:
        raise DsslError(f"{printable(path)}: the file is empty; expected a tar file")
    while place < size:
        block = os.pread(descriptor, 2 * _BLOCK, place)
        header = block[:_BLOCK]
        if header == bytes(_BLOCK):  # the end, unless a hole or a second archive follows
            ended = True
            place = _next_header(descriptor, place + _BLOCK, size)
            continue
        try:
            count = _check(header)
        except ValueError:
            behind = _next_header(descriptor, place + _BLOCK, size)
            if place == 0 and (behind == size or _compression(header)):
                raise DsslError(f"{printable(path)}: {_compression(header) or 'not a tar file'}") from None
            lost = "the rest of the shard is lost" if behind == size else f"{behind - place:,} bytes are lost"
            yield _Member(b"byte %d" % place, place, 0, b"", f"damaged header: {lost}")
            place, ended, name, length, sparse = behind, behind == size, None, None, False
            continue
        ended = False
        kind, begin = header[156:157], place + _BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, *_EXTENDED):
            content = os.pread(descriptor, min(count, _LONGEST), begin)
            if kind == _LONG_NAME:
                name = content.partition(b"\0")[0]
            elif kind in _EXTENDED:
                attributes = _attributes(content)
                name = attributes.get(b"path", name)
                digits = attributes.get(b"size", b"")[:19]  # of more than any file has; int() takes no more than 4,300
                length = int(digits) if digits.isdigit() else length
                sparse = any(key.startswith(b"GNU.sparse") for key in attributes)
            place = begin + _padded(count)
            continue
        count = count if length is None else length
        member = _Member(_name(header) if name is None else name, begin, count, block[_BLOCK:])
        if kind == _SPARSE:
            extended = header[482]
            while extended and begin + _BLOCK <= size:  # its map of holes goes on in blocks of its own
                extended, begin = os.pread(descriptor, _BLOCK, begin)[504], begin + _BLOCK
        place = begin if kind in _OTHERS else begin + _padded(count)
        if kind == _SPARSE or sparse:
            member.problem = "a sparse file: pack it again with `tar` and without --sparse"
        elif kind in _OTHERS:
            member.problem = _OTHERS[kind]
        elif begin + count > size:
            member.problem = "the shard is truncated within it"
            ended = True  # one line is enough
        name, length, sparse = None, None, False
        if kind in _FILES or kind == _SPARSE or (kind in _OTHERS and kind != b"5"):
            yield member
    if not ended:
        yield _Member(
            b"byte %d" % size, size, 0, b"", "the shard has no end mark: images may be missing behind its last"
        )


def _check(header: bytes) -> int:
    """The size of the member of a header; raises ValueError where its checksum is wrong."""
    if len(header) < _BLOCK:
        raise ValueError
    stored = int(header[148:156].strip(b"\0 ") or b"x", 8)
    # the lower half of Adler-32 is one more than the sum of all bytes, modulo 65,521, and takes a tenth of the time of sum()
    summed = (zlib.adler32(header) & 0xFFFF) - 1 - sum(header[148:156]) + 8 * 32
    if (summed - stored) % 65_521:
        raise ValueError
    field = header[124:136]
    if field[0] & 0x80:  # GNU: binary, for 8 GiB and more
        return int.from_bytes(field[1:], "big")
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _padded(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK


def _attributes(content: bytes) -> dict[bytes, bytes]:
    """POSIX's extended attributes: lines of length, key and value."""
    found, place = {}, 0
    while place < len(content):
        digits = content[place : place + 20].partition(b" ")[0]
        if not digits.isdigit() or int(digits) < len(digits) + 3:
            break
        key, _, value = content[place + len(digits) + 1 : place + int(digits) - 1].partition(b"=")
        found[key] = value
        place += int(digits)
    return found


def _next_header(descriptor: int, place: int, size: int) -> int:
    """Where the next header begins, or the size where none follows."""
    while place < size:
        content = os.pread(descriptor, _AT_ONCE, place)
        at = content.find(b"ustar")
        while at >= 0:
            begin = at - 257
            if begin >= 0 and begin % _BLOCK == 0:
                try:
                    _check(content[begin : begin + _BLOCK])
                except ValueError:
                    pass
                else:
                    return place + begin
            at = content.find(b"ustar", at + 1)
        if len(content) < _AT_ONCE:
            break
        place += _AT_ONCE
    return size


def _compression(head: bytes) -> str | None:
    """The line for a compressed file."""
    for start, kind in _COMPRESSED.items():
        if head.startswith(start):
            return f"compressed with {kind}: {COMPRESSED}"
    return None
