"""Shards written from any source: tar files for WebDataset, or Parquet files as Hugging Face's datasets lays them out.

Images are written as they are, not decoded and encoded again, in a random order, so that every shard is a sample of the whole
and a window of shards mixes well. A shard gets its name, which says how many there are, when it is complete.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
from PIL import Image as Pillow

from dssl import rng
from dssl.data.decode import UnreadableImage, ending_of, naming
from dssl.data.order import ShardOrder
from dssl.data.pipeline import in_threads
from dssl.data.quarantine import Quarantine
from dssl.data.shards import Shards
from dssl.data.source import Source, Split
from dssl.errors import DsslError
from dssl.files import is_partial, printable, replacing

if TYPE_CHECKING:
    from dssl.types import Image

Format = Literal["tar", "parquet"]
_ROWS = 100  # of a row group: what is read at once


@dataclass(frozen=True, slots=True)
class _Sample:
    number: int
    path: str
    content: bytes
    ending: str
    label: int | None


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
    # a random order would read a row group of Parquet for each image
    order = rng.permutation(rng.key(0, "pack"), len(source))
    if source.shards is not None and source.shuffle == "shards":
        order = ShardOrder(source.shards, batch_size=len(source), seed=0, window=source.window).at(0).indices
    written = done = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = make_room(source, folder, split=split, form=form, shard=shard)
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


def shard_paths(source: Source, folder: Path, *, split: Split, form: Format, shard: int) -> list[Path]:
    """The names of the shards to be."""
    if shard < 1:
        raise DsslError(f"a shard of {shard} images: expected at least 1")
    count = -(-len(source) // shard)
    return [folder / f"{split}-{number:05d}-of-{count:05d}.{form}" for number in range(count)]


def make_room(source: Source, folder: Path, *, split: Split, form: Format, shard: int) -> list[Path]:
    """The names of the shards to be; those that are there, of an earlier attempt, go, the last one first.

    What a kill leaves is then incomplete, and refused: shards of two times would look like one set. A folder that holds
    other shards, or those that are read, is refused.
    """
    paths = shard_paths(source, folder, split=split, form=form, shard=shard)
    known, read = {path.name for path in paths}, _shards_of(source)
    for path in paths:
        if path.resolve() in read:
            raise DsslError(f"{printable(str(path))} is one of the shards that are read: name another folder")
    there = list(folder.iterdir()) if folder.is_dir() else []
    for other in there:
        if other.name.startswith(f"{split}-") and other.suffix in (".tar", ".parquet") and other.name not in known:
            raise DsslError(
                f"{printable(str(folder))} already holds {printable(other.name)}: name a new or empty folder"
            )
    for other in there:
        if any(is_partial(other, of=name) for name in known):
            other.unlink()
    for path in reversed(paths):
        path.unlink(missing_ok=True)
    return paths


def _shards_of(source: Source) -> set[Path]:
    """The files that the images are read from, where they are shards."""
    if not isinstance(source, Shards):
        return set()
    return {
        Path(os.fsdecode(source.index.container(number))).resolve() for number in range(len(source.index.containers))
    }


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
        for group in _in_groups(samples):
            columns: dict[str, list[object]] = {"image": [{"bytes": one.content, "path": one.path} for one in group]}
            if classes is not None:
                columns["label"] = [one.label for one in group]
            writer.write_table(arrow.table(columns, schema=schema), row_group_size=_ROWS)
            yield from group


def _in_groups(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    group: list[_Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == _ROWS:
            yield group
            group = []
    if group:
        yield group
