"""A packed copy of a data set: decoded once, no larger than needed, memory-mapped; for slow disks and few cores.

Two files for each split: ``train.npy`` holds the pixels, one image after the other, and ``train.json`` all else. The checksum of
an image is verified whenever it is read, so that a damaged one is named like any unreadable file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl.data.decode import UnreadableImage, resize
from dssl.data.find import check_copy
from dssl.data.pipeline import in_threads
from dssl.data.quarantine import Quarantine
from dssl.data.scale import as_range
from dssl.data.source import NoSplitError, Source, Split
from dssl.errors import DsslError
from dssl.files import printable, replacing, write_atomically

if TYPE_CHECKING:
    from dssl.types import Image

_NO_RESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)  # MAP_NORESERVE: mmap has no name for it yet
_DIGEST = b', "digest": '


class Packed(Source):
    """One split of a packed data set."""

    def __init__(self, place: str, *, split: Split = "train") -> None:
        path = Path(place)
        if path.is_dir():
            check_copy(path)
            earlier = path / f"{split}.pack"
            path = earlier if earlier.exists() else path / f"{split}.npy"
            if split == "test" and not path.exists():
                raise NoSplitError(f"packed:{printable(place)}: no test split: test.npy is missing")
        elif split == "test":
            raise NoSplitError(
                f"packed:{printable(place)}: a single file has no test split: give the folder that holds both"
            )
        try:
            about = _read_json(path) if path.suffix == ".npy" else _read_earlier(path)
            self._shapes = np.array([about["heights"], about["widths"]], np.int64)
            self._checksums = np.array(about["checksums"], np.int64)
            self.channels = int(about["channels"])
            sizes = self._shapes.prod(axis=0) * self.channels
            self._offsets = np.cumsum(np.concatenate([[about["begin"]], sizes]))
            if self._offsets[-1] != about["end"]:
                raise ValueError("truncated, or of another copy")
            self._pixels = _mapped(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DsslError(
                f"{printable(str(path))}: {reason}; `dssl data pack SOURCE --out FOLDER` creates a new one"
            ) from error
        self._path, self._names = path, about["names"]
        self.value_range = as_range(about.get("range"))
        self.name = f"packed {about['name']}"
        self.fingerprint = str(about["fingerprint"])
        self.classes = None if about["classes"] is None else tuple(about["classes"])
        self.labels = None if self.classes is None else np.array(about["labels"], np.int64)

    def __len__(self) -> int:
        """The number of images."""
        return len(self._names)

    def image(self, index: int) -> Image:
        """One image, in mapped memory."""
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        pixels = np.asarray(self._pixels[begin:end])
        if zlib.crc32(pixels.data) != self._checksums[index]:
            raise UnreadableImage(f"{self._path}: {self.label_of(index)}", "the checksum of its pixels is wrong")
        return pixels.reshape(*self._shapes[:, index], self.channels)

    def label_of(self, index: int) -> str:
        """What the image was called in the original."""
        return str(self._names[index])


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, copied on write: writable memory for the kernels, while the file cannot change.

    No memory is reserved for such copies, so that a file may be larger than memory and swap.
    """
    with path.open("rb") as file:
        content = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    return np.frombuffer(content, np.uint8)


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
        rows: list[tuple[int, int, int, int]] = []  # index, height, width, checksum
        with replacing(path) as temporary, temporary.open("wb") as file:
            _write_header(file, 0)
            begin = file.tell()
            for index, image in _shrunk(source, side, quarantine):
                rows.append((index, image.shape[0], image.shape[1], zlib.crc32(image.data)))
                file.write(image.data)
                done, written = index + 1, written + image.nbytes
                if progress is not None:
                    progress(done)
            if not rows:
                raise DsslError(f"{source.name}: no readable image to pack")
            file.seek(0)
            _write_header(file, written)  # of the same length: NumPy leaves room for the number
        text = _described(source, rows, side=side, channels=image.shape[2], begin=begin)
        write_atomically(path.with_suffix(".json"), [text])
        return begin + written + len(text)
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


def _write_header(file: BinaryIO, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (count,)})


def _described(source: Source, rows: list[tuple[int, int, int, int]], *, side: int, channels: int, begin: int) -> bytes:
    """All but the pixels, in JSON, with a digest of the text before it."""
    index, height, width, checksum = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    content = hashlib.sha256(checksum.astype("<u4").tobytes() + height.tobytes() + width.tobytes())
    origin = hashlib.sha256(f"packed {source.fingerprint} {side} {channels}".encode() + content.digest())
    labels = None if source.classes is None else source.labels
    value_range = source.value_range
    about = {
        "name": source.name, "fingerprint": origin.hexdigest()[:32], "channels": channels, "begin": begin,
        "range": None if value_range is None else value_range.plain(),
        "classes": None if labels is None else source.classes,
        "labels": None if labels is None else labels[index].tolist(),
        "heights": height.tolist(), "widths": width.tolist(), "checksums": checksum.tolist(),
        "names": [source.label_of(int(number)) for number in index],
    }  # fmt: skip
    body = json.dumps(about).encode()[:-1]
    return body + _DIGEST + b'"%s"}' % hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _read_json(path: Path) -> dict[str, Any]:
    """What describes the pixels in a ``.npy``."""
    text, size = path.with_suffix(".json").read_bytes(), path.stat().st_size
    body, _, digest = text.rpartition(_DIGEST)
    if digest != b'"%s"}' % hashlib.blake2b(body, digest_size=16).hexdigest().encode():
        raise ValueError(f"{path.stem}.json is damaged")
    about: dict[str, Any] = json.loads(text)
    return about | {"end": size}


def _read_earlier(path: Path) -> dict[str, Any]:
    """The same of a ``.pack``, which earlier versions wrote: its tables are behind its pixels."""
    with path.open("rb") as file:
        if file.read(8) != b"DSSLPCK1":
            raise ValueError("not a packed data set")
        position, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        if not 16 <= position < size:
            raise ValueError("truncated")
        file.seek(position)
        digest, tail = file.read(16), file.read()
    if hashlib.blake2b(tail, digest_size=16).digest() != digest or int.from_bytes(tail[:8], "little") != position:
        raise ValueError("its tables are damaged")
    start = 16 + int.from_bytes(tail[8:16], "little")
    about: dict[str, Any] = json.loads(tail[16:start])
    count, tables = int(about["count"]), {}
    for name, kind in {
        "heights": "<u4", "widths": "<u4", "offsets": "<u8", "checksums": "<u4", "labels": "<i8", "ends": "<u8",
    }.items():  # fmt: skip
        table = np.frombuffer(tail, kind, count + (name == "offsets"), start)
        tables[name], start = table.astype(np.int64), start + table.nbytes
    ends = [0, *tables["ends"].tolist()]
    names = [tail[start + ends[place] : start + ends[place + 1]].decode() for place in range(count)]
    return about | tables | {"names": names, "begin": 16, "end": position}
