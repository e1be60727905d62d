"""Packed copies of a data set: its pixels, decoded once and memory-mapped, for slow disks and few cores; or its files in shards,
tar for WebDataset or Parquet as Hugging Face's datasets lays it out.

Pixels are two files for each split: ``train.npy`` holds them, one image after the other, and ``train.json`` all else. Checksums
are verified whenever an image is read, so that a damaged one is named like any unreadable file.

Shards hold the images as they are, not decoded and encoded again, in a random order, so that every shard is a sample of the whole
and a window of shards mixes well. A shard gets its name, which says how many there are, when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl import rng
from dssl.data.decode import UnreadableImage, ending_of, naming, resize
from dssl.data.order import ShardOrder
from dssl.data.quarantine import Quarantine, readable
from dssl.data.scale import as_range
from dssl.data.shards import COPY, SHARDS, check_copy
from dssl.data.source import NoSplitError, Source, Split
from dssl.errors import DsslError
from dssl.files import printable, read_table, replacing, write_atomically, write_text
from dssl.types import Image

_DIGEST = b', "digest": '
Format = Literal["tar", "parquet"]
# a file of a copy, or what a kill left of it
_OURS = re.compile(r"\.?(train|test)(\.(npy|json|pack)|-\d+-of-\d+\.(tar|parquet))(\.\w+\.part)?")
_ROWS = 100  # of a row group: what is read at once


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
                f"packed:{printable(place)}: a single file has no test split: give the folder that contains both"
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
            self._pixels: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DsslError(
                f"{printable(path)}: {reason}; `dssl data pack SOURCE --out FOLDER` creates a new one"
            ) from error
        self._path, self._names = path, about["names"]
        self.value_range = as_range(about.get("range"))
        self.name = f"packed {about['name']}"
        self.fingerprint = str(about["fingerprint"])
        self.classes = None if about["classes"] is None else tuple(about["classes"])
        self.labels = None if self.classes is None else np.array(about["labels"], np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def image(self, index: int) -> Image:
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        pixels = self._pixels[begin:end]
        if zlib.crc32(pixels.data) != self._checksums[index]:
            raise UnreadableImage(f"{self._path}: {self.label_of(index)}", "the checksum of its pixels is wrong")
        return pixels.reshape(*self._shapes[:, index], self.channels)

    def label_of(self, index: int) -> str:
        """What the image was called in the original."""
        return str(self._names[index])


def pack(
    source: Source, path: Path, *, side: int, quarantine: Quarantine, progress: Callable[[int], object] | None = None
) -> int:
    """Write a packed copy with no shorter side above `side`; returns its bytes. Unreadable files are left out and recorded."""
    done = written = 0

    def shrunk(index: int) -> Image:
        return np.ascontiguousarray(shrink_to(source.image(index), side=side))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[tuple[int, int, int, int]] = []  # index, height, width, checksum
        with replacing(path) as temporary, temporary.open("wb") as file:
            _write_header(file, 0)
            begin = file.tell()
            for index, image in readable(range(len(source)), shrunk, quarantine=quarantine):
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
        raise _failed(path, error, done, len(source), written) from error


def _failed(place: Path, error: OSError, done: int, count: int, written: int) -> DsslError:
    needed = f", about {written * count / done / 1e9:.2f} GB are needed" if written else ""
    return DsslError(
        f"{printable(place)}: {error.strerror or error} after {done:,} of {count:,} images{needed}; the same command starts over"
    )


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


class _Sample(NamedTuple):
    number: int
    path: str
    content: bytes
    ending: str
    label: int | None


@contextmanager
def claimed(folder: Path, sources: Mapping[Split, Source]) -> Iterator[None]:
    """A folder for a packed copy of these splits, in any format, which counts as incomplete until the block ends.

    A folder that holds a copy already is an error, unless it is an incomplete one of the same images: that one goes.
    """
    record = read_table(folder / COPY)
    fingerprints = {split: source.fingerprint for split, source in sources.items()}
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in paths if _OURS.fullmatch(path.name)]
    copies = [path.name for path in paths if path.name[0] != "." and (path in ours or path.suffix in SHARDS)]
    copies += [COPY] if not record and folder / COPY in paths else []  # of someone else
    same = record.get("sources") == fingerprints
    if copies and (record.get("complete") is not False or not same):
        images = "a packed copy of these images" if same else f"{printable(copies[0])}, perhaps of other images"
        raise DsslError(f"{printable(folder)} already contains {images}: choose a new or empty folder")
    for path in ours:
        path.unlink()
    _note(folder, {"sources": fingerprints, "complete": False})
    yield
    _note(folder, {"sources": fingerprints, "complete": True})


def _note(folder: Path, record: dict[str, object]) -> None:
    try:
        write_text(folder / COPY, json.dumps(record))
    except OSError as error:
        raise DsslError(f"{printable(folder)}: {error.strerror}: expected a folder for the packed copy") from error


def write_shards(
    source: Source,
    folder: Path,
    *,
    split: Split,
    form: Format,
    shard: int,
    quarantine: Quarantine,
    progress: Callable[[int], object] | None = None,
) -> tuple[int, int]:
    """Write the shards of a split; returns their number and bytes. Unreadable images are left out and recorded."""
    count = -(-len(source) // shard)
    paths = [folder / f"{split}-{number:05d}-of-{count:05d}.{form}" for number in range(count)]
    # a random order would read a row group of Parquet for each image
    order = rng.permutation(rng.key(0, "pack"), len(source))
    if source.shards is not None and source.shuffle == "shards":
        order = ShardOrder(source.shards, batch_size=len(source), seed=0, window=source.window).at(0).indices
    written = done = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(paths):
            samples = _samples(
                source, order[number * shard : (number + 1) * shard].tolist(), number * shard, quarantine
            )
            with replacing(path) as temporary, temporary.open("wb") as file:
                for sample in (_write_tar if form == "tar" else _write_parquet)(file, samples, source.classes):
                    done = sample.number + 1
                    if progress is not None:
                        progress(done)
            written += path.stat().st_size
    except OSError as error:
        raise _failed(folder, error, done, len(source), written) from error
    if not done:
        for path in paths:
            path.unlink()
        raise DsslError(f"{source.name}: no readable image to pack")
    return len(paths), written


def _samples(source: Source, indices: list[int], first: int, quarantine: Quarantine) -> Iterator[_Sample]:
    """What can be read of these images, in order."""
    numbers = {index: number for number, index in enumerate(indices, first)}

    def sample(index: int) -> _Sample:
        name = source.label_of(index)
        image = source.image(index)  # decoded: a damaged one is found now and not in a run
        with naming(name):
            stored = source.content(index)
        content, ending = _encoded(image) if stored is None else (bytes(stored), ending_of(stored))
        label = None if source.labels is None else int(source.labels[index])
        return _Sample(numbers[index], name, content, ending, label)

    return (sample for _, sample in readable(indices, sample, quarantine=quarantine))


def _encoded(image: Image) -> tuple[bytes, str]:
    """An image that is not a file, and its extension: PNG where that has so many channels."""
    file = io.BytesIO()
    if image.shape[2] not in (1, 3):
        np.save(file, image, allow_pickle=False)
        return file.getvalue(), "npy"
    Pillow.fromarray(image if image.shape[2] == 3 else image[:, :, 0]).save(file, "PNG")
    return file.getvalue(), "png"


def _write_tar(file: BinaryIO, samples: Iterator[_Sample], classes: tuple[str, ...] | None) -> Iterator[_Sample]:
    """Each image, its label as a number for WebDataset, and its path and class in JSON."""
    for sample in samples:
        about: dict[str, object] = {"path": sample.path}
        members = [(sample.ending, sample.content)]
        if sample.label is not None:
            about |= {"label": sample.label, "class": classes[sample.label] if classes else str(sample.label)}
            members.append(("cls", b"%d" % sample.label))
        members.append(("json", json.dumps(about).encode()))
        for ending, content in members:
            header = tarfile.TarInfo(f"{sample.number:09d}.{ending}")
            header.size = len(content)
            file.write(header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % tarfile.BLOCKSIZE))
        yield sample
    file.write(bytes(2 * tarfile.BLOCKSIZE))


def _write_parquet(file: BinaryIO, samples: Iterator[_Sample], classes: tuple[str, ...] | None) -> Iterator[_Sample]:
    """The columns image (bytes and path) and label, with what datasets wants to know about them."""
    from dssl.data.parquet import pyarrow_module

    arrow = pyarrow_module()
    features: dict[str, object] = {"image": {"_type": "Image"}}
    fields = [arrow.field("image", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))]
    if classes is not None:
        fields.append(arrow.field("label", arrow.int64()))
        features["label"] = {"names": [*classes], "_type": "ClassLabel"}
    schema = arrow.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    # images are compressed already; a checksum finds what a disk has damaged
    with arrow.parquet.ParquetWriter(
        file, schema, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    ) as writer:
        while group := list(itertools.islice(samples, _ROWS)):
            columns: dict[str, list[object]] = {
                "image": [{"bytes": sample.content, "path": sample.path} for sample in group]
            }
            if classes is not None:
                columns["label"] = [sample.label for sample in group]
            writer.write_table(arrow.table(columns, schema=schema), row_group_size=_ROWS)
            yield from group
