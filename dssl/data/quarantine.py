"""What to do with files that give no image: name them, replace them, and stop when they are too many."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dssl import rng
from dssl.data.decode import UnreadableImage
from dssl.data.parallel import in_threads
from dssl.data.sources import Source, skipped_files
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.types import Image  # which imports torch, and a look at data does not need it

MAX_SHARE = 0.05
_ATTEMPTS = 64


class Quarantine:
    """The unreadable files of one run: each is written once to a file (path, tab, reason), also by several processes.

    More of them than `max_share` of the data set raise an error. Without a path they are only counted.
    """

    def __init__(self, source: Source, *, path: Path | None = None, max_share: float = MAX_SHARE) -> None:
        if not 0 <= max_share <= 1:
            raise DsslError(f"share of unreadable files {max_share}: expected a number from 0 to 1")
        self.source, self.path, self.max_share = source, path, max_share
        self.reasons: dict[str, str] = {}
        self._bad_indices: set[int] = set()
        self._written: set[str] = set()
        self._lock = threading.Lock()
        skipped = skipped_files(source)
        self.total = len(source) + len(skipped)
        """All that looks like an image of the source, readable or not."""
        self._skipped = len(skipped)
        for name, reason in skipped:
            self._add(name, reason)
        self._check()

    def __contains__(self, index: int) -> bool:
        """True for an image that is known to be unreadable."""
        return index in self._bad_indices

    def __len__(self) -> int:
        """How many of the ``total`` are known to be unreadable."""
        return self._skipped + len(self._bad_indices)

    def record(self, index: int, error: UnreadableImage) -> None:
        """Take note of an unreadable image; raises where there are too many of them."""
        with self._lock:
            self._bad_indices.add(index)
            self._add(error.path, error.reason)
        self._check()

    def _add(self, name: str, reason: str) -> None:
        if name in self.reasons:
            return
        self.reasons[name] = reason
        if self.path is not None:
            try:
                self._append(self.path, name, reason)
            except OSError as error:
                raise DsslError(
                    f"{self.path}: {error.strerror}: cannot note that {name} is unreadable ({reason})"
                ) from error

    def _append(self, path: Path, name: str, reason: str) -> None:
        with path.open("a+b") as file:
            with suppress(OSError):  # some network disks have no locks; then a line may be repeated
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = {line.partition(b"\t")[0] for line in file.read().split(b"\n")}
            if name.encode() not in known:
                file.write(f"{name}\t{reason}\n".encode())
                file.flush()
                os.fsync(file.fileno())

    def _check(self) -> None:
        """Stop the run where the known bad files alone are too many."""
        if len(self) > self.max_share * self.total:
            raise self.too_many(len(self), self.total)

    def too_many(self, bad: int, of: int) -> DsslError:
        """The one line for a data set with too many unreadable files."""
        name, reason = next(iter(self.reasons.items()))
        where = f"; all are listed in {self.path}" if self.path is not None else ""
        return DsslError(
            f"{bad:,} of {of:,} images cannot be read, more than the allowed share of {self.max_share:.1%}: "
            f"the first is {name}: {reason}{where}"
        )


class Reader:
    """Reads images by index; a bad one is replaced by another, chosen by seed and index alone."""

    def __init__(self, source: Source, *, seed: int, quarantine: Quarantine) -> None:
        self.source, self.quarantine = source, quarantine
        self._stream = rng.key(seed, "replacement")

    def read(self, index: int) -> Image:
        """The image, or its replacement."""
        image = self._try(index)
        if image is not None:
            return image
        draws = rng.bits(self._stream, np.array([index], np.int64), _ATTEMPTS)[0]
        for draw in draws.tolist():
            image = self._try(draw % len(self.source))
            if image is not None:
                return image
        raise DsslError(f"{self.source.label_of(index)}: unreadable, and so are {_ATTEMPTS} others tried in its place")

    def _try(self, index: int) -> Image | None:
        if index in self.quarantine:
            return None
        try:
            return self.source.image(index)
        except UnreadableImage as error:
            self.quarantine.record(index, error)
            return None


def check_sample(
    source: Source, *, seed: int, quarantine: Quarantine, count: int = 64, threads: int | None = None
) -> list[tuple[int, ...]]:
    """Decode some images before a run starts, and return their shapes.

    Raises where so many are unreadable that the whole set must have more than the allowed share of them.
    """
    chosen = rng.permutation(rng.key(seed, "sample"), len(source))[:count]

    def shape_of(index: int) -> tuple[int, ...] | None:
        try:
            return source.image(index).shape
        except UnreadableImage as error:
            quarantine.record(index, error)
            return None

    shapes = [shape for shape in in_threads(shape_of, chosen.tolist(), threads=threads) if shape is not None]
    # as many as would surprise by three standard deviations if the set had just the allowed share
    share, tried, bad = quarantine.max_share, len(chosen), len(chosen) - len(shapes)
    if bad > share * tried + 3 * (share * (1 - share) * tried) ** 0.5:
        raise quarantine.too_many(bad, tried)
    return shapes
