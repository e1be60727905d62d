"""Where images come from: what every data set has, and parts of one."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.data.decode import UnreadableImage
from dssl.data.scale import Range
from dssl.errors import DsslError
from dssl.types import Image

Split = Literal["train", "test"]
Shuffle = Literal["images", "shards"]


class NoSplitError(DsslError):
    """The data has no such split; callers that can do without it catch this."""


class Source(ABC):
    """A data set: images by index, from any number of threads."""

    name: str
    """For people."""
    fingerprint: str
    """Identifies the data: a resumed run checks that it has not changed."""
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None
    value_range: Range | None = None
    """The values that became 0 and 255; None for photographs."""
    skipped: Sequence[tuple[str, str]] = ()
    """Path and reason of everything that could not be counted as an image: a FIFO, a broken link."""
    options: tuple[bytes, ...] = ()
    """What tells one way to read the same files from another: the columns of Parquet."""
    shards: NDArray[np.int64] | None = None
    """Where the images of each shard begin, and the last one's end; None for images that are not in shards."""
    shuffle: Shuffle = "images"
    """The order that suits it."""
    window: int = 16
    """How many shards are mixed in the order of shards."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of images."""

    @abstractmethod
    def image(self, index: int) -> Image:
        """One image, in memory that must not be written to; raises UnreadableImage for a bad file."""

    def label_of(self, index: int) -> str:
        """What to call this image on a page: a path or "shapes train 17"."""
        return f"{self.name} {index}"

    def read(self, indices: Sequence[int]) -> Iterator[Image | UnreadableImage]:
        """Images in order, an unreadable one as its error."""
        for index in indices:
            try:
                yield self.image(index)
            except UnreadableImage as error:
                yield error

    def any_readable(self, indices: Sequence[int]) -> bool:
        """Whether one of these images can be read now, though it could not be before: the disk may have been away."""
        return any(not isinstance(image, UnreadableImage) for image in self.read(indices))

    def content(self, index: int) -> bytes | bytearray | None:
        """The bytes of one image as they are in its file, not decoded; None for an image that is in none."""
        return None

    def read_ahead(self, shards: NDArray[np.int64]) -> None:  # noqa: B027 (most sources have nothing to prepare)
        """Prepare for shards whose images will be asked for."""

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        """Of the sizes and times of the files of all images, or of these: a copy elsewhere shares the fingerprint alone.

        No file is looked at twice. Empty for images that are in no files of their own.
        """
        return ""

    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Those that earlier versions gave the same images, so that their runs resume."""
        return ()

    @property
    def reading(self) -> str:
        """How the images are read, if that can differ for one fingerprint: the columns of Parquet, the range of values."""
        bounds = [] if self.value_range is None else [self.value_range.text()]
        return " ".join([*(option.decode() for option in self.options), *bounds])


class InMemory(Source):
    """A labelled data set that is held in memory whole."""

    def __init__(
        self, images: NDArray[np.uint8], *, labels: NDArray[np.int64], classes: tuple[str, ...], name: str, caption: str,
        fingerprint: str,
    ) -> None:  # fmt: skip
        self.name, self.fingerprint, self._images, self._caption = name, fingerprint, images, caption
        self.labels, self.classes = labels, classes

    def __len__(self) -> int:
        return len(self._images)

    def image(self, index: int) -> Image:
        image: Image = self._images[index]
        return image

    def label_of(self, index: int) -> str:
        return f"{self._caption} {index}"


class Subset(Source):
    """Some images of a source, in a given order."""

    def __init__(self, source: Source, indices: NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices
        self.name = f"{len(indices):,} images of {source.name}"
        digest = hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
        self._choice = f"/{len(indices)}/{digest}"
        self.fingerprint = source.fingerprint + self._choice
        self.labels = None if source.labels is None else source.labels[indices]
        self.classes, self.value_range, self.options = source.classes, source.value_range, source.options
        if source.shards is not None and (np.diff(indices) > 0).all():
            self.shards = np.searchsorted(indices, source.shards)
            self.shuffle, self.window = source.shuffle, source.window

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image:
        return self.source.image(int(self.indices[index]))

    def label_of(self, index: int) -> str:
        return self.source.label_of(int(self.indices[index]))

    def read(self, indices: Sequence[int]) -> Iterator[Image | UnreadableImage]:
        return self.source.read(self.indices[list(indices)].tolist())

    def content(self, index: int) -> bytes | bytearray | None:
        return self.source.content(int(self.indices[index]))

    def read_ahead(self, shards: NDArray[np.int64]) -> None:
        self.source.read_ahead(shards)

    def stamp(self, indices: Sequence[int] | None = None) -> str:
        return self.source.stamp((self.indices if indices is None else self.indices[list(indices)]).tolist())

    def earlier_fingerprints(self) -> tuple[str, ...]:
        return tuple(fingerprint + self._choice for fingerprint in self.source.earlier_fingerprints())


def split_off(source: Source, *, share: float, seed: int) -> tuple[Subset, Subset]:
    """All images of a labelled source but a share of each class, and that share; which ones follows from seed and path alone.

    Every class keeps a training image, and one with two or more has a test image.
    """
    labels, _ = require_labels(source)
    keys = [rng.key(seed, "split", source.label_of(row)) for row in range(len(source))]
    drawn = np.argsort(np.array(keys, np.uint64), kind="stable")
    test = np.zeros(len(source), np.bool_)
    for label in np.unique(labels):
        rows = drawn[labels[drawn] == label]
        test[rows[: min(len(rows) - 1, max(1, round(share * len(rows))))]] = True
    return Subset(source, np.flatnonzero(~test)), Subset(source, np.flatnonzero(test))


def require_labels(source: Source) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels and classes for callers that need them; an error if there are none, or only one class."""
    if source.labels is None or source.classes is None:
        raise DsslError(
            f"{source.name}: no labels: expected one folder per class, a list with a label after a tab on each line, shards "
            "with a .cls or .json next to each image, or items (image, label) of a Python object"
        )
    if len(np.unique(source.labels)) < 2:
        raise DsslError(f"{source.name}: only one class, {source.classes[source.labels[0]]!r}: expected at least two")
    return source.labels, source.classes


def expanded(text: str) -> str:
    """The text with a ~ at the beginning of its path replaced by the home folder: ~/photos, cifar10:~/cifar."""
    kind, colon, place = text.partition(":")
    if colon and kind in ("cifar10", "packed"):
        return f"{kind}:{os.path.expanduser(place)}"  # noqa: PTH111 (an unknown user is left as it is, not an error)
    return os.path.expanduser(text)  # noqa: PTH111 (as above)


def size_and_time(path: bytes) -> tuple[int, int]:
    """Of a file; -1 twice for one that cannot be found."""
    try:
        status = os.stat(path)  # noqa: PTH116 (bytes)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def stamp_of(files: Iterable[Sequence[int]]) -> str:
    """A digest of the sizes and times of files."""
    digest = hashlib.blake2b(digest_size=16)
    for size, time in files:
        digest.update(b"-\n" if size < 0 else b"%d %d\n" % (size, time))
    return digest.hexdigest()
