"""Where images come from: one small protocol, and `open_source`, which turns what a user types into a data set."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import UnreadableImage, kind_of
from dssl.data.scale import MAX_CHANNELS, Range, parse_range
from dssl.errors import DsslError
from dssl.files import printable

if TYPE_CHECKING:
    from dssl.data.folder import Folder, ListFile
    from dssl.data.parquet import Parquet
    from dssl.data.tar import Tar
    from dssl.types import Image

Split = Literal["train", "test"]


class NoSplitError(DsslError):
    """The data has no such split; callers that can do without it catch this."""


class Source(Protocol):
    """A data set: images by index, from any number of threads."""

    name: str
    """For people."""
    fingerprint: str
    """Identifies the data: a resumed run checks that it has not changed."""
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...] | None

    def __len__(self) -> int:
        """The number of images."""

    def image(self, index: int) -> Image:
        """One image, in writable memory that must not be written to; raises UnreadableImage for a bad file."""

    def label_of(self, index: int) -> str:
        """What to call this image on a page: a path or "shapes train 17"."""


class InMemory:
    """A labelled data set that is held in memory whole."""

    def __init__(
        self, images: NDArray[np.uint8], *, labels: NDArray[np.int64], classes: tuple[str, ...], name: str, caption: str,
        fingerprint: str,
    ) -> None:  # fmt: skip
        self.name, self.fingerprint, self._images, self._caption = name, fingerprint, images, caption
        self.labels: NDArray[np.int64] | None = labels
        self.classes: tuple[str, ...] | None = classes

    def __len__(self) -> int:
        """The number of images."""
        return len(self._images)

    def image(self, index: int) -> Image:
        """One image."""
        image: Image = self._images[index]
        return image

    def label_of(self, index: int) -> str:
        """The caption and the number of the image."""
        return f"{self._caption} {index}"


class Subset:
    """Some images of a source, in a given order."""

    def __init__(self, source: Source, indices: NDArray[np.int64]) -> None:
        self.source, self.indices = source, indices
        self.name = f"{len(indices):,} images of {source.name}"
        digest = hashlib.blake2b(indices.astype("<i8").tobytes(), digest_size=16).hexdigest()
        self.fingerprint = f"{source.fingerprint}/{len(indices)}/{digest}"
        self.labels = None if source.labels is None else source.labels[indices]
        self.classes = source.classes

    def __len__(self) -> int:
        """The number of images."""
        return len(self.indices)

    def image(self, index: int) -> Image:
        """One image of the source."""
        return self.source.image(int(self.indices[index]))

    def read_many(self, indices: list[int]) -> Iterator[Image | UnreadableImage]:
        """Several images of the source."""
        return read_many(self.source, self.indices[indices].tolist())

    def label_of(self, index: int) -> str:
        """What the source calls it."""
        return self.source.label_of(int(self.indices[index]))

    def earlier_fingerprints(self) -> tuple[str, ...]:
        """Those of the source, with the same choice."""
        choice = self.fingerprint.removeprefix(self.source.fingerprint)
        return tuple(fingerprint + choice for fingerprint in earlier_fingerprints(self.source))


def open_source(
    text: str,
    *,
    split: Split = "train",
    channels: int = 3,
    shrink: int | None = None,
    value_range: str | Range | None = None,
    cache: bool = True,
) -> Source:
    """Open "shapes", "figures:2000", "cifar10:FOLDER_OR_ARCHIVE", "packed:FOLDER", a folder of images, a text list, or tar
    or Parquet shards: "shards/{000..127}.tar", "data/*.parquet#label=COLUMN", or a folder or text list of them.

    `channels`, `shrink` (see `decode.read_image`), `value_range` ("0,4095", or percentiles to be measured: "1%,99%") and
    `cache` (of the index) apply to folders, lists and shards. Photographs have 1 or 3 channels and no range; with another
    number of channels the range is "1%,99%" by default. `range_of` tells the range that was measured.
    """
    text = expanded(text)
    if split not in ("train", "test"):
        raise DsslError(f"split {split!r}: expected train or test")
    if not 1 <= channels <= MAX_CHANNELS:
        raise DsslError(f"channels {channels}: expected 1 to {MAX_CHANNELS}")
    kind, _, rest = text.partition(":")
    if kind in ("shapes", "figures", "cifar10"):
        if channels != 3:
            raise DsslError(f"{text}: its images have 3 channels, not {channels}")
        if value_range is not None:
            raise DsslError(f"{text}: its images have 8 bits, which need no range: leave out --range")
    if kind in ("shapes", "figures"):
        from dssl.data.shapes import Drawing, Shapes

        if text != kind and not (rest.isascii() and rest.isdigit()):
            raise DsslError(f"{text!r}: expected {kind} or {kind}:COUNT, such as {kind}:2000")
        # a count is the number of training images; the test split keeps its size, so that results stay comparable
        return Shapes(int(rest) if rest and split == "train" else None, split=split, drawing=cast("Drawing", kind))
    if text == "cifar10":
        raise DsslError("cifar10: no folder given: expected cifar10:FOLDER; `dssl data cifar10 FOLDER` downloads it")
    if kind == "cifar10":
        from dssl.data.cifar10 import Cifar10

        return Cifar10(rest, split=split)
    if kind == "packed" and rest:
        from dssl.data.packed import Packed

        packed = Packed(rest, split=split)
        if packed.channels != channels:
            raise DsslError(f"{text}: it was packed with {packed.channels} channels, not {channels}")
        if value_range is not None and parse_range(value_range, channels=channels) != packed.value_range:
            known = "no range" if packed.value_range is None else f"the range {packed.value_range.text()}"
            told = value_range if isinstance(value_range, str) else value_range.text()
            raise DsslError(f"{text}: it was packed with {known}, not {told}: leave out --range, or pack it again")
        return packed
    wanted = parse_range(value_range, channels=channels)
    source = _open_path(text, split=split, channels=channels, shrink=shrink, value_range=wanted, cache=cache)
    if wanted is not None and wanted.percent:
        from dssl.data.quarantine import measure_range

        # the test images are scaled as those that an encoder is trained on
        train = source if split == "train" else open_source(text, channels=channels, value_range=wanted, cache=cache)
        source.value_range = (
            range_of(train) if train is not source else measure_range(source, wanted, channels=channels)
        )
    return source


def range_of(source: Source) -> Range | None:
    """The values that became 0 and 255; None for photographs."""
    return range_of(source.source) if isinstance(source, Subset) else getattr(source, "value_range", None)


def _open_path(
    text: str, *, split: Split, channels: int, shrink: int | None, value_range: Range | None, cache: bool
) -> Folder | ListFile | Tar | Parquet:
    from dssl.data.find import find_shards
    from dssl.data.folder import Folder, ListFile
    from dssl.data.parquet import Parquet
    from dssl.data.tar import Tar

    shards = find_shards(text, split)
    if shards is not None:
        kind = Tar if shards.kind == ".tar" else Parquet
        return kind(shards, channels=channels, shrink=shrink, value_range=value_range, cache=cache)
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116 (pathlib would normalise the text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DsslError(
            f"data {printable(text)!r}: {reason}; expected shapes, figures, cifar10:FOLDER, packed:FOLDER, a folder of images, "
            "tar or Parquet shards, or a text list"
        ) from error
    if stat.S_ISDIR(mode):
        return Folder(text, split=split, channels=channels, shrink=shrink, value_range=value_range, cache=cache)
    if not stat.S_ISREG(mode):
        raise DsslError(f"data {printable(text)!r}: {kind_of(mode)}; expected a folder of images or a text list")
    if split == "test":
        raise NoSplitError(f"{printable(text)}: a list has no test split: give the list of test images instead")
    return ListFile(text, channels=channels, shrink=shrink, value_range=value_range)


def require_labels(source: Source) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels and classes for callers that need them; an error where there are none, or only one class."""
    if source.labels is None or source.classes is None:
        raise DsslError(
            f"{source.name}: no labels: expected one folder per class, a list with a label after a tab on each line, or shards "
            "with a .cls or .json beside each image"
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


def earlier_fingerprints(source: Source) -> tuple[str, ...]:
    """The fingerprints that earlier versions gave the same images, so that their runs resume."""
    found: tuple[str, ...] = source.earlier_fingerprints() if isinstance(source, _Renamed) else ()
    return found


def reading_of(source: Source) -> str:
    """How the images are read, where that can differ for one fingerprint: the columns of Parquet, the range of values."""
    if isinstance(source, Subset):
        return reading_of(source.source)
    options: tuple[bytes, ...] = getattr(source, "options", ())
    known = range_of(source)
    return " ".join([*(option.decode() for option in options), *([] if known is None else [known.text()])])


def stamp_of(source: Source) -> str:
    """Sizes and times of the files: for results that are kept, since a copy elsewhere shares the fingerprint.

    Empty for images that are in no files of their own.
    """
    indices: Iterable[int] = range(len(source))
    while isinstance(source, Subset):
        chosen = source.indices
        source, indices = source.source, [int(chosen[index]) for index in indices]
    return source.stamp(indices) if isinstance(source, _Stamped) else ""


def stamp_of_files(paths: Iterable[bytes]) -> str:
    """A digest of the sizes and times of files; of one that cannot be read, that it cannot."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 (bytes)
            digest.update(b"%d %d\n" % (status.st_size, status.st_mtime_ns))
        except OSError:
            digest.update(b"-\n")
    return digest.hexdigest()


@runtime_checkable
class _Stamped(Protocol):
    def stamp(self, indices: Iterable[int]) -> str: ...


@runtime_checkable
class _Renamed(Protocol):
    def earlier_fingerprints(self) -> tuple[str, ...]: ...


def read_many(source: Source, indices: list[int]) -> Iterator[Image | UnreadableImage]:
    """Images in order, an unreadable one as its error; a source with a method ``read_many`` reads several at once."""
    if isinstance(source, _ReadsMany):
        yield from source.read_many(indices)
        return
    for index in indices:
        try:
            yield source.image(index)
        except UnreadableImage as error:
            yield error


def any_readable(source: Source, indices: list[int]) -> bool:
    """Whether one of these images can be read now, though it could not be before: the disk may have been away."""
    return any(not isinstance(image, UnreadableImage) for image in read_many(source, indices))


@runtime_checkable
class _ReadsMany(Protocol):
    def read_many(self, indices: list[int]) -> Iterator[Image | UnreadableImage]: ...


@runtime_checkable
class InFiles(Protocol):
    """A source whose images are files of their own, or in shards."""

    def content(self, index: int) -> bytes | bytearray:
        """The bytes of one of them, not decoded."""


def skipped_files(source: Source) -> Sequence[tuple[str, str]]:
    """Path and reason of everything that the scan of a folder could not count as an image: a FIFO, a broken link."""
    return getattr(source, "skipped", ())
