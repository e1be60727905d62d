"""Embeddings of any source, written as they are computed: shards that are whole or not there, and that a second run keeps."""

import csv
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dssl.data import Source
from dssl.data.quarantine import Quarantine
from dssl.errors import DsslError
from dssl.evaluate.features import NothingReadable, Progress, compute_features
from dssl.models import feature_dim
from dssl.models.dense import DenseEncoder
from dssl.weights.load import LoadedEncoder

SMALL = 100_000
"""Up to so many images fit into one .npz or .csv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What was written."""

    images: int
    shape: tuple[int, ...]
    """Of one row: its length, or channels, height and width."""
    unreadable: int
    computed: int
    """How many images went through the encoder this time; the others were there already."""
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """An encoder, and how it is run."""

    loaded: LoadedEncoder
    batch_size: int = 256
    autocast: torch.dtype | None = None
    threads: int | None = None
    progress: Progress | None = None
    dense: DenseEncoder | None = None
    """Instead of the encoder's vectors its last feature maps: rows x channels x height x width."""

    def rows(
        self, source: Source, indices: NDArray[np.int64], quarantine: Quarantine, *, done: int = 0
    ) -> tuple[NDArray[np.float32], list[str]]:
        """Embeddings and names of the readable images among these."""
        progress = self.progress
        report: Callable[[int, int], None] | None = None
        if progress is not None:
            report = lambda ready, _: progress(done + ready, len(source))  # noqa: E731
        loaded = self.loaded
        try:
            features = compute_features(
                loaded.encoder if self.dense is None else self.dense,
                source,
                image_size=loaded.image_size,
                normalization=loaded.normalization,
                channels=loaded.channels,
                indices=indices,
                batch_size=self.batch_size,
                autocast=self.autocast,
                threads=self.threads,
                quarantine=quarantine,
                progress=report,
            )
        except NothingReadable:
            if len(indices) == len(source):
                raise
            # a shard without rows: the others are still worth having
            size = feature_dim(loaded.encoder, image_size=loaded.image_size, channels=loaded.channels)
            return np.empty((0, size) if self.dense is None else (0, *self.dense.shape), np.float32), []
        values = features.values if self.dense is None else features.values.unflatten(1, self.dense.shape)
        return values.numpy(), [source.label_of(int(row)) for row in features.rows]


def embed_shards(encoding: Encoding, source: Source, folder: Path, *, shard: int) -> Embedded:
    """Write ``embeddings-00000.npy`` (float32, a row for each image) and ``names-00000.txt`` for every ``shard`` images.

    The names come last, so a shard whose names are there is whole; another run with the same weights and images goes on after it.
    """
    if shard < 1:
        raise DsslError(f"a shard of {shard} images: expected at least 1")
    about = _about(encoding, source) | {"shard": shard, "shards": -(-len(source) // shard)}
    manifest = folder / "embeddings.json"
    if folder.exists() and not folder.is_dir():
        raise DsslError(f"{folder} is a file: name a folder for the shards, or a name that ends in .npz or .csv")
    folder.mkdir(parents=True, exist_ok=True)
    _check_manifest(manifest, about)
    quarantine = Quarantine(source, path=folder / "unreadable.txt", max_share=1.0)
    computed = images = 0
    shape: tuple[int, ...] = ()
    for number in range(about["shards"]):
        indices = np.arange(number * shard, min((number + 1) * shard, len(source)), dtype=np.int64)
        values, names = folder / f"embeddings-{number:05d}.npy", folder / f"names-{number:05d}.txt"
        if not (values.is_file() and names.is_file()):
            rows, titles = encoding.rows(source, indices, quarantine, done=number * shard)
            _write(values, partial(np.save, arr=rows, allow_pickle=False))
            _write(names, partial(_write_lines, titles))
            computed += len(indices)
        stored = np.load(values, mmap_mode="r", allow_pickle=False)
        images, shape = images + len(stored), stored.shape[1:]
    if images == 0:
        raise NothingReadable(f"{source.name}: none of its images can be read: there is nothing to embed")
    return Embedded(
        images=images,
        shape=shape,
        unreadable=quarantine.total - images,
        computed=computed,
        files=about["shards"],
    )


def embed_file(encoding: Encoding, source: Source, path: Path) -> Embedded:
    """Write one .npz (``embeddings``, ``names``) or one .csv (name, then a column for each dimension)."""
    if len(source) > SMALL:
        raise DsslError(
            f"{path}: {len(source):,} images are too many for one file (at most {SMALL:,}): name a folder instead"
        )
    quarantine = Quarantine(source, max_share=1.0)
    rows, names = encoding.rows(source, np.arange(len(source), dtype=np.int64), quarantine)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        about = json.dumps(_about(encoding, source), sort_keys=True)
        _write(path, lambda file: np.savez(file, embeddings=rows, names=np.array(names), about=np.array(about)))
    else:
        _write(path, lambda file: _csv(file, rows, names))
    return Embedded(
        images=len(rows),
        shape=rows.shape[1:],
        unreadable=quarantine.total - len(rows),
        computed=len(source),
        files=1,
    )


def _about(encoding: Encoding, source: Source) -> dict[str, Any]:
    loaded = encoding.loaded
    return {
        **({} if encoding.dense is None else {"dense": list(encoding.dense.shape)}),
        "weights": loaded.sha256,
        "encoder": loaded.name,
        "image_size": loaded.image_size,
        "normalization": {"mean": list(loaded.normalization.mean), "std": list(loaded.normalization.std)},
        "precision": "float32" if encoding.autocast is None else str(encoding.autocast).removeprefix("torch."),
        "source": source.fingerprint,
        "images": len(source),
    }


def _check_manifest(manifest: Path, about: dict[str, Any]) -> None:
    """Refuse to mix embeddings of other weights or images with these."""
    if not manifest.exists():
        # a kill may have left the manifest under its temporary name
        if any(not entry.name.startswith(f".{manifest.name}.") for entry in manifest.parent.iterdir()):
            raise DsslError(f"{manifest.parent} holds other things and no embeddings: name a new or empty folder")
        _write(manifest, lambda file: file.write((json.dumps(about, indent=2) + "\n").encode()))
        return
    before: Any = None
    with suppress(OSError, ValueError):
        before = json.loads(manifest.read_text(encoding="utf-8"))
    if before != about:
        known = before if isinstance(before, dict) else {}
        changed = [key for key in {**about, **known} if known.get(key) != about.get(key)]
        raise DsslError(
            f"{manifest.parent} holds embeddings of something else ({', '.join(changed)} differ): name another folder"
        )


def _write_lines(lines: list[str], file: IO[bytes]) -> None:
    file.write("".join(f"{line}\n" for line in lines).encode())


def _csv(file: IO[bytes], rows: NDArray[np.float32], names: list[str]) -> None:
    class Encoded:
        def write(self, text: str) -> int:
            return file.write(text.encode())

    writer = csv.writer(Encoded())
    writer.writerow(["name", *(f"d{number}" for number in range(rows.shape[1]))])
    for name, row in zip(names, rows, strict=True):
        # the shortest text that gives the same float32 back
        writer.writerow([_harmless(name), *(str(value) for value in row)])


def _harmless(name: str) -> str:
    """A name that no spreadsheet takes for a formula; as a path it is the same."""
    return f"./{name}" if name.startswith(("=", "+", "-", "@")) else name


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
