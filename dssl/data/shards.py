"""What tar and Parquet shards share: one index for all of them, built in parallel and kept, labels, and reading in groups."""

from __future__ import annotations

import itertools
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import UnreadableImage, decode_contents
from dssl.data.find import Found
from dssl.data.index import RECORD, YOUNG, Index, fingerprint, kept_index
from dssl.data.pipeline import thread_pool
from dssl.data.scale import Range
from dssl.data.source import Source, stamp_of
from dssl.errors import DsslError
from dssl.files import printable

if TYPE_CHECKING:
    from dssl.types import Image


class Shards(Source):
    """The images of shards, in the order of their index; the kinds of shards differ in how they find the bytes of one."""

    def __init__(
        self,
        shards: Found,
        opened: Callable[[tuple[bytes, ...]], Index],
        *,
        channels: int,
        value_range: Range | None,
    ) -> None:
        self.index = opened(shards.paths)
        if len(self.index) == 0:
            raise DsslError(_why_empty(shards, self.index))
        train = self.index if shards.train is None else opened(shards.train)
        self.classes, self.labels = _classes_of(self.index, train, shards.name)
        self.fingerprint = self.index.fingerprint
        self.skipped = self.index.skipped_paths()
        self._channels, self.value_range = channels, value_range

    def __len__(self) -> int:
        """The number of images."""
        return len(self.index)

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        """Of all shards, whichever hold these images, as they were when they were opened."""
        return stamp_of(zip(self.index.lengths, self.index.times, strict=True))

    def image(self, index: int) -> Image:
        """One image, decoded."""
        (image,) = self.read([index])
        if isinstance(image, UnreadableImage):
            raise image
        return image

    def read(self, indices: Sequence[int]) -> Iterator[Image | UnreadableImage]:
        """Several images, decoded together; an unreadable one is its error."""
        return decode_contents(
            ((self.index.path(index), partial(self.content, index)) for index in indices),
            channels=self._channels,
            value_range=self.value_range,
        )

    @abstractmethod
    def content(self, index: int) -> bytearray:
        """The bytes of one image as they are in its shard; raises whatever goes wrong."""

    def label_of(self, index: int) -> str:
        """The path of the shard below their folder and the name in it, printable."""
        return printable(self.index.relative(index))


def check_unchanged(status: os.stat_result, index: Index, container: int) -> None:
    """Refuse a shard whose index no longer describes it."""
    if (status.st_size, status.st_mtime_ns) != (index.lengths[container], index.times[container]):
        raise ValueError("its shard has changed since it was indexed: restart the run to index it again")


@dataclass(slots=True, kw_only=True)
class Scanned:
    """What the scan of one shard found."""

    time: int
    length: int
    names: list[bytes] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[bytes | None] = field(default_factory=list)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    ignored: int = 0


def open_shards(
    paths: tuple[bytes, ...],
    scan: Callable[[bytes], Scanned],
    *,
    options: tuple[bytes, ...] = (),
    sized: bool = True,
    threads: int = 8,
) -> Index:
    """The index of shards, from the cache or by scanning several at a time.

    `options` tell one way to scan the same shards from another. Where the sizes of images are not known (not `sized`), the
    fingerprint covers the lengths of the shards instead.
    """
    root, shards = _common_root(paths)

    def scan_all() -> Index:
        started = time.time_ns()
        with thread_pool(threads, "dssl-scan") as pool:
            found = [*pool.map(scan, (os.path.join(root, shard) for shard in shards))]  # noqa: PTH118 (bytes)
        marks = [b"%s\0%d" % (shard, one.length) for shard, one in zip(shards, found, strict=True)]
        return _assemble(root, shards, found, started=started, marks=None if sized else marks)

    return kept_index(root, scan_all, shards=shards, options=options)


def _common_root(paths: tuple[bytes, ...]) -> tuple[bytes, tuple[bytes, ...]]:
    """The folder that holds all shards, and their paths below it."""
    root = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120 (bytes)
    shards = tuple(os.path.relpath(path, root) for path in paths)
    if len(set(shards)) < len(shards):
        twice = next(path for path in shards if shards.count(path) > 1)
        raise DsslError(f"{printable(twice)}: the shard is given twice")
    return root, shards


def _assemble(
    root: bytes, shards: tuple[bytes, ...], found: list[Scanned], *, started: int, marks: list[bytes] | None = None
) -> Index:
    """One index of what was found in all shards; `marks` identify them where their names and the sizes of images do not."""
    counts = [len(shard.names) for shard in found]
    classes = _sorted_classes({label for shard in found for label in shard.labels if label is not None})
    number: dict[bytes | None, int] = {name: place for place, name in enumerate(classes)}
    records = np.zeros(sum(counts), RECORD)
    records["container"] = np.repeat(np.arange(len(shards)), counts)
    records["label"] = [number.get(label, -1) for shard in found for label in shard.labels]
    records["offset"] = np.concatenate([np.array(shard.offsets, np.int64) for shard in found])
    records["size"] = np.concatenate([np.array(shard.sizes, np.int64) for shard in found])
    records["name_end"] = np.cumsum([len(name) for shard in found for name in shard.names])
    names = b"".join(itertools.chain.from_iterable(shard.names for shard in found))
    return Index(
        root=root,
        containers=[*shards],
        times=[shard.time for shard in found],
        lengths=[shard.length for shard in found],
        classes=classes,
        records=records,
        names=np.frombuffer(names, np.uint8),
        skipped=[
            (b"%s/%s" % (path, name), why)
            for path, shard in zip(shards, found, strict=True)
            for name, why in shard.skipped
        ],
        ignored=sum(shard.ignored for shard in found),
        fingerprint=fingerprint(marks or [*shards], names, records),
        reusable=not any(shard.time >= started - YOUNG for shard in found),
    )


def _sorted_classes(names: set[bytes]) -> list[bytes]:
    """Numbers in the order of numbers, anything else in that of bytes."""
    return sorted(names, key=lambda name: (int(name), name)) if all(map(bytes.isdigit, names)) else sorted(names)


def _classes_of(index: Index, train: Index, name: str) -> tuple[tuple[str, ...] | None, NDArray[np.int64] | None]:
    """Class names and the label of each image, counted as in the training split; None and None where some image has none."""
    labels: NDArray[np.int64] = index.records["label"].astype(np.int64)
    if (labels < 0).any():
        return None, None
    if train.classes != index.classes:
        number = {one: place for place, one in enumerate(train.classes)}
        for one in index.classes:
            if one not in number:
                raise DsslError(f"{name}: the class {printable(one)!r} is not in the training split")
        labels = np.array([number[one] for one in index.classes])[labels]
    return tuple(printable(one) for one in train.classes), labels


def _why_empty(shards: Found, index: Index) -> str:
    """One line for shards without images."""
    if index.skipped:
        path, reason = index.skipped[0]
        return f"{shards.name}: no readable image; {printable(path)}: {printable(reason)}"
    if shards.kind == ".parquet":
        return f"{shards.name}: no rows; expected a column of images with at least one"
    held = f"none of the {index.ignored:,} files in its shards is an image" if index.ignored else "its shards are empty"
    return f"{shards.name}: {held}; expected images such as 000017.jpg, each with a 000017.cls or .json if labelled"
