"""What tar and Parquet shards share: how they are found (a folder, a text list, a pattern as in a shell), one index for all of
them, built in parallel and kept, labels, and reading in groups.
"""

from __future__ import annotations

import codecs
import glob
import os
import re
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from dssl.data.decode import UnreadableImage, decode_contents
from dssl.data.folder import TEST, Splits, visible
from dssl.data.index import Container, Index, build_index, classes_of, kept_index
from dssl.data.pipeline import thread_pool
from dssl.data.scale import Range
from dssl.data.source import NoSplitError, Source, Split, stamp_of
from dssl.errors import DsslError
from dssl.files import printable, read_table
from dssl.types import Image

K = TypeVar("K")
V = TypeVar("V")
SHARDS = (".tar", ".parquet")
_COMPRESSED = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
COPY = "packed.json"
"""In a folder that `dssl data pack` fills: the fingerprint of each split's source, and whether the copy is complete."""
_COUNTED = re.compile(r"-(\d+)-of-(\d+)\.\w+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The shards of one split; ``train`` are those whose classes count, where they are others."""

    name: str
    paths: tuple[bytes, ...]
    train: tuple[bytes, ...] | None = None
    columns: str = ""
    """Of Parquet: image=COLUMN,label=COLUMN, as given behind a #."""

    @property
    def kind(self) -> str:
        """The ending that all of them have."""
        kinds = {os.path.splitext(path)[1].lower().decode() for path in self.paths}  # noqa: PTH122 (bytes)
        if len(kinds) > 1:
            raise DsslError(f"{self.name}: both tar and Parquet files; give files of one kind")
        return kinds.pop()


def columns_in(text: str) -> tuple[str, str]:
    """The text without the columns of Parquet behind a #, and these."""
    place, _, columns = text.partition("#")
    # not Path.exists, which fails for a name that no file can have
    if os.path.exists(text) or not (place.endswith(".parquet") or os.path.exists(place)):  # noqa: PTH110 (a text)
        return text, ""
    return place, columns


def find_shards(text: str, split: Split, *, columns: str = "") -> Found | None:
    """The shards that a text means: a file, a text list or a pattern; None if it means something else."""
    paths = _matching(text) if not os.path.exists(text) else _in_list(Path(text))  # noqa: PTH110 (a text)
    if not paths:
        return None
    for path in paths:
        _check_ending(path)
    if split == "test":
        raise NoSplitError(
            f"{printable(text)}: these shards have no test split: give the shards of the test images instead"
        )
    return Found(
        name=printable(text), paths=tuple(os.path.realpath(os.fsencode(path)) for path in paths), columns=columns
    )


def _check_ending(path: str) -> None:
    if path.lower().endswith(_COMPRESSED):
        raise DsslError(
            f"{printable(path)}: compressed: reading one image would mean decompressing all before it; decompress the file "
            "(images are compressed already, so it hardly grows)"
        )
    if not path.lower().endswith(SHARDS):
        raise DsslError(f"{printable(path)}: expected shards that end in {' or '.join(SHARDS)}")


def shards_in(splits: Splits, split: Split, *, columns: str = "") -> Found | None:
    """The shards of a split in a folder: in train and val folders, in files so named, or all of them; None without any."""
    root = splits.place if splits.test is None and split == "test" else splits.folder(split)
    here = _listed(root)
    if here is None:
        return None
    train: list[str] | None = None  # whose classes count, where these are others
    if root != splits.place:
        train = _listed(splits.train) if split == "test" else None
    else:
        named = {word: [name for name in here if re.match(rf"{word}[-_.]", name)] for word in ("train(ing)?", *TEST)}
        first = named.pop("train(ing)?")
        held_out = next(filter(None, named.values()), [])
        if first and held_out:
            here, train = (first, None) if split == "train" else (held_out, first)
        elif split == "test":
            raise NoSplitError(
                f"{printable(root)}: no test split: expected the folders train and val (or test) in it, or shards "
                "whose names begin with train- and test-"
            )
    _check_complete(root, here)
    return Found(
        name=printable(root),
        paths=_real_paths(root, here),
        train=None if train is None else _real_paths(splits.train, train),
        columns=columns,
    )


def _real_paths(folder: Path, names: list[str]) -> tuple[bytes, ...]:
    return tuple(os.path.realpath(os.fsencode(folder / name)) for name in names)


def _listed(folder: Path) -> list[str] | None:
    """The names of the shards in a folder, sorted; None where it holds images or other folders, or no shard."""
    content = visible(folder)
    if content is None or content[0] or content[1]:
        return None
    check_copy(folder)
    names = content[2]
    for name in names:
        if name.lower().endswith(_COMPRESSED):
            _check_ending(str(folder / name))
    return sorted(name for name in names if name.lower().endswith(SHARDS)) or None


def check_copy(folder: Path) -> None:
    """A copy that was interrupted, perhaps between its splits, is an error."""
    if read_table(folder / COPY).get("complete") is False:
        raise DsslError(f"{printable(folder)}: an incomplete packed copy; the same `dssl data pack` starts it over")


def _check_complete(folder: Path, names: list[str]) -> None:
    """Where names count themselves, as in train-00003-of-00012.tar, all of them must be there."""
    matches = [match for name in names if (match := _COUNTED.search(name))]
    if len(matches) != len(names) or len({match[2] for match in matches}) != 1:
        return
    count = int(matches[0][2])
    missing = sorted(set(range(count)) - {int(match[1]) for match in matches})
    if missing:
        raise DsslError(
            f"{printable(folder)}: {len(missing):,} of {count:,} shards are missing, the first is number "
            f"{missing[0]}; to use the others alone, give them as '{printable(folder)}/*{Path(names[0]).suffix}'"
        )


def _in_list(place: Path) -> list[str]:
    """The shards in a text list, or the one shard that this is; empty where it lists something else."""
    if place.name.lower().endswith(SHARDS + _COMPRESSED):
        return [str(place)]
    if not place.is_file():
        return []
    endings = tuple(ending.encode() for ending in SHARDS + _COMPRESSED)
    try:
        with place.open("rb") as file:
            if not file.readline(1 << 16).strip().lower().endswith(endings):
                return []
        lines = [line.strip() for line in place.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")]
    except OSError:
        return []
    return [os.fsdecode(os.path.join(os.fsencode(place.parent), line)) for line in lines if line]  # noqa: PTH118 (bytes)


def _matching(text: str) -> list[str]:
    """The paths of a pattern with braces, {000..127} or {train,extra}, and the wildcards of a shell."""
    if not re.search(r"[{*?[]", text):
        return []
    paths: list[str] = []
    for pattern in _braces(text):
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]  # noqa: PTH207 (a text, perhaps absolute)
        if not matches:
            raise DsslError(f"data {printable(pattern)!r}: no file matches this pattern")
        paths += matches
    return paths


def _braces(text: str) -> list[str]:
    """What bash makes of braces."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        if abs(last - first) >= 1_000_000:
            raise DsslError(f"data {printable(text)!r}: more than a million shards")
        width = max(map(len, numbers.groups())) if any(n[0] == "0" and len(n) > 1 for n in numbers.groups()) else 0
        step = 1 if last >= first else -1
        parts = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    else:
        parts = match[1].split(",")
    begin, end = text[: match.start()], text[match.end() :]
    return [path for part in parts for path in _braces(begin + part + end)]


class Shards(Source):
    """The images of shards, in the order of their index; the kinds of shards differ in how they find the bytes of one."""

    def __init__(
        self, shards: Found, scan: Callable[[bytes], Container], *, version: tuple[bytes, ...], sized: bool,
        channels: int, value_range: Range | None,
    ) -> None:  # fmt: skip
        opened = partial(_open_shards, scan=scan, version=version, sized=sized)
        self.index = opened(shards.paths)
        if len(self.index) == 0:
            raise DsslError(_why_empty(shards, self.index))
        train = self.index if shards.train is None else opened(shards.train)
        self.classes, self.labels = classes_of(self.index, train, shards.name, "is not in the training split")
        self.fingerprint = self.index.fingerprint
        self.skipped = self.index.skipped_paths()
        self._channels, self.value_range = channels, value_range

    def __len__(self) -> int:
        return len(self.index)

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        """Of all shards, whichever hold these images, as they were when they were opened."""
        return stamp_of(zip(self.index.lengths, self.index.times, strict=True))

    def image(self, index: int) -> Image:
        (image,) = self.read([index])
        if isinstance(image, UnreadableImage):
            raise image
        return image

    def read(self, indices: Sequence[int]) -> Iterator[Image | UnreadableImage]:
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


class Recent(Generic[K, V]):
    """The `keep` values that were asked for last, each loaded by one thread while others wait for it."""

    def __init__(self, load: Callable[[K], V], *, keep: int) -> None:
        self._load, self.keep = load, keep
        self.loads = 0
        """How many values have been loaded."""
        self._entries: OrderedDict[K, tuple[threading.Lock, list[V]]] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, key: K) -> V:
        with self._lock:
            lock, loaded = self._entries.setdefault(key, (threading.Lock(), []))
            self._entries.move_to_end(key)
            while len(self._entries) > self.keep:
                self._entries.popitem(last=False)
        with lock:
            if not loaded:
                loaded.append(self._load(key))
                self.loads += 1
        return loaded[0]


def check_unchanged(status: os.stat_result, index: Index, container: int) -> None:
    """Refuse a shard whose index no longer describes it."""
    if (status.st_size, status.st_mtime_ns) != (index.lengths[container], index.times[container]):
        raise ValueError("its shard has changed since it was indexed: restart the run to index it again")


def _open_shards(
    paths: tuple[bytes, ...], *, scan: Callable[[bytes], Container], version: tuple[bytes, ...], sized: bool
) -> Index:
    """The index of shards, from the cache or by scanning several at a time.

    `version` tells one way to scan the same shards from another. Where the sizes of images are not known (not `sized`), the
    fingerprint covers the lengths of the shards instead.
    """
    root = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120 (bytes)
    shards = tuple(os.path.relpath(path, root) for path in paths)
    if len(set(shards)) < len(shards):
        twice = next(path for path in shards if shards.count(path) > 1)
        raise DsslError(f"{printable(twice)}: the shard is given twice")

    def scan_all() -> Index:
        started = time.time_ns()
        with thread_pool(8, "dssl-scan") as pool:
            containers = [*pool.map(scan, paths)]
        labels = {label for container in containers for label in container.labels if label is not None}
        # numbers in the order of numbers, anything else in that of bytes
        numbered = all(map(bytes.isdigit, labels))
        classes = sorted(labels, key=lambda name: (int(name), name)) if numbered else sorted(labels)
        for path, container in zip(shards, containers, strict=True):
            container.path = path
            container.skipped = [(b"%s/%s" % (path, name), reason) for name, reason in container.skipped]
        marks: list[bytes | None] = [
            container.path if sized else b"%s\0%d" % (container.path, container.length) for container in containers
        ]
        return build_index(root, containers, classes=classes, marks=marks, started=started)

    return kept_index(root, scan_all, shards=shards, options=version)


def _why_empty(shards: Found, index: Index) -> str:
    """One line for shards without images."""
    if index.skipped:
        path, reason = index.skipped[0]
        return f"{shards.name}: no readable image; {printable(path)}: {printable(reason)}"
    if shards.kind == ".parquet":
        return f"{shards.name}: no rows; expected a column of images with at least one"
    held = f"none of the {index.ignored:,} files in its shards is an image" if index.ignored else "its shards are empty"
    return f"{shards.name}: {held}; expected images such as 000017.jpg, each with a 000017.cls or .json if labelled"
