"""Data sets with unreadable files in them: name each, replace it, stop when there are too many; sample and measure the rest."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.augment import Normalization
from dssl.data.decode import UnreadableImage, naming
from dssl.data.pipeline import in_threads
from dssl.data.scale import Range, read_values
from dssl.data.source import Source
from dssl.errors import DsslError
from dssl.types import Image

T = TypeVar("T")
MAX_SHARE = 0.05
_SMALLEST = 1 / 255  # constant images have no deviation to divide by
_ATTEMPTS = 64
_RANGE_IMAGES, _VALUES = 1000, 1 << 25  # whose percentiles are taken, at most: images, and values (256 MB)


class Quarantine:
    """The unreadable files of a run: each is written once to a file (path, tab, reason), also by several processes.

    More than `max_share` of the data set is an error. Without a path they are only counted.
    """

    def __init__(self, source: Source, *, path: Path | None = None, max_share: float = MAX_SHARE) -> None:
        if not 0 <= max_share <= 1:
            raise DsslError(f"share of unreadable files {max_share}: expected a number from 0 to 1")
        self.source, self.path, self.max_share = source, path, max_share
        self.reasons: dict[str, str] = {}
        self._bad_indices: set[int] = set()
        self._lock = threading.Lock()
        self._names: set[bytes] = set()
        self._position = 0
        """The names in the file, up to a position in it: what other processes add comes behind."""
        if path is not None:
            with suppress(OSError), path.open("rb") as file:
                self._read_names(file)
        self._earlier = len(self._names)
        """How many names are of earlier sessions."""
        self.total = len(source) + len(source.skipped)
        """Everything in the source that looks like an image, readable or not."""
        self._add(dict(source.skipped))
        self._check()

    def __contains__(self, index: int) -> bool:
        """True for an image that is known to be unreadable."""
        return index in self._bad_indices

    def __len__(self) -> int:
        """How many of the ``total`` are known to be unreadable."""
        return len(self.source.skipped) + len(self._bad_indices)

    def record(self, index: int, error: UnreadableImage) -> None:
        """Record an unreadable image; raises an error when there are too many."""
        with self._lock:
            self._bad_indices.add(index)
            self._add({error.path: error.reason})
        self._check()

    def _add(self, reasons: Mapping[str, str]) -> None:
        new = {name: reason for name, reason in reasons.items() if name not in self.reasons}
        self.reasons |= new
        if self.path is not None and new:
            try:
                self._append(self.path, new)
            except OSError as error:
                name, reason = next(iter(new.items()))
                raise DsslError(
                    f"{self.path}: {error.strerror}: cannot record that {name} is unreadable ({reason})"
                ) from error

    def _append(self, path: Path, reasons: Mapping[str, str]) -> None:
        with path.open("a+b") as file:
            with suppress(OSError):  # some network disks have no locks, and a line may be repeated there
                fcntl.flock(file, fcntl.LOCK_EX)
            self._read_names(file)
            for name, reason in reasons.items():
                if name.encode() not in self._names:
                    file.write(f"{name}\t{reason}\n".encode())
            self._names |= {name.encode() for name in reasons}

    def _read_names(self, file: BinaryIO) -> None:
        """Read what has been added to the file since."""
        file.seek(self._position)
        lines = file.read().split(b"\n")[:-1]  # without what another process is writing
        self._position += sum(len(line) + 1 for line in lines)
        self._names |= {line.partition(b"\t")[0] for line in lines}

    def _check(self) -> None:
        """Stop the run when the known bad files alone are too many."""
        bad = max(len(self), len(self._names) - self._earlier)
        if bad > self.max_share * self.total:
            raise self.too_many(bad, self.total)

    def too_many(self, bad: int, of: int) -> DsslError:
        """The one line for a data set with too many unreadable files."""
        name, reason = next(iter(self.reasons.items()))
        where = f"; all are listed in {self.path}" if self.path is not None else ""
        return DsslError(
            f"{bad:,} of {of:,} images cannot be read, more than the allowed share of {self.max_share:.1%}: "
            f"the first is {name}: {reason}{where}"
        )


class Reader:
    """Reads images by index; an unreadable one is replaced by another, chosen by seed and index alone.

    Where ``labels`` are given, the other one has the same label.
    """

    def __init__(
        self, source: Source, *, seed: int, quarantine: Quarantine, labels: NDArray[np.int64] | None = None
    ) -> None:
        self.source, self.quarantine, self.labels = source, quarantine, labels
        self._stream = rng.key(seed, "replacement")

    def images(self, indices: list[int]) -> Iterator[Image]:
        """The images, or their replacements, in order."""
        good = [index not in self.quarantine for index in indices]  # as it is now: other threads add to it
        images = self.source.read([index for index, is_good in zip(indices, good, strict=True) if is_good])
        for index, is_good in zip(indices, good, strict=True):
            image = self._checked(index, next(images)) if is_good else None
            yield self._replacement(index) if image is None else image

    def _replacement(self, index: int) -> Image:
        candidates: Sequence[int] = range(len(self.source))
        if self.labels is not None:
            candidates = np.flatnonzero(self.labels == self.labels[index]).tolist()
        for draw in rng.bits(self._stream, np.array([index], np.int64), _ATTEMPTS)[0].tolist():
            other = candidates[draw % len(candidates)]
            if other not in self.quarantine:
                image = self._checked(other, next(self.source.read([other])))
                if image is not None:
                    return image
        raise DsslError(f"{self.source.label_of(index)}: unreadable, and so are {_ATTEMPTS} others tried in its place")

    def _checked(self, index: int, image: Image | UnreadableImage) -> Image | None:
        """The image; None for an unreadable one, which is recorded."""
        if not isinstance(image, UnreadableImage):
            return image
        self.quarantine.record(index, image)
        return None


def check_sample(
    source: Source, *, seed: int, quarantine: Quarantine, count: int = 64, threads: int | None = None
) -> list[tuple[int, ...]]:
    """Decode some images before a run starts, and return their shapes.

    Raises an error where so many are unreadable that the whole set must exceed the allowed share.
    """
    chosen = rng.permutation(rng.key(seed, "sample"), len(source))[:count]
    images = readable(chosen.tolist(), lambda index: source.image(index).shape, quarantine=quarantine, threads=threads)
    shapes = [shape for _, shape in images]
    # as many as would surprise by three standard deviations if the set had just the allowed share
    share, tried, bad = quarantine.max_share, len(chosen), len(chosen) - len(shapes)
    if bad > share * tried + 3 * (share * (1 - share) * tried) ** 0.5:
        raise quarantine.too_many(bad, tried)
    return shapes


def measure(
    source: Source,
    *,
    sample: int | None = 10_000,
    seed: int = 0,
    quarantine: Quarantine | None = None,
    threads: int | None = None,
) -> tuple[Normalization, int]:
    """Mean and standard deviation over `sample` images drawn by the seed (None: all), and how many of them were readable.

    Each image has the same weight, since a view has the same number of pixels whatever the size of its image.
    """
    quarantine = quarantine if quarantine is not None else Quarantine(source)
    chosen = np.arange(len(source), dtype=np.int64)
    if sample is not None and sample < len(source):
        chosen = rng.sample(rng.key(seed, "statistics"), len(source), sample)

    def moments(index: int) -> NDArray[np.float64]:
        pixels = source.image(index)
        # exact: from the counts of each value, so that the order of additions within an image does not matter
        counts = np.stack([np.bincount(pixels[:, :, c].ravel(), minlength=256) for c in range(pixels.shape[2])])
        values = np.arange(256) / 255
        powers: NDArray[np.float64] = np.stack([counts @ values, counts @ values**2]) / counts[0].sum()
        return powers

    images = [powers for _, powers in readable(chosen.tolist(), moments, quarantine=quarantine, threads=threads)]
    if not images:
        raise DsslError(f"{source.name}: no readable image to measure")
    mean, square = np.mean(images, axis=0)
    std = np.maximum(np.sqrt(np.maximum(square - mean**2, 0)), _SMALLEST)
    return Normalization(tuple(mean.tolist()), tuple(std.tolist())), len(images)


def measure_range(source: Source, percentiles: Range, *, channels: int) -> Range:
    """The values at the percentiles, channel by channel, over a sample of the images; each has the same weight."""
    chosen = rng.sample(rng.key(0, "range"), len(source), _RANGE_IMAGES)
    most = max(64, _VALUES // (len(chosen) * channels))

    def some_values(index: int) -> NDArray[np.float64]:
        with naming(source.label_of(index)):
            values = read_values(bytearray(source.content(index) or b""), channels=channels).reshape(-1, channels)
        # at random places, because a regular grid may fall on the lines of a sensor
        shares = rng.uniforms(rng.key(0, "range", "pixels"), np.array([index]), min(most, len(values)))[0]
        pixels: NDArray[np.float64] = values[(shares * len(values)).astype(np.int64)].astype(np.float64)
        return pixels

    quarantine = Quarantine(source, max_share=1.0)  # a run has its own, and names what is unreadable
    images = [values for _, values in readable(chosen.tolist(), some_values, quarantine=quarantine)]
    if not images:
        name, reason = next(iter(quarantine.reasons.items()))
        raise DsslError(f"{source.name}: no readable image to measure the range of; the first is {name}: {reason}")
    bounds = []
    for channel, values in enumerate(np.concatenate(images).T):
        values = values[np.isfinite(values)]
        if not len(values):
            raise DsslError(f"{source.name}: channel {channel + 1} has no finite values to measure the range of")
        low, high = np.percentile(values, percentiles.of_channel(channel)).tolist()
        bounds.append((low, high if high > low else low + 1.0))  # a constant channel becomes 0
    return Range(tuple(bounds))


def readable(
    indices: Sequence[int], function: Callable[[int], T], *, quarantine: Quarantine, threads: int | None = None
) -> Iterator[tuple[int, T]]:
    """Each image that can be read, in order, and the function of it; the others are recorded."""

    def attempt(index: int) -> T | None:
        try:
            return function(index)
        except UnreadableImage as error:
            quarantine.record(index, error)
            return None

    for index, value in zip(indices, in_threads(attempt, indices, threads=threads), strict=True):
        if value is not None:
            yield index, value
