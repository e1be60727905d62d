"""CIFAR-10 in its official binary and python versions, checked by checksum before anything is read from it.

The python version's files are pickles. They are never unpickled: the pixels and labels are picked out of the list of opcodes,
so that no code in such a file can run, whatever its checksum.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickletools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from dssl.data.archive import read_members
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.types import Image  # which imports torch, and a look at data does not need it

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
_HOW = "get it with `dssl data cifar10 FOLDER`, or name the folder or archive of the official download"
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1"}


class Cifar10:
    """One split of CIFAR-10, held in memory (154 MB or 31 MB)."""

    def __init__(self, place: str, *, split: Literal["train", "test"] = "train") -> None:
        rows = read_rows(Path(place), splits=(split,))
        self.name = f"CIFAR-10 ({split})"
        self.classes: tuple[str, ...] | None = CLASSES
        self.labels: NDArray[np.int64] | None = rows[:, 0].astype(np.int64)
        planes = rows[:, 1:].reshape(-1, 3, 32, 32)
        self._images: NDArray[np.uint8] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        self._split = split
        # the checksums of the files are known and have been checked, so that the name and the split say it all
        self.fingerprint = hashlib.sha256(f"cifar10 {split}".encode()).hexdigest()[:32]

    def __len__(self) -> int:
        """The number of images."""
        return len(self._images)

    def image(self, index: int) -> Image:
        """One image, 32 x 32 x 3."""
        image: Image = self._images[index]
        return image

    def label_of(self, index: int) -> str:
        """What to call this image on a page."""
        return f"CIFAR-10 {self._split} {index}"


def batches_of(split: str) -> tuple[str, ...]:
    """The names of a split's files, without ending."""
    return tuple(f"data_batch_{number}" for number in range(1, 6)) if split == "train" else ("test_batch",)


def read_rows(place: Path, *, splits: Iterable[str]) -> NDArray[np.uint8]:
    """The rows of the binary format (label, then red, green and blue planes) of these splits, from a folder or an archive."""
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
        raise DsslError(f"cifar10:{place}: no CIFAR-10 there: {_HOW}")
    if place.is_file():
        return _from_archive(place, wanted)
    raise DsslError(f"cifar10:{place}: there is no such folder or archive: {_HOW}")


def _from_archive(archive: Path, wanted: list[str]) -> NDArray[np.uint8]:
    """The rows out of the official .tar.gz; only the wanted members are read, into memory, and no path in it is followed."""
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
        raise DsslError(f"{archive}: not a whole .tar.gz archive ({error}): {_HOW}") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise DsslError(f"{archive}: {missing[0]} is not in it: expected an archive of CIFAR-10 such as {ARCHIVES[0]}")
    return _rows(wanted, found.__getitem__, version, str(archive))


def _file(folder: Path, ending: str, name: str) -> bytes:
    path = folder / f"{name}{ending}"
    try:
        if path.stat().st_size > 2 * ROWS * ROW_BYTES:
            raise DsslError(f"{path}: {path.stat().st_size:,} bytes are too many for a file of CIFAR-10: {_HOW}")
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
                f"{where}{os.sep}{file}: the checksum is not the official file's (damaged or changed): {_HOW}"
            )
        if version == "binary":
            rows[position] = np.frombuffer(content, np.uint8).reshape(ROWS, ROW_BYTES)
        else:
            pixels, labels = pick_from_pickle(content)
            rows[position, :, 0], rows[position, :, 1:] = labels, pixels
    return rows.reshape(-1, ROW_BYTES)


def checksum(content: bytes) -> str:
    """MD5, which is what the official page publishes."""
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
        raise DsslError(f"the file is not a whole pickle: {error}") from error
    if (
        pixels is None
        or pixels.size != ROWS * (ROW_BYTES - 1)
        or len(labels) != ROWS
        or not 0 <= min(labels) <= max(labels) <= 9
    ):
        raise DsslError("the file is not laid out like a batch of CIFAR-10's python version")
    return pixels.reshape(ROWS, ROW_BYTES - 1), np.array(labels, np.uint8)
