"""Images in files: a folder, with or without class folders, ImageNet's layout, or a text list."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import EXTENSIONS, printable, read_image
from dssl.data.index import Index, open_index
from dssl.data.sources import expanded
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.types import Image  # which imports torch, and a look at data does not need it

_TEST = ("val", "valid", "validation", "test")
_BELOW = ("", "ILSVRC/Data/CLS-LOC")  # where ImageNet's own archive keeps its train and val


class NoSplitError(DsslError):
    """The data has no such split; callers that can do without it catch this."""


class Folder:
    """The images below a folder; their first subfolder is their class, unless some image lies in the folder itself."""

    def __init__(
        self, place: str, *, split: Literal["train", "test"] = "train", channels: int = 3, shrink: int | None = None,
        cache: bool = True,
    ) -> None:  # fmt: skip
        root, train = _split_folder(Path(place), split)
        self.index: Index = open_index(root, cache=cache)
        if len(self.index) == 0:
            kind = NoSplitError if split == "test" and not self.index.skipped else DsslError
            raise kind(_why_empty(root, self.index))
        self.name = f"{printable(str(root))} ({len(self.index):,} images)"
        # whole paths, as in the errors of files that fail to decode
        self.skipped = [
            (printable(os.path.join(self.index.root, path)), printable(reason))  # noqa: PTH118 (bytes)
            for path, reason in self.index.skipped
        ]
        self.classes, self.labels = _classes(self.index, root, train)
        self.fingerprint = self.index.fingerprint()
        self._channels, self._shrink = channels, shrink

    def __len__(self) -> int:
        """The number of images."""
        return len(self.index)

    def image(self, index: int) -> Image:
        """One image, decoded."""
        return read_image(self.index.path(index), channels=self._channels, shrink=self._shrink)

    def label_of(self, index: int) -> str:
        """The path below the folder, printable."""
        return printable(self.index.relative(index))

    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Up to 0.1.0 any folder train was a split: where it holds all the images, they are the same under other paths."""
        found = []
        for below in _BELOW:
            train = os.path.join(os.fsencode(below), b"train")  # noqa: PTH118 (bytes)
            used = (self.index.folders[number] for number in np.unique(self.index.folder_of))
            if all(folder == train or folder.startswith(train + b"/") for folder in used):
                found.append(open_index(os.path.join(self.index.root, train)).fingerprint())  # noqa: PTH118
        return tuple(found)


class ListFile:
    """The images that a text file names, one path a line, relative to it; a tab and a label may follow each."""

    def __init__(self, place: str, *, channels: int = 3, shrink: int | None = None) -> None:
        self._paths, names = _read_list(Path(place))
        self._base = os.fsencode(Path(place).parent.absolute())
        self.name = f"{printable(place)} ({len(self._paths):,} images)"
        self.classes: tuple[str, ...] | None = None
        self.labels: NDArray[np.int64] | None = None
        if names is not None:
            unique = sorted(set(names))
            position = {name: number for number, name in enumerate(unique)}
            self.classes = tuple(printable(name) for name in unique)
            self.labels = np.array([position[name] for name in names], np.int64)
        content = b"\n".join(self._paths) + b"\0" + b"\n".join(names or [])
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        self._channels, self._shrink = channels, shrink

    def __len__(self) -> int:
        """The number of images."""
        return len(self._paths)

    def image(self, index: int) -> Image:
        """One image, decoded."""
        path = os.path.join(self._base, self._paths[index])  # noqa: PTH118 (bytes)
        return read_image(path, channels=self._channels, shrink=self._shrink)

    def label_of(self, index: int) -> str:
        """The path as the list has it, printable."""
        return printable(self._paths[index])


def _split_folder(place: Path, split: Literal["train", "test"]) -> tuple[Path, Path | None]:
    """The folder of a split and, where there are splits, that of the training one, whose classes count for all."""
    for below in _BELOW:
        base = place / below
        train = base / "train"
        test = next((base / name for name in _TEST if (base / name).is_dir()), None)
        if test is not None and train.is_dir():
            return (train if split == "train" else test), train
        if split == "train" and _is_lone_split(train):
            return train, train
    if split == "test":
        raise NoSplitError(f"{place}: it has no test split: expected the folders train and val (or test) in it")
    return place, None


def _is_lone_split(train: Path) -> bool:
    """Whether train, without a test split beside it, is a split (all that is there, with class folders) and not a class."""
    try:
        (classes, loose), (folders, images) = _visible(train), _visible(train.parent)
    except OSError:
        return False
    return folders == {train.name} and not images and bool(classes) and not loose


def _visible(place: Path) -> tuple[set[str], set[str]]:
    """The names of the folders and of the images in a folder, without those that the scan passes over."""
    folders, images = set(), set()
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a loop of links
                is_folder = False
            if is_folder:
                folders.add(entry.name)
            elif entry.name.rpartition(".")[2].lower() in EXTENSIONS:
                images.add(entry.name)
    return folders, images


def holds(place: str, path: Path) -> bool:
    """Whether a path is inside of what is read as a folder of images, where a picture would become part of the data."""
    root = Path(expanded(place))
    if not root.is_dir():
        return False
    roots = {_split_folder(root, "train")[0]}
    with suppress(NoSplitError):
        roots.add(_split_folder(root, "test")[0])
    return any(path.resolve().is_relative_to(one.resolve()) for one in roots)


def _classes(index: Index, root: Path, train: Path | None) -> tuple[tuple[str, ...] | None, NDArray[np.int64] | None]:
    """Class names, sorted, and a label for each image; None and None where images lie outside of class folders."""
    first = [folder.partition(b"/")[0] for folder in index.folders]
    used = np.unique(index.folder_of)
    if any(first[number] == b"" for number in used):
        return None, None
    if train is not None and train != root:
        names = [os.fsencode(entry.name) for entry in os.scandir(train) if entry.is_dir() and entry.name[:1] != "."]
    else:
        names = [first[number] for number in used]
    unique = sorted(set(names))
    position = {name: number for number, name in enumerate(unique)}
    for number in used:
        if first[number] not in position:
            raise DsslError(f"{root}: the class {printable(first[number])!r} is not among the folders of {train}")
    of_folder = np.array([position.get(name, -1) for name in first], np.int64)
    return tuple(printable(name) for name in unique), of_folder[index.folder_of]


def _why_empty(root: Path, index: Index) -> str:
    """One line for a folder without images."""
    if index.skipped:
        path, reason = index.skipped[0]
        return f"{printable(str(root))}: no readable image in it; {printable(path)}: {printable(reason)}"
    if index.ignored:
        endings = ", ".join(f".{ending}" for ending in sorted(EXTENSIONS))
        return f"{printable(str(root))}: none of its {index.ignored:,} files is an image; looked for {endings}"
    return f"{printable(str(root))}: the folder is empty; expected images, in class folders or not"


def _read_list(place: Path) -> tuple[list[bytes], list[bytes] | None]:
    """Paths and labels (None where no line has one) of a list."""
    try:
        content = place.read_bytes()
    except OSError as error:
        raise DsslError(f"{printable(str(place))}: {error.strerror}") from error
    if b"\0" in content:
        raise DsslError(
            f"{printable(str(place))}: not a text list; expected one image path a line, or a folder of images"
        )
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
            raise DsslError(
                f"{printable(str(place))}: line {number}: some lines have a label after a tab and some have none"
            )
    if not paths:
        raise DsslError(f"{printable(str(place))}: the list is empty; expected one image path a line")
    return paths, labels or None
