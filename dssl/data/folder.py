"""Images in files: a folder with or without class folders, ImageNet's layout, or a text list."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import EXTENSIONS, UnreadableImage, read_image, read_images
from dssl.data.index import UNSEEN, Index, classes_of, endings_of, open_index
from dssl.data.scale import Range
from dssl.data.source import NoSplitError, Source, Split, expanded, size_and_time, stamp_of
from dssl.errors import DsslError
from dssl.files import printable
from dssl.types import Image

TEST = ("val", "valid", "validation", "test")
_RUN = {"config.json", "checkpoints"}  # what every folder of a run holds
_BELOW = ("", "ILSVRC/Data/CLS-LOC")  # where ImageNet's own archive keeps its train and val


class Files(Source):
    """Images that are files of their own."""

    def __init__(self, stats: NDArray[np.int64], *, channels: int, value_range: Range | None) -> None:
        self._channels, self.value_range, self._stats = channels, value_range, stats

    @abstractmethod
    def path(self, index: int) -> bytes:
        """The file of one image."""

    def __len__(self) -> int:
        return len(self._stats)

    def image(self, index: int) -> Image:
        return read_image(self.path(index), channels=self._channels, value_range=self.value_range)

    def read(self, indices: Sequence[int]) -> Iterator[Image | UnreadableImage]:
        return read_images(map(self.path, indices), channels=self._channels, value_range=self.value_range)

    def content(self, index: int) -> bytes:
        return Path(os.fsdecode(self.path(index))).read_bytes()

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        """Of the files of these images, as they were when they were first looked at."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, np.int64)
        for index in chosen[self._stats[chosen, 0] == UNSEEN].tolist():
            self._stats[index] = size_and_time(self.path(index))
        return stamp_of(self._stats[chosen].tolist())


class Folder(Files):
    """The images below a folder; their first subfolder is their class, unless some image lies in the folder itself."""

    def __init__(
        self, splits: Splits, *, split: Split = "train", channels: int = 3, value_range: Range | None = None
    ) -> None:
        photos, root = value_range is None, splits.folder(split)
        self.index: Index = open_index(root, photos=photos)
        super().__init__(self.index.stats, channels=channels, value_range=value_range)
        if len(self.index) == 0:
            kind = NoSplitError if split == "test" and not self.index.skipped else DsslError
            raise kind(_why_empty(root, self.index, photos=photos))
        self.name = f"{printable(root)} ({len(self.index):,} images)"
        self.skipped = self.index.skipped_paths()
        # whose classes the labels count
        first = self.index if root == splits.train else open_index(splits.train, photos=photos, sizes=False)
        problem = f"has no image in {printable(first.root)}"
        self.classes, self.labels = classes_of(self.index, first, printable(self.index.root), problem)
        self.fingerprint = self.index.fingerprint
        self._around = splits.place if splits.test is None and splits.place != root else None

    def path(self, index: int) -> bytes:
        return self.index.path(index)

    def label_of(self, index: int) -> str:
        """The path below the folder, printable."""
        return printable(self.index.relative(index))

    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Those that covered folders without images; beside such a folder, a lone train was a class and not a split."""
        earlier = {self.index.earlier_fingerprint()}
        if self._around is not None:
            around = open_index(self._around, photos=self.value_range is None)
            earlier |= {around.earlier_fingerprint()} if len(around) == len(self.index) else set()
        return tuple(earlier - {self.fingerprint})


class GivenFiles(Files):
    """The images in files that are named one by one; a relative path is one below `base`."""

    def __init__(
        self, paths: list[bytes], *, base: Path = Path(), channels: int = 3, value_range: Range | None = None
    ) -> None:
        super().__init__(np.full((len(paths), 2), UNSEEN), channels=channels, value_range=value_range)
        self._paths, self._base = paths, os.fsencode(base.absolute())
        self.name = f"{len(paths):,} files"
        self.fingerprint = hashlib.blake2b(b"\n".join(paths), digest_size=16).hexdigest()

    def path(self, index: int) -> bytes:
        return os.path.join(self._base, self._paths[index])  # noqa: PTH118 (bytes)

    def label_of(self, index: int) -> str:
        """The path as it was given, printable."""
        return printable(self._paths[index])


class ListFile(GivenFiles):
    """The images that a text file lists, one path per line, relative to it; a tab and a label may follow."""

    def __init__(self, place: str, *, channels: int = 3, value_range: Range | None = None) -> None:
        paths, names = _read_list(Path(place))
        super().__init__(paths, base=Path(place).parent, channels=channels, value_range=value_range)
        self.name = f"{printable(place)} ({len(paths):,} images)"
        if names is not None:
            unique = sorted(set(names))
            position = {name: number for number, name in enumerate(unique)}
            self.classes = tuple(printable(name) for name in unique)
            self.labels = np.array([position[name] for name in names], np.int64)
        content = b"\n".join(paths) + b"\0" + b"\n".join(names or [])
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Splits:
    """The folders of a data set; without a split of its own, the training images are in the folder itself."""

    place: Path
    train: Path
    test: Path | None = None

    def folder(self, split: Split) -> Path:
        """The folder of a split."""
        if split == "train":
            return self.train
        if self.test is None:
            raise NoSplitError(f"{self.place}: no test split: expected the folders train and val (or test) in it")
        return self.test


def splits_of(place: Path) -> Splits:
    """The splits in a folder, by their names: the classes of the training folder apply to both."""
    for below in _BELOW:
        train = place / below / "train"
        # not Path.is_dir, which fails in a folder that cannot be entered: the scan says so
        test = next((train.with_name(name) for name in TEST if os.path.isdir(train.with_name(name))), None)  # noqa: PTH112
        if test is not None and os.path.isdir(train):  # noqa: PTH112
            return Splits(place, train, test)
        if _is_lone_split(train):
            return Splits(place, train)
    return Splits(place, place)


def _is_lone_split(train: Path) -> bool:
    """Whether train, without a test split beside it, is a split (class folders with all the images) and not a class."""
    inside, around = visible(train), visible(train.parent)
    if inside is None or around is None:
        return False
    (classes, loose, _), (folders, images, _) = inside, around
    if images or loose or not classes or train.name not in folders:
        return False
    return not any(_holds_images(train.parent / name) for name in folders - {train.name})


def _holds_images(folder: Path) -> bool:
    """Whether images are somewhere below a folder; the pictures of a run do not count."""
    for _, folders, files in os.walk(folder):
        if {*folders, *files} >= _RUN:
            folders.clear()
        elif any(not name.startswith(".") and _is_image(name) for name in files):
            return True
        folders[:] = [name for name in folders if not name.startswith(".")]
    return False


def _is_image(name: str) -> bool:
    return name.rpartition(".")[2].lower() in EXTENSIONS and "." in name


def visible(place: Path) -> tuple[set[str], set[str], set[str]] | None:
    """The names of the folders, images and other files in a folder, without hidden ones; None for one that cannot be read."""
    for _, folders, files in os.walk(place):
        names = {name for name in files if not name.startswith(".")}
        images = {name for name in names if _is_image(name)}
        return {name for name in folders if not name.startswith(".")}, images, names - images
    return None


def holds(place: str, path: Path) -> bool:
    """Whether a path is inside a folder that is read as images, where a picture would become part of the data."""
    root = Path(expanded(place))
    if not root.is_dir():
        return False
    splits = splits_of(root)
    folders = [splits.train, *([splits.test] if splits.test is not None else [])]
    return any(path.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _why_empty(root: Path, index: Index, *, photos: bool) -> str:
    """One line for a folder without images."""
    if index.skipped:
        path, reason = index.skipped[0]
        return f"{printable(root)}: no readable image; {printable(path)}: {printable(reason)}"
    if index.ignored:
        endings = ", ".join(f".{ending.decode()}" for ending in sorted(endings_of(photos=photos)))
        return f"{printable(root)}: none of its {index.ignored:,} files is an image; expected {endings}"
    return f"{printable(root)}: the folder is empty; expected images, in class folders or not"


def _read_list(place: Path) -> tuple[list[bytes], list[bytes] | None]:
    """The paths of a list, and its labels (None where no line has one)."""
    try:
        content = place.read_bytes()
    except OSError as error:
        raise DsslError(f"{printable(place)}: {error.strerror}") from error
    if b"\0" in content:
        raise DsslError(f"{printable(place)}: not a text list; expected one image path per line, or a folder of images")
    paths, labels = [], []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        if not line:
            continue
        path, tab, label = line.partition(b"\t")
        paths.append(path)
        if tab:
            labels.append(label)
        if len(labels) not in (0, len(paths)):
            raise DsslError(f"{printable(place)}: line {number}: some lines have a label after a tab, others do not")
    if not paths:
        raise DsslError(f"{printable(place)}: the list is empty; expected one image path per line")
    return paths, labels or None
