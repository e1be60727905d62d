"""Embeddings of any source, written as they are computed, in shards that a second run keeps."""

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from dssl.data import Source
from dssl.data.quarantine import Quarantine
from dssl.errors import DsslError, one_line
from dssl.files import replacing, write_text
from dssl.weights.encoder import Encoder, Features, NothingReadable

SMALL = 100_000
"""Upper limit of images in one .npz or .csv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What was written."""

    images: int
    unreadable: int
    computed: int
    """Images that went through the encoder this time; the others existed already."""
    files: int = 1


def embed_shards(encoder: Encoder, source: Source, folder: Path, *, shard: int) -> Embedded:
    """Write ``embeddings-00000.npy`` (float32, a row for each image) and ``names-00000.txt`` for every ``shard`` images.

    The names come last, so a shard with names is complete; another run with the same weights and images resumes after it.
    """
    about = _about(encoder, source) | {"shard": shard, "shards": -(-len(source) // shard)}
    manifest = folder / "embeddings.json"
    if folder.exists() and not folder.is_dir():
        raise DsslError(
            f"{folder} is a file: expected a folder for the shards, or a name that ends in .npz, .csv or .parquet"
        )
    folder.mkdir(parents=True, exist_ok=True)
    stamps = _check_manifest(manifest, about, earlier=source.earlier_fingerprints())
    again = _to_redo(source, folder, shard, stamps)
    if again:
        (folder / "unreadable.txt").unlink(missing_ok=True)
    quarantine = Quarantine(source, path=folder / "unreadable.txt", max_share=1.0)
    computed = images = 0
    for number in range(about["shards"]):
        indices = np.arange(number * shard, min((number + 1) * shard, len(source)), dtype=np.int64)
        values, names = folder / f"embeddings-{number:05d}.npy", folder / f"names-{number:05d}.txt"
        if not (values.is_file() and names.is_file()) or number in again:
            names.unlink(missing_ok=True)
            # before they are read, in case they change meanwhile
            stamps[str(number)] = source.stamp(indices.tolist())
            rows, titles, _ = _rows(encoder, source, indices, quarantine)
            with replacing(values) as temporary, temporary.open("wb") as file:
                np.save(file, rows, allow_pickle=False)
            write_text(manifest, json.dumps(about | {"files": stamps}, indent=2) + "\n")
            write_text(names, "".join(f"{title}\n" for title in titles))
            computed += len(rows)
        images += len(np.load(values, mmap_mode="r", allow_pickle=False))
    if images == 0:
        raise NothingReadable(f"{source.name}: none of its images can be read: there is nothing to embed")
    return Embedded(images=images, unreadable=quarantine.total - images, computed=computed, files=about["shards"])


def embed_file(encoder: Encoder, source: Source, path: Path) -> Embedded:
    """Write one .npz (``embeddings``, ``names``) or one .csv (name, then a column for each dimension)."""
    if len(source) > SMALL:
        raise DsslError(
            f"{path}: {len(source):,} images are too many for one file (at most {SMALL:,}): write to a folder instead"
        )
    quarantine = Quarantine(source, max_share=1.0)
    rows, names, _ = _rows(encoder, source, np.arange(len(source), dtype=np.int64), quarantine)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        about = json.dumps(_about(encoder, source), sort_keys=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, embeddings=rows, names=np.array(names), about=np.array(about))
    else:
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as lines:
            _csv(lines, rows, names)
    return Embedded(images=len(rows), unreadable=quarantine.total - len(rows), computed=len(source))


def read_embeddings(path: Path, source: Source) -> Features:
    """What ``embed_file`` wrote as .npz, with the image of the source that each row is of."""
    try:
        with np.load(path, allow_pickle=False) as file:
            values, names, about = file["embeddings"], file["names"].tolist(), json.loads(str(file["about"]))
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise DsslError(f"{path}: {one_line(error)}; expected a .npz that dssl embed has written") from error
    images = (about["source"], about["reading"])
    if images not in [(text, source.reading) for text in (source.fingerprint, *source.earlier_fingerprints())]:
        raise DsslError(
            f"{path}: the embeddings of other images than {source.name}, or of images read differently; give the weights instead"
        )
    # in the order of the source, without those that could not be read
    wanted = iter(range(len(source)))
    rows = [next((index for index in wanted if source.label_of(index) == name), -1) for name in names]
    if -1 in rows or len(rows) != len(values):
        raise DsslError(f"{path}: its names differ from those of {source.name}; run dssl embed again")
    return Features(values=torch.from_numpy(values), rows=np.array(rows, np.int64), unreadable=len(source) - len(rows))


def embed_parquet(encoder: Encoder, source: Source, path: Path, *, shard: int) -> Embedded:
    """Write one Parquet file with the columns path, label (the name of the class; null without classes) and embedding.

    ``shard`` images are computed at a time and become a row group.
    """
    from dssl.data.parquet import pyarrow_module

    arrow = pyarrow_module()
    quarantine = Quarantine(source, max_share=1.0)
    size = encoder.dim
    schema = arrow.schema(
        [("path", arrow.string()), ("label", arrow.string()), ("embedding", arrow.list_(arrow.float32(), size))],
        metadata={"dssl": json.dumps(_about(encoder, source), sort_keys=True)},
    )
    images = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, arrow.parquet.ParquetWriter(str(temporary), schema) as writer:
        for begin in range(0, len(source), shard):
            indices = np.arange(begin, min(begin + shard, len(source)), dtype=np.int64)
            rows, names, readable = _rows(encoder, source, indices, quarantine)
            labels: list[str | None] = [None] * len(readable)
            if source.labels is not None and source.classes is not None:
                labels = [source.classes[source.labels[row]] for row in readable]
            values = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.ravel()), size)
            columns = [arrow.array(names, arrow.string()), arrow.array(labels, arrow.string()), values]
            writer.write_table(arrow.table(columns, schema=schema))
            images += len(rows)
        if images == 0:
            raise NothingReadable(f"{source.name}: none of its images can be read: there is nothing to embed")
    return Embedded(images=images, unreadable=quarantine.total - images, computed=len(source))


def _rows(
    encoder: Encoder, source: Source, indices: NDArray[np.int64], quarantine: Quarantine
) -> tuple[NDArray[np.float32], list[str], list[int]]:
    """Embeddings, names and indices of the readable images among these."""
    try:
        features = encoder.features(source, indices=indices, quarantine=quarantine)
    except NothingReadable:
        if len(indices) == len(source):
            raise
        # a shard without rows: the others are still worth having
        return np.empty((0, encoder.dim), np.float32), [], []
    values, rows = features.values.numpy(), features.rows.tolist()
    return values, [source.label_of(row) for row in rows], rows


def _about(encoder: Encoder, source: Source) -> dict[str, Any]:
    return {
        "weights": encoder.sha256,
        "encoder": encoder.name,
        "image_size": encoder.image_size,
        "normalization": encoder.normalization.plain(),
        "precision": encoder.precision,
        "source": source.fingerprint,
        "images": len(source),
        "reading": source.reading,
    }


def _check_manifest(manifest: Path, about: dict[str, Any], *, earlier: Sequence[str]) -> dict[str, str]:
    """Refuse to mix embeddings of other weights or images with these; returns the stamp of each shard's files."""
    if not manifest.exists():
        # a kill may have left the manifest under its temporary name
        if any(not entry.name.startswith(f".{manifest.name}.") for entry in manifest.parent.iterdir()):
            raise DsslError(f"{manifest.parent} contains other files and no embeddings: choose a new or empty folder")
        write_text(manifest, json.dumps(about, indent=2) + "\n")
        return {}
    before: Any = None
    with suppress(OSError, ValueError):
        before = json.loads(manifest.read_text(encoding="utf-8"))
    stamps: dict[str, str] = {}
    if isinstance(before, dict):
        before.setdefault("reading", about["reading"])  # not in those of an earlier version
        stamps = before.pop("files", {})
        if before.get("source") in earlier:
            before["source"] = about["source"]
    if before != about:
        recorded = before if isinstance(before, dict) else {}
        changed = [key for key in {**about, **recorded} if recorded.get(key) != about.get(key)]
        raise DsslError(
            f"{manifest.parent} contains other embeddings ({', '.join(changed)} differ): choose another folder"
        )
    return stamps


def _to_redo(source: Source, folder: Path, shard: int, stamps: Mapping[str, str]) -> set[int]:
    """The shards whose images have been replaced since, and those that lack images, if any of these can be read now.

    A disk that was away is no reason to lose images. All shards with gaps are redone, which keeps the list of them whole.
    """
    lacking: dict[int, list[int]] = {}
    replaced: set[int] = set()
    for number, begin in enumerate(range(0, len(source), shard)):
        names = folder / f"names-{number:05d}.txt"
        if names.is_file():
            written = set(names.read_text(encoding="utf-8").splitlines())
            indices = np.arange(begin, min(begin + shard, len(source)), dtype=np.int64)
            stamp = source.stamp(indices.tolist())
            if stamps.get(str(number), stamp) != stamp:
                replaced.add(number)
            if missing := [index for index in indices.tolist() if source.label_of(index) not in written]:
                lacking[number] = missing
    missing = [index for indices in lacking.values() for index in indices]
    return replaced | set(lacking) if replaced or source.any_readable(missing) else set()


def _csv(file: IO[str], rows: NDArray[np.float32], names: list[str]) -> None:
    writer = csv.writer(file)
    writer.writerow(["name", *(f"d{number}" for number in range(rows.shape[1]))])
    for name, row in zip(names, rows, strict=True):
        # the shortest text that gives the same float32 back
        writer.writerow([harmless(name), *(str(value) for value in row)])


def harmless(name: str) -> str:
    """A name that no spreadsheet takes for a formula; as a path it is the same."""
    return f"./{name}" if name.startswith(("=", "+", "-", "@")) else name
