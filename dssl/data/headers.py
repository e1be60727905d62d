"""What is in a tar, found by its headers alone: POSIX, GNU and old tars, also where parts of one are damaged or missing."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from dssl.errors import DsslError
from dssl.files import printable

COMPRESSED = (
    "reading one image would mean decompressing all before it; decompress the file (images are compressed already, so it "
    "hardly grows)"
)
"""Why a compressed tar is refused."""
BLOCK = 512
_ZERO = bytes(BLOCK)
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


@dataclass(slots=True)
class Member:
    """A file in a tar; ``problem`` is the reason why its bytes cannot be used."""

    name: bytes
    offset: int
    size: int
    start: bytes
    """Its first bytes, up to a block: all of a label."""
    problem: str | None = None


def members(descriptor: int, *, path: bytes, size: int) -> Iterator[Member]:
    """Every member but folders; damage is a member with a problem, whose name says where, and the search goes on behind it."""
    place, ended = 0, False
    name: bytes | None = None
    length: int | None = None
    sparse = False
    if size == 0:
        raise DsslError(f"{printable(path)}: the file is empty; expected a tar file")
    while place < size:
        block = os.pread(descriptor, 2 * BLOCK, place)
        header = block[:BLOCK]
        if header == _ZERO:  # the end, unless a hole or a second archive follows
            ended = True
            place = _next_header(descriptor, place + BLOCK, size)
            continue
        try:
            count = _check(header)
        except ValueError:
            behind = _next_header(descriptor, place + BLOCK, size)
            if place == 0 and (behind == size or _compression(header)):
                raise DsslError(f"{printable(path)}: {_compression(header) or 'not a tar file'}") from None
            lost = "the rest of the shard is lost" if behind == size else f"{behind - place:,} bytes are lost"
            yield Member(b"byte %d" % place, place, 0, b"", f"damaged header: {lost}")
            place, ended, name, length, sparse = behind, behind == size, None, None, False
            continue
        ended = False
        kind, begin = header[156:157], place + BLOCK
        if kind in (_LONG_NAME, _LONG_LINK, *_EXTENDED):
            content = os.pread(descriptor, min(count, _LONGEST), begin)
            if kind == _LONG_NAME:
                name = content.partition(b"\0")[0]
            elif kind in _EXTENDED:
                told = _attributes(content)
                name = told.get(b"path", name)
                digits = told.get(b"size", b"")[:19]  # of more than any file has; int() takes no more than 4,300
                length = int(digits) if digits.isdigit() else length
                sparse = any(key.startswith(b"GNU.sparse") for key in told)
            place = begin + _padded(count)
            continue
        count = count if length is None else length
        member = Member(_name(header) if name is None else name, begin, count, block[BLOCK:])
        if kind == _SPARSE:
            extended = header[482]
            while extended and begin + BLOCK <= size:  # its map of holes goes on in blocks of its own
                extended, begin = os.pread(descriptor, BLOCK, begin)[504], begin + BLOCK
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
        yield Member(
            b"byte %d" % size, size, 0, b"", "the shard has no end mark: images may be missing behind its last"
        )


def _check(header: bytes) -> int:
    """The size of the member of a header; raises ValueError where its checksum is wrong."""
    if len(header) < BLOCK:
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
    return -(-count // BLOCK) * BLOCK


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
            if begin >= 0 and begin % BLOCK == 0:
                try:
                    _check(content[begin : begin + BLOCK])
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
