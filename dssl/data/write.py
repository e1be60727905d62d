"""Shards written from any source: tar files for WebDataset, or Parquet files as Hugging Face's datasets lays them out.

Images are written as they are, not decoded and encoded again, in a random order, so that every shard is a sample of the whole
and a window of shards mixes well. A shard gets its name, which says how many there are, when it is complete.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
from PIL import Image as Pillow

from dssl import rng
from dssl.data.decode import UnreadableImage, ending_of, naming
from dssl.data.find import COPY, SHARDS, copy_record
from dssl.data.order import ShardOrder
from dssl.data.pipeline import in_threads
from dssl.data.quarantine import Quarantine
from dssl.data.source import Source, Split
from dssl.errors import DsslError
from dssl.files import printable, replacing, write_text

if TYPE_CHECKING:
    from dssl.types import Image

Format = Literal["tar", "parquet"]
# a file of a copy, or what a kill left of it
_OURS = re.compile(r"\.?(train|test)(\.(npy|json|pack)|-\d+-of-\d+\.(tar|parquet))(\.\w+\.part)?")
_ROWS = 100  # of a row group: what is read at once


@dataclass(frozen=True, slots=True)
class _Sample:
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
    record = copy_record(folder)
    fingerprints = {split: source.fingerprint for split, source in sources.items()}
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = [path for path in paths if _OURS.fullmatch(path.name)]
    copies = [path.name for path in paths if path.name[0] != "." and (path in ours or path.suffix in SHARDS)]
    copies += [COPY] if not record and folder / COPY in paths else []  # of someone else
    same = record.get("sources") == fingerprints
    if copies and (record.get("complete") is not False or not same):
        images = "a packed copy of these images" if same else f"{printable(copies[0])}, perhaps of other images"
        raise DsslError(f"{printable(str(folder))} already holds {images}: name a new or empty folder")
    for path in ours:
        path.unlink()
    _note(folder, {"sources": fingerprints, "complete": False})
    yield
    _note(folder, {"sources": fingerprints, "complete": True})


def _note(folder: Path, record: dict[str, object]) -> None:
    try:
        write_text(folder / COPY, json.dumps(record))
    except OSError as error:
        raise DsslError(f"{printable(str(folder))}: {error.strerror}: expected a folder for the packed copy") from error


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
    if shard < 1:
        raise DsslError(f"a shard of {shard} images: expected at least 1")
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
        needed = f", about {written * len(source) / done / 1e9:.2f} GB are needed" if written else ""
        raise DsslError(
            f"{printable(str(folder))}: {error.strerror or error} after {done:,} of {len(source):,} images{needed}; the same "
            "command starts over"
        ) from error
    if not done:
        for path in paths:
            path.unlink()
        raise DsslError(f"{source.name}: no readable image to pack")
    return len(paths), written


def _samples(source: Source, indices: list[int], first: int, quarantine: Quarantine) -> Iterator[_Sample]:
    """What can be read of these images, in order."""

    def one(place: int) -> _Sample | None:
        index = indices[place]
        name = source.label_of(index)
        try:
            image = source.image(index)  # decoded, so that a damaged one is found now and not in a run
            with naming(name):
                stored = source.content(index)
            content, ending = _encoded(image) if stored is None else (bytes(stored), ending_of(stored))
        except UnreadableImage as error:
            quarantine.record(index, error)
            return None
        label = None if source.labels is None else int(source.labels[index])
        return _Sample(first + place, name, content, ending, label)

    yield from (sample for sample in in_threads(one, range(len(indices))) if sample is not None)


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
            columns: dict[str, list[object]] = {"image": [{"bytes": one.content, "path": one.path} for one in group]}
            if classes is not None:
                columns["label"] = [one.label for one in group]
            writer.write_table(arrow.table(columns, schema=schema), row_group_size=_ROWS)
            yield from group
