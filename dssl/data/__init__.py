"""Images from anywhere, in an order and with views that depend only on seed, epoch and step."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import cast

from dssl.data.decode import UnreadableImage, kind_of
from dssl.data.folder import Folder, ListFile, splits_of
from dssl.data.quarantine import Quarantine, check_sample, measure, measure_range
from dssl.data.scale import MAX_CHANNELS, Range, parse_range
from dssl.data.shards import columns_in, find_shards, shards_in
from dssl.data.source import NoSplitError, Source, Split, Subset, expanded, require_labels, split_off
from dssl.errors import DsslError
from dssl.files import printable

__all__ = [
    "NoSplitError", "Quarantine", "Source", "Subset", "UnreadableImage", "check_sample", "measure", "open_source",
    "register_source", "require_labels", "split_off",
]  # fmt: skip


_registered: dict[str, Callable[[str, Split, int], Source]] = {}


def register_source(prefix: str, open: Callable[[str, Split, int], Source]) -> None:
    """Make ``prefix:PLACE`` name images of a source of your own.

    Args:
        prefix: A word that is not in use.
        open: ``open(PLACE, split, channels)`` gives the source; it raises ``NoSplitError`` for a split that it lacks.
    """
    if not prefix.isidentifier() or prefix in ("shapes", "figures", "cifar10", "packed", "python"):
        raise DsslError(f"a source {prefix!r} cannot be registered: expected a word that is not in use")
    _registered[prefix] = open


def open_source(
    text: str, *, split: Split = "train", channels: int = 3, value_range: str | Range | None = None
) -> Source:
    """Open "shapes", "figures:2000", "cifar10:FOLDER_OR_ARCHIVE", "packed:FOLDER", a folder of images, a text list, or tar
    or Parquet shards: "shards/{000..127}.tar", "data/*.parquet#label=COLUMN", or a folder or text list of them.

    `channels` and `value_range` ("0,4095", or percentiles to be measured: "1%,99%") apply to folders, lists and shards.
    Photographs have 1 or 3 channels and no range; with another number of channels the range is "1%,99%" by default.
    `Source.value_range` is the range that was measured.
    """
    text = expanded(text)
    if split not in ("train", "test"):
        raise DsslError(f"split {split!r}: expected train or test")
    if not 1 <= channels <= MAX_CHANNELS:
        raise DsslError(f"channels {channels}: expected 1 to {MAX_CHANNELS}")
    kind, colon, rest = text.partition(":")
    if colon and kind in (*_registered, "python"):
        if value_range is not None:
            raise DsslError(f"{text}: a source of Python scales its values itself: leave out --range")
        if kind in _registered:
            return _registered[kind](rest, split, channels)
        from dssl.data.objects import open_held

        return open_held(rest, split, channels)
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
        return _open_packed(rest, split=split, channels=channels, value_range=value_range)
    bounds = parse_range(value_range, channels=channels)
    source = _open_path(text, split=split, channels=channels, value_range=bounds)
    if bounds is not None and bounds.percent:
        # the test images are scaled as those that an encoder is trained on
        train = open_source(text, channels=channels, value_range=bounds) if split == "test" else None
        source.value_range = measure_range(source, bounds, channels=channels) if train is None else train.value_range
    return source


def _open_packed(place: str, *, split: Split, channels: int, value_range: str | Range | None) -> Source:
    from dssl.data.packed import Packed

    packed = Packed(place, split=split)
    if packed.channels != channels:
        raise DsslError(f"packed:{place}: it was packed with {packed.channels} channels, not {channels}")
    if value_range is not None and parse_range(value_range, channels=channels) != packed.value_range:
        stored = "no range" if packed.value_range is None else f"the range {packed.value_range.text()}"
        given = value_range if isinstance(value_range, str) else value_range.text()
        raise DsslError(
            f"packed:{place}: it was packed with {stored}, not {given}; leave out --range, or pack it again"
        )
    return packed


def _open_path(text: str, *, split: Split, channels: int, value_range: Range | None) -> Source:
    """A folder, a text list or shards."""
    from dssl.data.parquet import Parquet
    from dssl.data.tar import Tar

    place, columns = columns_in(text)
    splits = splits_of(Path(place)) if os.path.isdir(place) else None  # noqa: PTH112 (a text)
    shards = find_shards(place, split, columns=columns) if splits is None else shards_in(splits, split, columns=columns)
    if shards is not None:
        kind = Tar if shards.kind == ".tar" else Parquet
        return kind(shards, channels=channels, value_range=value_range)
    if splits is not None:
        return Folder(splits, split=split, channels=channels, value_range=value_range)
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116 (pathlib would normalise the text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DsslError(
            f"data {printable(text)!r}: {reason}; expected shapes, figures, cifar10:FOLDER, packed:FOLDER, a folder of images, "
            "tar or Parquet shards, or a text list"
        ) from error
    if not stat.S_ISREG(mode):
        raise DsslError(f"data {printable(text)!r}: {kind_of(mode)}; expected a folder of images or a text list")
    if split == "test":
        raise NoSplitError(f"{printable(text)}: a list has no test split: give the list of test images instead")
    return ListFile(text, channels=channels, value_range=value_range)
