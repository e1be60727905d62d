"""The index of a data set: one record for each image, scanned once in parallel, kept in the user's cache, mapped when reopened.

The file is a plain ``.npy`` of the records, which ``np.load(path, mmap_mode="r")`` opens; behind it come all names end to end,
a description in JSON and a checksum. Names are bytes, so that one that is not valid UTF-8 is a file like any other.
"""

import hashlib
import io
import json
import os
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import EXTENSIONS, kind_of
from dssl.data.pipeline import thread_pool
from dssl.data.scale import ENDINGS as SCIENCE
from dssl.errors import DsslError
from dssl.files import cache_folder, printable, write_atomically

RECORD = np.dtype([("container", "<i4"), ("label", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("name_end", "<i8")])
"""Which container holds the image, its class (-1: none), where its bytes begin there and how many there are, and where its name
ends; it begins where that of the record before it ends."""
_DIGEST = 16
UNSEEN = -2
_CHECKED = 1000  # files of a folder whose sizes are compared with those of its kept index
_YOUNG = 2_000_000_000  # ns; a container younger than this at the scan may change again without a new time stamp


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Index:
    """The images below a root, in the order of their paths' bytes, container by container."""

    root: bytes
    containers: list[bytes]
    """The folders or shards that were scanned, relative to the root with / between parts; the root itself is empty."""
    times: list[int]
    """When each container was last modified, in ns."""
    classes: list[bytes]
    """What ``label`` counts, sorted. In a folder: the first part of the path of each image that is not in the root itself."""
    records: NDArray[np.void]
    names: NDArray[np.uint8]
    """All file names end to end."""
    skipped: list[tuple[bytes, str]]
    """What is named like an image but is not a file, and links that lead nowhere: relative path and reason."""
    ignored: int
    """How many files do not have the ending of an image format."""
    fingerprint: str
    """Of the images' relative paths and sizes: the same on every machine that holds the same images."""
    reusable: bool
    """False where a container changed so shortly before the scan that its time stamp proves nothing."""
    lengths: list[int] = field(default_factory=list)
    """The bytes of each shard; empty for folders."""
    stats: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    """Size and time (ns) of each file of a folder that has been looked at, so that none is twice; else UNSEEN."""

    def __len__(self) -> int:
        """The number of images."""
        return len(self.records)

    def relative(self, position: int) -> bytes:
        """The path of one image below the root."""
        record = self.records[position]
        begin = self.records[position - 1]["name_end"] if position else 0
        return os.path.join(self.containers[record["container"]], self.names[begin : record["name_end"]].tobytes())  # noqa: PTH118 (bytes)

    def path(self, position: int) -> bytes:
        """The full path of one image."""
        return os.path.join(self.root, self.relative(position))  # noqa: PTH118 (bytes)

    def container(self, number: int) -> bytes:
        """The full path of one container."""
        return os.path.join(self.root, self.containers[number])  # noqa: PTH118 (bytes)

    def skipped_paths(self) -> list[tuple[str, str]]:
        """Full path and reason of what was skipped, printable: as in the errors of images that fail to decode."""
        return [(printable(os.path.join(self.root, path)), printable(reason)) for path, reason in self.skipped]  # noqa: PTH118 (bytes)

    def earlier_fingerprint(self) -> str:
        """That of earlier versions, which covered folders without images, too."""
        return fingerprint(self.containers, self.names.tobytes(), self.records)


def classes_of(
    index: Index, train: Index, place: str, problem: str
) -> tuple[tuple[str, ...] | None, NDArray[np.int64] | None]:
    """The training split's class names, and the label of each image, counted as there; None twice where some image has none."""
    labels = index.records["label"].astype(np.int64)
    if (labels < 0).any():
        return None, None
    number = {name: position for position, name in enumerate(train.classes)}
    missing = next((name for name in index.classes if name not in number), None)
    if missing is not None:
        raise DsslError(f"{place}: the class {printable(missing)!r} {problem}")
    return tuple(map(printable, train.classes)), np.array([number[name] for name in index.classes])[labels]


def endings_of(*, photos: bool) -> frozenset[bytes]:
    """The extensions that make a file an image: of photographs, or of the formats that hold any values."""
    return frozenset(ending.encode() for ending in (EXTENSIONS if photos else SCIENCE))


def open_index(root: str | bytes | os.PathLike[str], *, photos: bool = True, sizes: bool = True) -> Index:
    """The index of a folder: from the cache if nothing has changed, else scanned (and kept if possible).

    Without `sizes`, for its classes alone, one that is open already will do, and no image is looked at again.
    """
    root = os.path.realpath(os.fsencode(root))
    index = None if sizes else _open.get((root, photos))
    if index is None or not index.reusable or not _is_current(index, sizes=False):
        options = kind_option(photos=photos)
        index = _open[root, photos] = kept_index(root, lambda: scan(root, photos=photos), options=options, sizes=sizes)
    return index


_open: weakref.WeakValueDictionary[tuple[bytes, bool], Index] = weakref.WeakValueDictionary()


def kind_option(*, photos: bool) -> tuple[bytes, ...]:
    """What tells the index of one kind of images from that of the other."""
    return () if photos else (b"values",)


def kept_index(
    root: bytes, make: Callable[[], Index], *, shards: tuple[bytes, ...] = (), options: tuple[bytes, ...],
    sizes: bool = True,
) -> Index:  # fmt: skip
    """The index of a folder, or of these shards below it, from the cache if it is current, else made (and kept)."""
    place = _place(b"\0".join([root, *shards, *options]))
    if place is not None:
        kept = _load(place, root)
        if kept is not None and _is_current(kept, sizes=sizes):
            return kept
    index = make()
    if place is not None and index.reusable:
        with suppress(OSError):  # a full or read-only disk costs the next start a scan, and nothing else
            _save(place, index)
    return index


@dataclass(slots=True, kw_only=True)
class Container:
    """What the scan of one folder or shard found."""

    path: bytes = b""
    time: int
    length: int = 0
    names: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    """Of the files of a folder, in ns."""
    labels: list[bytes | None] = field(default_factory=list)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    ignored: int = 0


def build_index(
    root: bytes, containers: list[Container], *, classes: list[bytes], marks: list[bytes | None], started: int
) -> Index:
    """The index of what was scanned, from the time `started` on.

    The fingerprint knows the containers by their `marks`; one without a mark and without images is not part of it.
    """
    counts = [len(container.names) for container in containers]
    label: dict[bytes | None, int] = {name: number for number, name in enumerate(classes)}
    records = np.zeros(sum(counts), RECORD)
    records["container"] = np.repeat(np.arange(len(containers)), counts)
    records["label"] = [label.get(name, -1) for container in containers for name in container.labels]
    records["offset"] = [*chain.from_iterable(container.offsets for container in containers)]
    records["size"] = [*chain.from_iterable(container.sizes for container in containers)]
    names = [*chain.from_iterable(container.names for container in containers)]
    records["name_end"] = np.cumsum([len(name) for name in names])
    text = b"".join(names)
    times = [*chain.from_iterable(container.times for container in containers)]
    numbers = np.cumsum([mark is not None for mark in marks]) - 1
    renumbered = records.copy()
    renumbered["container"] = numbers[records["container"]]
    return Index(
        root=root,
        containers=[container.path for container in containers],
        times=[container.time for container in containers],
        classes=classes,
        records=records,
        names=np.frombuffer(text, np.uint8),
        skipped=[entry for container in containers for entry in container.skipped],
        ignored=sum(container.ignored for container in containers),
        fingerprint=fingerprint([mark for mark in marks if mark is not None], text, renumbered),
        reusable=not any(container.time >= started - _YOUNG for container in containers),
        lengths=[container.length for container in containers if container.length],
        stats=np.stack([records["size"], times], axis=1).astype(np.int64) if times else np.empty((0, 2), np.int64),
    )


def scan(root: bytes, *, photos: bool = True) -> Index:
    """Walk a folder, level by level, with threads; links are followed, but no folder is entered twice."""
    started, endings = time.time_ns(), endings_of(photos=photos)
    folders: dict[tuple[int, int], Container] = {}
    level = [b""]
    with thread_pool(8, "dssl-scan") as pool:
        while level:
            results = list(pool.map(lambda path: _scan_folder(root, path, endings), level))
            level = []
            for identity, folder, below in results:  # in order of their paths, whatever the threads do
                if identity not in folders:
                    folders[identity] = folder
                    level += below
    containers = sorted(folders.values(), key=lambda folder: folder.path.split(b"/"))
    classes, leading = set(), {b""}
    for folder in containers:
        parts = folder.path.split(b"/")
        if folder.names:  # a folder that leads to no image may come and go
            leading |= {b"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
            classes |= {parts[0]} - {b""}
        folder.labels = [parts[0] or None] * len(folder.names)
    marks = [folder.path if folder.path in leading else None for folder in containers]
    return build_index(root, containers, classes=sorted(classes), marks=marks, started=started)


def fingerprint(containers: list[bytes], names: bytes, records: NDArray[np.void]) -> str:
    """Of paths and sizes."""
    digest = hashlib.blake2b(digest_size=16)
    ends = np.concatenate([[0], records["name_end"]]).astype("<i8")
    for part in (
        b"\0".join(containers),
        names,
        *(column.tobytes() for column in (records["container"], ends, records["size"])),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _scan_folder(
    root: bytes, folder: bytes, endings: frozenset[bytes]
) -> tuple[tuple[int, int], Container, list[bytes]]:
    """The device and inode of a folder, its images, and its subfolders."""
    full = os.path.join(root, folder) if folder else root  # noqa: PTH118 (bytes)
    prefix = folder + b"/" if folder else b""
    files: list[tuple[bytes, int, int]] = []
    subfolders: list[bytes] = []
    skipped: list[tuple[bytes, str]] = []
    ignored = 0
    try:
        before = os.stat(full)  # noqa: PTH116 (bytes)  # before reading, so that the next start notices a later change
        with os.scandir(full) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                image = name.rpartition(b".")[2].lower() in endings and b"." in name
                try:
                    if image:
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            files.append((name, status.st_size, status.st_mtime_ns))
                            continue
                        if not stat.S_ISDIR(status.st_mode):
                            skipped.append((prefix + name, kind_of(status.st_mode)))
                            continue
                    if entry.is_dir():
                        subfolders.append(prefix + name)
                    else:
                        if entry.is_symlink():
                            entry.stat()  # a link that leads nowhere may have led to a folder of images
                        ignored += 1
                except OSError as error:  # a broken link, a loop of links, an image that has just been deleted
                    skipped.append((prefix + name, error.strerror or "cannot be read"))
    except OSError as error:
        raise DsslError(
            f"{printable(full)}: the folder cannot be read: {error.strerror}; make it readable, or move it out of the data"
        ) from error
    files.sort()
    container = Container(
        path=folder, time=before.st_mtime_ns, names=[name for name, _, _ in files], sizes=[size for _, size, _ in files],
        times=[time for _, _, time in files], offsets=[0] * len(files), skipped=sorted(skipped), ignored=ignored,
    )  # fmt: skip
    return (before.st_dev, before.st_ino), container, sorted(subfolders)


def _is_current(index: Index, *, sizes: bool) -> bool:
    """True if every container has the time stamp, every shard the length, and some images the `sizes` of the scan."""
    lengths: list[int | None] = [*index.lengths] or [None] * len(index.containers)
    try:
        for number, (modified, length) in enumerate(zip(index.times, lengths, strict=True)):
            status = os.stat(index.container(number))  # noqa: PTH116 (bytes)
            if status.st_mtime_ns != modified or length not in (None, status.st_size):
                return False
        # a file that is overwritten in place leaves its folder's time as it was
        rows = np.linspace(0, max(0, len(index) - 1), min(len(index), _CHECKED)).astype(int)
        for row in rows if sizes and not index.lengths else ():
            status = os.stat(index.path(row))  # noqa: PTH116 (bytes)
            if status.st_size != index.records["size"][row]:
                return False
            index.stats[row] = status.st_size, status.st_mtime_ns
    except OSError:
        return False
    # what a broken link leads to may be back
    skipped = (os.path.join(index.root, path) for path, _ in index.skipped)  # noqa: PTH118 (bytes)
    return not any(os.path.isfile(path) or os.path.isdir(path) for path in skipped)  # noqa: PTH112, PTH113 (bytes)


def _place(what: bytes) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "index" / f"{hashlib.sha256(what).hexdigest()[:32]}.npy"


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _save(place: Path, index: Index) -> None:
    """Write an index; several processes may do so at once, since each replaces the file as a whole."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(index.records))
    about = {
        "containers": [*map(_text, index.containers)], "times": index.times, "classes": [*map(_text, index.classes)],
        "skipped": [(_text(path), reason) for path, reason in index.skipped],
        "ignored": index.ignored, "images": index.fingerprint, "lengths": index.lengths,
    }  # fmt: skip
    text = json.dumps(about).encode()
    parts = [header.getvalue(), index.records.tobytes(), index.names.tobytes(), text, len(text).to_bytes(8, "little")]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    write_atomically(place, [*parts, digest.digest()])


def _load(place: Path, root: bytes) -> Index | None:
    """The kept index, mapped; None where there is none, or it is damaged."""
    try:
        with place.open("rb") as file:  # opened once: another process may replace it at any time
            content: NDArray[np.uint8] = np.asarray(np.memmap(file, np.uint8, mode="r"))
            if hashlib.blake2b(content[:-_DIGEST].data, digest_size=_DIGEST).digest() != content[-_DIGEST:].tobytes():
                return None
            file.seek(0)
            np.lib.format.read_magic(file)
            (count,), _, kind = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
        end = begin + count * RECORD.itemsize
        stop = len(content) - _DIGEST - 8
        text = stop - int.from_bytes(content[stop : stop + 8].tobytes(), "little")
        about = json.loads(content[text:stop].tobytes())
        if kind != RECORD:
            return None
        return Index(
            root=root,
            containers=[*map(_bytes, about["containers"])],
            times=about["times"],
            classes=[*map(_bytes, about["classes"])],
            records=content[begin:end].view(RECORD),
            names=content[end:text],
            skipped=[(_bytes(path), reason) for path, reason in about["skipped"]],
            ignored=about["ignored"],
            fingerprint=about["images"],
            reusable=True,
            lengths=about["lengths"],
            stats=np.full((count, 2), UNSEEN, np.int64),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
