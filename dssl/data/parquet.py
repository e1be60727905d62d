"""Images in Parquet files, as Hugging Face's datasets writes them: row groups are read whole and kept in a bounded cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import check_length
from dssl.data.index import Container, Index
from dssl.data.scale import Range
from dssl.data.shards import Found, Recent, Shards, check_unchanged
from dssl.errors import DsslError
from dssl.files import printable

_CACHE = 1 << 30  # bytes that two windows of row groups may take by default
_WINDOW = 16
_SPARE = 4  # row groups beyond two windows: for a batch that ends in the one before, and for replacements
_NAMES = {"image": ("image", "img", "jpg", "jpeg", "png"), "label": ("label", "labels", "class", "cls")}


class Parquet(Shards):
    """The images in a column of Parquet files, in the order of their rows; a shard of the order is a row group."""

    shuffle = "shards"  # a random order would read a row group for each image

    def __init__(self, shards: Found, *, channels: int = 3, value_range: Range | None = None) -> None:
        columns = dict(part.partition("=")[::2] for part in shards.columns.split(",") if part)
        if not set(columns) <= set(_NAMES) or "" in columns.values():
            raise DsslError(f"columns {shards.columns!r}: expected such as #image=img,label=fine_label")
        self.options = tuple(f"{key}={value}".encode() for key, value in sorted(columns.items()))
        version = (*self.options, b"labels")  # an earlier index lacks those of some columns
        scan = partial(_scan, columns=columns)
        super().__init__(shards, scan, version=version, sized=False, channels=channels, value_range=value_range)
        records = self.index.records
        new = (np.diff(records["container"]) != 0) | (np.diff(records["offset"]) != 0)
        self.shards = bounds = np.concatenate([[0], np.flatnonzero(new) + 1, [len(records)]])
        groups, files = len(bounds) - 1, len(shards.paths)
        self.window = int(np.clip(_CACHE * groups // (2 * sum(self.index.lengths)), 1, _WINDOW))
        """How many row groups are mixed by default: two windows take at most a gigabyte."""
        self.name = (
            f"{shards.name} ({len(self.index):,} images in {groups:,} row group{'s' if groups != 1 else ''}, "
            f"{files:,} file{'s' if files != 1 else ''})"
        )
        self._groups = Recent(_loader(self.index, columns), keep=2 * self.window + _SPARE)
        self._announced = 0

    def content(self, index: int) -> bytearray:
        record = self.index.records[index]
        value = self._groups.at((int(record["container"]), int(record["offset"])))[int(record["size"])]
        if not value.is_valid:
            raise ValueError("the row has no image")
        buffer = value.as_buffer()
        check_length(buffer.size)
        return bytearray(buffer)

    def read_ahead(self, shards: NDArray[np.int64]) -> None:
        """Read row groups before their images are asked for, and keep two windows of them."""
        assert self.shards is not None
        self._groups.keep = max(self._groups.keep, self._announced + len(shards) + _SPARE)
        self._announced = len(shards)
        for shard in shards.tolist():
            record = self.index.records[self.shards[shard]]
            try:
                self._groups.at((int(record["container"]), int(record["offset"])))
            except Exception:  # who needs an image of it will say what is wrong
                continue


def _loader(index: Index, columns: dict[str, str]) -> Callable[[tuple[int, int]], Any]:
    """What reads the images of a row group, given its file and its number."""
    footers: dict[int, Any] = {}  # one may have megabytes

    def load(place: tuple[int, int]) -> Any:
        container, group = place
        path = index.container(container)
        check_unchanged(os.stat(path), index, container)  # noqa: PTH116 (bytes)
        with _open(path, footers.get(container)) as file:
            footers[container] = file.metadata
            column, inner = _image_column(file.schema_arrow, columns, path)
            table = file.read_row_group(group, columns=[f"{column}.bytes" if inner else column], use_threads=False)
        images = table.column(0).combine_chunks()
        return images.field("bytes") if inner else images

    return load


def pyarrow_module() -> Any:
    """The optional package."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DsslError("reading and writing Parquet needs pyarrow: pip install 'dssl[parquet]'") from error
    return pyarrow


def _open(path: bytes, metadata: Any = None) -> Any:
    return pyarrow_module().parquet.ParquetFile(
        os.fsdecode(path), metadata=metadata, memory_map=False, pre_buffer=False, page_checksum_verification=True
    )


def _scan(path: bytes, *, columns: dict[str, str]) -> Container:
    """The rows of one file; their sizes are not known until they are read."""
    try:
        status = os.stat(path)  # noqa: PTH116 (bytes)
        with _open(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
            column, inner = _image_column(schema, columns, path)
            label = _label_column(schema, columns, path)
            paths: list[str | None] = [None] * metadata.num_rows
            labels: list[bytes | None] = [None] * metadata.num_rows
            if inner and schema.field(column).type.get_field_index("path") >= 0:
                paths = file.read(columns=[f"{column}.path"]).column(0).combine_chunks().field("path").to_pylist()
            if label is not None:
                names = _class_names(schema, label)
                labels = [_label(value, names) for value in file.read(columns=[label]).column(0).to_pylist()]
    except OSError as error:
        raise DsslError(f"{printable(path)}: {error.strerror or error}; expected a Parquet file") from error
    except DsslError:
        raise
    except Exception as error:  # whatever pyarrow raises for a damaged footer
        raise DsslError(
            f"{printable(path)}: not a readable Parquet file: {' '.join(str(error).split())[:200]}"
        ) from error
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return Container(
        time=status.st_mtime_ns,
        length=status.st_size,
        names=[str(name).encode() if name else b"row %d" % row for row, name in enumerate(paths)],
        offsets=np.repeat(np.arange(len(counts)), counts).tolist(),
        sizes=[row for count in counts for row in range(count)],
        labels=labels,
    )


def _image_column(schema: Any, columns: dict[str, str], path: bytes) -> tuple[str, bool]:
    """The name of the column of images, and whether their bytes are a field in it."""
    kinds, inner = pyarrow_module().types, {}
    for column in schema:
        nested = kinds.is_struct(column.type) and column.type.get_field_index("bytes") >= 0
        kind = column.type.field("bytes").type if nested else column.type
        if kinds.is_binary(kind) or kinds.is_large_binary(kind):
            inner[column.name] = nested
    usual = [*inner] if len(inner) == 1 else [name for name in _NAMES["image"] if name in inner]
    name = columns.get("image") or next(iter(usual), None)
    if name is None or name not in inner:
        what = f"no column {name!r} of images" if name is not None else "no column, or several, of images"
        raise DsslError(f"{printable(path)}: {what} among {', '.join(schema.names)}; choose one: FILES#image=COLUMN")
    return name, inner[name]


def _label_column(schema: Any, columns: dict[str, str], path: bytes) -> str | None:
    kinds, fit = pyarrow_module().types, []
    for column in schema:
        kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
        if kinds.is_integer(kind) or kinds.is_boolean(kind) or kinds.is_string(kind) or kinds.is_large_string(kind):
            fit.append(column.name)
    name = columns.get("label")
    if name is not None and name not in fit:
        raise DsslError(f"{printable(path)}: no column {name!r} of numbers or texts among {', '.join(schema.names)}")
    return name or next((usual for usual in _NAMES["label"] if usual in fit), None)


def _class_names(schema: Any, column: str) -> list[str]:
    """The names that datasets keeps in the schema for the numbers of a column."""
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _label(value: Any, names: list[str]) -> bytes | None:
    """The text of a label; datasets writes -1 where there is none."""
    if value is None or value == -1:
        return None
    text = names[value] if isinstance(value, int) and 0 <= value < len(names) else str(value)
    return text.encode(errors="backslashreplace")
