"""Images in tar shards, as WebDataset writes them: indexed by their headers, read in place, each with one ``pread``."""

from __future__ import annotations

import functools
import io
import json
import os
import threading
from collections import OrderedDict
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import check_length, open_regular
from dssl.data.find import Found
from dssl.data.headers import BLOCK, Member, members
from dssl.data.index import Index, endings_of, kind_option
from dssl.data.scale import Range
from dssl.data.shards import Scanned, Shards, check_unchanged, open_shards
from dssl.errors import DsslError
from dssl.files import printable

_OPEN = 128  # shards whose descriptors are kept; a process may have a thousand
_LABEL_BYTES = 1 << 20
_LABEL_KEYS = ("class", "label", "cls")  # of a .json member, the first that is there


class Tar(Shards):
    """The images in tar files, in the order of the files and of their members."""

    def __init__(
        self,
        shards: Found,
        *,
        channels: int = 3,
        value_range: Range | None = None,
    ) -> None:
        if shards.columns:
            raise DsslError(f"{shards.name}#{shards.columns}: tar files have no columns; only Parquet files do")
        photos = value_range is None
        scan, options = functools.partial(_scan, endings=endings_of(photos=photos)), kind_option(photos=photos)
        super().__init__(
            shards,
            lambda paths: open_shards(paths, scan, options=options),
            channels=channels,
            value_range=value_range,
        )
        count = len(shards.paths)
        self.name = f"{shards.name} ({len(self.index):,} images in {count:,} shard{'s' if count != 1 else ''})"
        self.shards = np.searchsorted(self.index.records["container"], np.arange(count + 1))
        self._files = _Files(self.index)

    def content(self, index: int) -> bytearray:
        """The bytes of one image as they are in its shard."""
        record = self.index.records[index]
        size = int(record["size"])
        check_length(size)
        content = bytearray(size)
        file = self._files.at(int(record["container"]))
        if os.preadv(file.descriptor, [content], int(record["offset"])) < size:
            raise ValueError("the shard ends within it")
        return content

    def read_ahead(self, shards: NDArray[np.int64]) -> None:
        """Have the system read whole shards, in sequence, before their images are asked for."""
        if hasattr(os, "posix_fadvise"):
            for shard in shards.tolist():
                with suppress(OSError, ValueError):  # who needs an image of it will say what is wrong
                    os.posix_fadvise(self._files.at(shard).descriptor, 0, 0, os.POSIX_FADV_WILLNEED)


class _File:
    """An open shard, closed when nobody reads from it any more."""

    def __init__(self, path: bytes) -> None:
        self.descriptor, _ = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class _Files:
    """The shards that were used last, open; one that has changed since it was indexed is refused."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: OrderedDict[int, _File] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, container: int) -> _File:
        with self._lock:
            file = self._open.get(container)
            if file is not None:
                self._open.move_to_end(container)
        if file is None:
            file = _File(self._index.container(container))
            with self._lock:
                self._open[container] = file
                if len(self._open) > _OPEN:
                    self._open.popitem(last=False)
        check_unchanged(os.fstat(file.descriptor), self._index, container)
        return file


def _scan(path: bytes, *, endings: frozenset[bytes]) -> Scanned:
    """The images of one shard and their labels, whichever come first."""
    try:
        descriptor, size = open_regular(path)
    except OSError as error:
        raise DsslError(f"{printable(path)}: {error.strerror}; expected a tar file") from error
    with io.FileIO(descriptor, "rb") as file:
        found = Scanned(time=os.fstat(descriptor).st_mtime_ns, length=size)
        labels: dict[bytes, bytes] = {}
        keys: list[bytes] = []
        try:
            for member in members(file.fileno(), path=path, size=size):
                name = member.name.removeprefix(b"./")
                folder, _, last = name.rpartition(b"/")
                key, _, ending = last.partition(b".")
                key, ending = folder + b"/" + key, ending.rpartition(b".")[2].lower()
                if last.startswith(b"."):
                    continue
                if ending in (b"cls", b"json") and member.problem is None:
                    label = _label(file.fileno(), member, is_text=ending == b"cls")
                    if label is not None and (ending == b"json" or key not in labels):
                        labels[key] = label
                elif ending in endings or (member.problem is not None and not ending):
                    if name.startswith(b"/") or b".." in folder.split(b"/"):
                        member.problem = "its name leads out of the archive"
                    if member.problem is not None:
                        found.skipped.append((name, member.problem))
                        continue
                    found.names.append(name)
                    found.offsets.append(member.offset)
                    found.sizes.append(member.size)
                    keys.append(key)
                else:
                    found.ignored += 1
        except OSError as error:
            raise DsslError(f"{printable(path)}: {error.strerror}: its members cannot be listed") from error
    found.labels = [labels.get(key) for key in keys]
    return found


def _label(descriptor: int, member: Member, *, is_text: bool) -> bytes | None:
    """The label in a .cls or .json member; None where it holds none."""
    if member.size > _LABEL_BYTES:
        return None
    few = member.size <= BLOCK
    content = member.start[: member.size] if few else os.pread(descriptor, member.size, member.offset)
    if is_text:
        return content.strip() or None
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        return None
    value = next((told[key] for key in _LABEL_KEYS if key in told), None) if isinstance(told, dict) else None
    return str(value).encode() if isinstance(value, str | int) and not isinstance(value, bool) else None
