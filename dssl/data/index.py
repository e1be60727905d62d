"""The list of a folder's images: scanned in parallel once, kept in the user's cache, reopened while no folder has changed.

An index is flat arrays (folders, file names end to end, offsets, sizes), never pickled objects: a million paths are some
30 MB and open in a fraction of a second. Paths are bytes, so that names that are no valid UTF-8 are files like all others.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import EXTENSIONS, kind_of
from dssl.files import cache_folder, write_atomically

_MAGIC = b"DSSLIDX2"
_ENDINGS = frozenset(ending.encode() for ending in EXTENSIONS)
_YOUNG = 2_000_000_000  # ns; a folder younger than this at the scan may change again without a new time stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The images below a root, in the order of their paths' bytes, folder by folder."""

    root: bytes
    folders: list[bytes]
    """Relative to the root, with / between parts; the root itself is empty."""
    folder_times: NDArray[np.int64]
    folder_of: NDArray[np.int32]
    names: bytes
    """All file names end to end."""
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    skipped: list[tuple[bytes, str]]
    """What looks like an image and is none, or a folder that cannot be read: relative path and reason."""
    ignored: int
    """How many files have no ending of an image format."""
    reusable: bool
    """False where a folder was changed so shortly before the scan that its time stamp proves nothing."""

    def __len__(self) -> int:
        """The number of images."""
        return len(self.folder_of)

    def relative(self, position: int) -> bytes:
        """The path of one image below the root."""
        folder = self.folders[self.folder_of[position]]
        name = self.names[self.offsets[position] : self.offsets[position + 1]]
        return folder + b"/" + name if folder else name

    def path(self, position: int) -> bytes:
        """The full path of one image."""
        return os.path.join(self.root, self.relative(position))  # noqa: PTH118 (bytes)

    def fingerprint(self) -> str:
        """Of relative paths and sizes: the same on every machine that holds the same files, new when one comes or goes."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (
            b"\0".join(self.folders),
            self.names,
            _bytes(self.folder_of),
            _bytes(self.offsets),
            _bytes(self.sizes),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def open_index(root: str | bytes | os.PathLike[str], *, cache: bool = True) -> Index:
    """The index of a folder: from the cache where nothing has changed, else scanned (and kept, where that is possible)."""
    root = os.path.realpath(os.fsencode(root))
    place = _place(root) if cache else None
    if place is not None:
        kept = _load(place, root)
        if kept is not None and _is_current(kept):
            return kept
    index = scan(root)
    if place is not None and index.reusable:
        with suppress(OSError):  # a full or read-only disk costs the next start a scan, and nothing else
            _save(place, index)
    return index


def scan(root: bytes, *, threads: int = 8) -> Index:
    """Walk a folder, level by level, with threads; links are followed, but no folder is entered twice."""
    started = time.time_ns()
    seen: set[tuple[int, int]] = set()
    results: list[_Folder] = []
    level = [b""]
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="dssl-scan") as pool:
        while level:
            found = list(pool.map(lambda folder: _scan_folder(root, folder), level))
            level = []
            for folder in found:  # in order of their paths, so that the result does not depend on the threads
                if folder.identity is not None and folder.identity in seen:
                    continue
                if folder.identity is not None:
                    seen.add(folder.identity)
                results.append(folder)
                level += folder.subfolders
    results.sort(key=lambda folder: folder.path.split(b"/"))
    lengths = np.concatenate([[0], *(folder.lengths for folder in results)]).astype(np.int64)
    counts = [len(folder.lengths) for folder in results]
    times = np.array([folder.time for folder in results], np.int64)
    return Index(
        root=root,
        folders=[folder.path for folder in results],
        folder_times=times,
        folder_of=np.repeat(np.arange(len(results), dtype=np.int32), counts),
        names=b"".join(folder.names for folder in results),
        offsets=np.cumsum(lengths),
        sizes=np.concatenate([np.empty(0, np.int64), *(folder.sizes for folder in results)]),
        skipped=[entry for folder in results for entry in folder.skipped],
        ignored=sum(folder.ignored for folder in results),
        reusable=bool((times < started - _YOUNG).all()) and not any(folder.failed for folder in results),
    )


@dataclass(slots=True)
class _Folder:
    path: bytes
    time: int
    identity: tuple[int, int] | None
    names: bytes
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    subfolders: list[bytes]
    skipped: list[tuple[bytes, str]]
    ignored: int
    failed: bool


def _scan_folder(root: bytes, folder: bytes) -> _Folder:
    """One folder's images and subfolders."""
    full = os.path.join(root, folder) if folder else root  # noqa: PTH118 (bytes)
    prefix = folder + b"/" if folder else b""
    files: list[tuple[bytes, int]] = []
    subfolders: list[bytes] = []
    skipped: list[tuple[bytes, str]] = []
    ignored, failed = 0, False
    modified, identity = 0, None
    try:
        before = os.stat(full)  # noqa: PTH116  # before reading, so that a later change is noticed at the next start
        modified, identity = before.st_mtime_ns, (before.st_dev, before.st_ino)
        with os.scandir(full) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                image = name.rpartition(b".")[2].lower() in _ENDINGS and b"." in name
                try:
                    if image:
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            files.append((name, status.st_size))
                            continue
                        if not stat.S_ISDIR(status.st_mode):
                            skipped.append((prefix + name, kind_of(status.st_mode)))
                            continue
                    if entry.is_dir():
                        subfolders.append(prefix + name)
                    else:
                        ignored += 1
                except OSError as error:  # a broken link, a loop of links, a file that has just vanished
                    if image:
                        skipped.append((prefix + name, error.strerror or "cannot be read"))
    except OSError as error:
        skipped.append((folder or b".", f"the folder cannot be read: {error.strerror}"))
        failed = True
    files.sort()
    return _Folder(
        path=folder, time=modified, identity=identity, names=b"".join(name for name, _ in files),
        lengths=np.fromiter((len(name) for name, _ in files), np.int64, len(files)),
        sizes=np.fromiter((size for _, size in files), np.int64, len(files)),
        subfolders=sorted(subfolders), skipped=sorted(skipped), ignored=ignored, failed=failed,
    )  # fmt: skip


def _is_current(index: Index) -> bool:
    """True where no folder of the index has another time stamp than at the scan."""
    try:
        for folder, modified in zip(index.folders, index.folder_times.tolist(), strict=True):
            if os.stat(os.path.join(index.root, folder) if folder else index.root).st_mtime_ns != modified:  # noqa: PTH116, PTH118
                return False
    except OSError:
        return False
    return True


def _place(root: bytes) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "index" / f"{hashlib.sha256(root).hexdigest()[:32]}.index"


def _bytes(array: NDArray[np.int64] | NDArray[np.int32]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _hash(about: dict[str, Any], body: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(json.dumps(about).encode(), digest_size=16)
    for part in body:
        digest.update(part)
    return digest.hexdigest()


def _save(place: Path, index: Index) -> None:
    """Write header and arrays; two processes may do so at once, since each replaces the file as a whole."""
    skipped = b"\0".join(part for path, reason in index.skipped for part in (path, reason.encode()))
    body = [
        index.root, b"\0".join(index.folders), _bytes(index.folder_times), _bytes(index.folder_of), index.names,
        _bytes(index.offsets), _bytes(index.sizes), skipped,
    ]  # fmt: skip
    about = {"lengths": [len(part) for part in body], "ignored": index.ignored, "folders": len(index.folders)}
    text = json.dumps({"about": about, "hash": _hash(about, body)}).encode()
    write_atomically(place, [_MAGIC, len(text).to_bytes(8, "little"), text, *body])


def _load(place: Path, root: bytes) -> Index | None:
    """The kept index, or None where there is none, it is damaged, or it belongs to another root."""
    try:
        content = memoryview(place.read_bytes())
        if content[:8] != _MAGIC:
            return None
        start = 16 + int.from_bytes(content[8:16], "little")
        outside = json.loads(bytes(content[16:start]))
        header = outside["about"]
        lengths = [int(length) for length in header["lengths"]]
        if len(lengths) != 8 or start + sum(lengths) != len(content):
            return None
        if _hash(header, [content[start:]]) != outside["hash"]:
            return None
        parts = []
        for length in lengths:
            parts.append(content[start : start + length])
            start += length
        if bytes(parts[0]) != root:
            return None
        pieces = bytes(parts[7]).split(b"\0") if parts[7] else []
        return Index(
            root=root,
            folders=bytes(parts[1]).split(b"\0") if header["folders"] else [],
            folder_times=np.frombuffer(parts[2], "<i8").astype(np.int64, copy=False),
            folder_of=np.frombuffer(parts[3], "<i4").astype(np.int32, copy=False),
            names=bytes(parts[4]),
            offsets=np.frombuffer(parts[5], "<i8").astype(np.int64, copy=False),
            sizes=np.frombuffer(parts[6], "<i8").astype(np.int64, copy=False),
            skipped=[(path, reason.decode()) for path, reason in zip(pieces[::2], pieces[1::2], strict=True)],
            ignored=int(header["ignored"]),
            reusable=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
