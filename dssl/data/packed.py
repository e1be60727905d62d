"""A packed copy of a data set: decoded once, no larger than needed, memory-mapped; for slow disks and few cores.

One file for each split. The pixels come first, one image after the other, then the tables; the head of the file says where they
are. The checksum of an image is verified whenever it is read, so that a damaged one is named like any unreadable file.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl.data.decode import UnreadableImage, resize
from dssl.data.pipeline import in_threads
from dssl.data.quarantine import Quarantine
from dssl.data.scale import as_range
from dssl.data.source import NoSplitError, Source, Split
from dssl.errors import DsslError
from dssl.files import printable, replacing

if TYPE_CHECKING:
    from dssl.types import Image

_MAGIC = b"DSSLPCK1"
_DIGEST = 16
_TABLES = {"heights": "<u4", "widths": "<u4", "offsets": "<u8", "checksums": "<u4", "labels": "<i8", "name_ends": "<u8"}


class Packed(Source):
    """One split of a packed data set."""

    def __init__(self, place: str, *, split: Split = "train") -> None:
        path = Path(place)
        if path.is_dir():
            path /= f"{split}.pack"
            if split == "test" and not path.exists():
                raise NoSplitError(f"packed:{printable(place)}: no test split: test.pack is missing")
        elif split == "test":
            raise NoSplitError(
                f"packed:{printable(place)}: a single file has no test split: give the folder that holds both"
            )
        header, tables, self._names = _read_tables(path)
        self._heights, self._widths = tables["heights"], tables["widths"]
        self._offsets, self._checksums = tables["offsets"], tables["checksums"]
        self._name_ends = np.concatenate([[0], tables["name_ends"]])
        self.channels = int(header["channels"])
        self.value_range = as_range(header.get("range"))
        self._path = path
        # copy on write: writable memory for the kernels, while the file cannot change
        self._pixels = np.memmap(path, np.uint8, mode="c")
        self.name = f"packed {header['name']}"
        self.fingerprint = str(header["fingerprint"])
        self.classes = None if header["classes"] is None else tuple(header["classes"])
        self.labels = None if self.classes is None else tables["labels"]

    def __len__(self) -> int:
        """The number of images."""
        return len(self._heights)

    def image(self, index: int) -> Image:
        """One image, in mapped memory."""
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        pixels = np.asarray(self._pixels[begin:end])
        if zlib.crc32(pixels.data) != self._checksums[index]:
            raise UnreadableImage(f"{self._path}: {self.label_of(index)}", "the checksum of its pixels is wrong")
        return pixels.reshape(int(self._heights[index]), int(self._widths[index]), self.channels)

    def label_of(self, index: int) -> str:
        """What the image was called in the original."""
        return self._names[int(self._name_ends[index]) : int(self._name_ends[index + 1])].decode()


def pack(
    source: Source,
    path: Path,
    *,
    side: int,
    quarantine: Quarantine,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Write a packed copy with no shorter side above `side`; returns its bytes. Unreadable files are left out and recorded."""
    if side < 1:
        raise DsslError(f"side {side}: expected at least 1 pixel")
    done = written = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(_MAGIC + bytes(8))
            kept: list[tuple[int, int, int, int]] = []  # index, height, width, checksum
            for index, image in _shrunk(source, side, quarantine):
                kept.append((index, image.shape[0], image.shape[1], zlib.crc32(image.data)))
                file.write(image.data)
                done, written = index + 1, written + image.nbytes
                if progress is not None:
                    progress(done)
            if not kept:
                raise DsslError(f"{source.name}: no readable image to pack")
            _write_tables(file, source, kept, side=side, channels=image.shape[2])
            return file.tell()
    except OSError as error:
        needed = f", about {written * len(source) / done / 1e9:.2f} GB are needed" if done else ""
        raise DsslError(f"{path}: {error.strerror} after {done:,} of {len(source):,} images{needed}") from error


def _shrunk(source: Source, side: int, quarantine: Quarantine) -> Iterator[tuple[int, Image]]:
    """Index and resized image of all that can be read, in order."""

    def one(index: int) -> Image | None:
        try:
            image = source.image(index)
        except UnreadableImage as error:
            quarantine.record(index, error)
            return None
        return np.ascontiguousarray(shrink_to(image, side=side))

    everything = range(len(source))
    for index, image in zip(everything, in_threads(one, everything), strict=True):
        if image is not None:
            yield index, image


def shrink_to(image: Image, *, side: int) -> Image:
    """The image with its shorter side reduced to `side` (Pillow's bicubic filter); a smaller one stays as it is."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    if shorter <= side:
        return image
    size = (max(side, round(width * side / shorter)), max(side, round(height * side / shorter)))
    return resize(image, size, Pillow.Resampling.BICUBIC)


def _write_tables(
    file: BinaryIO, source: Source, kept: list[tuple[int, int, int, int]], *, side: int, channels: int
) -> None:
    """Append the tables and point to them from the head of the file."""
    index, height, width, checksum = (np.array(column, np.int64) for column in zip(*kept, strict=True))
    names = [source.label_of(int(number)).encode() for number in index]
    labels = np.zeros(len(kept), np.int64) if source.labels is None else source.labels[index]
    tables: dict[str, NDArray[np.int64]] = {
        "heights": height,
        "widths": width,
        "offsets": np.concatenate([[16], 16 + np.cumsum(height * width * channels)]),
        "checksums": checksum,
        "labels": labels,
        "name_ends": np.cumsum([len(name) for name in names]),
    }
    body = b"".join([*(tables[name].astype(kind).tobytes() for name, kind in _TABLES.items()), *names])
    content = hashlib.sha256(checksum.astype("<u4").tobytes() + height.tobytes() + width.tobytes())
    origin = hashlib.sha256(f"packed {source.fingerprint} {side} {channels}".encode() + content.digest())
    header = {
        "count": len(kept), "channels": channels, "name": source.name, "fingerprint": origin.hexdigest()[:32],
        "classes": None if source.labels is None or source.classes is None else list(source.classes),
    }  # fmt: skip
    if (value_range := source.value_range) is not None:
        header["range"] = value_range.plain()
    text = json.dumps(header).encode()
    position = file.tell()
    tail = position.to_bytes(8, "little") + len(text).to_bytes(8, "little") + text + body
    file.write(hashlib.blake2b(tail, digest_size=_DIGEST).digest() + tail)
    end = file.tell()
    file.seek(8)
    file.write(position.to_bytes(8, "little"))
    file.seek(end)


def _read_tables(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.int64]], bytes]:
    """Header, tables and names of a packed file; any damage is an error of one line."""
    try:
        with path.open("rb") as file:
            if file.read(8) != _MAGIC:
                raise ValueError("not a packed data set")
            position, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
            if not 16 <= position < size:
                raise ValueError("truncated")
            file.seek(position)
            digest, tail = file.read(_DIGEST), file.read()
        if (
            hashlib.blake2b(tail, digest_size=_DIGEST).digest() != digest
            or int.from_bytes(tail[:8], "little") != position
        ):
            raise ValueError("its tables are damaged")
        start = 16 + int.from_bytes(tail[8:16], "little")
        header: dict[str, Any] = json.loads(tail[16:start])
        body = tail[start:]
        tables, begin = {}, 0
        for name, kind in _TABLES.items():
            count = int(header["count"]) + (name == "offsets")
            tables[name] = np.frombuffer(body, kind, count, begin).astype(np.int64)
            begin += tables[name].size * np.dtype(kind).itemsize
        if tables["offsets"][-1] != position:
            raise ValueError("its tables do not match its pixels")
        return header, tables, body[begin:]
    except OSError as error:
        raise DsslError(
            f"{printable(str(path))}: {error.strerror}; `dssl data pack SOURCE --out FOLDER` creates one"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DsslError(
            f"{printable(str(path))}: {error}; `dssl data pack SOURCE --out FOLDER` creates a new one"
        ) from error
