"""CIFAR-10: the official binary and python versions, read after their checksums are verified, and how to download them."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.data.source import InMemory, Split
from dssl.errors import DsslError
from dssl.files import write_atomically

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ROW_BYTES = 3073
BINARY_FOLDER = "cifar-10-batches-bin"
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
}
"""Of the official files: those of the binary version, of the python version, and the two archives."""
_VERSIONS = {".bin": BINARY_FOLDER, "": "cifar-10-batches-py"}
_LIMIT = 1 << 28  # bytes; the archives have 170 million
_HOW = "download it with `dssl data cifar10 FOLDER`, or give the folder or archive of the official download"


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


def read_rows(place: Path, *, splits: Iterable[Split] = ("train", "test")) -> NDArray[np.uint8]:
    """Rows in the binary format (label, then red, green and blue planes) of these splits, from a folder or an archive."""
    names = [name for split in splits for name in MD5 if name.startswith("test" if split == "test" else "data")]
    for ending, version in _VERSIONS.items():
        batches = [name for name in names if name.endswith(".bin") == (ending == ".bin")]
        for folder in (place, place / version):
            if (folder / batches[0]).is_file():
                return np.concatenate([_rows(name, _verified(folder / name, name)) for name in batches])
    for name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
        if (place / name).is_file():
            return _from_archive(place / name, names)
    if place.is_file():
        return _from_archive(place, names)
    raise DsslError(f"cifar10:{place}: not a folder or archive of CIFAR-10: {_HOW}")


def _verified(path: Path, *names: str) -> bytes:
    """The content of a file, which is one of these official ones."""
    try:
        content = path.read_bytes() if path.stat().st_size < _LIMIT else b""
    except OSError as error:
        raise DsslError(f"{path}: {error.strerror}: {_HOW}") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() not in (MD5[name] for name in names):
        raise DsslError(f"{path}: its checksum differs from the official file's (damaged or changed): {_HOW}")
    return content


def _from_archive(archive: Path, names: list[str]) -> NDArray[np.uint8]:
    content = _verified(archive, "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(content)) as members:
        batches = {Path(member.name).name: member for member in members if member.isreg()}
        files = [(name, members.extractfile(batches[name])) for name in names if name in batches]
        return np.concatenate([_rows(name, file.read()) for name, file in files if file is not None])


def _rows(name: str, content: bytes) -> NDArray[np.uint8]:
    """The rows of a verified file; those of the python version are a pickle."""
    if name.endswith(".bin"):
        return np.frombuffer(content, np.uint8).reshape(-1, ROW_BYTES)
    batch = _Batch(io.BytesIO(content), encoding="latin1").load()
    labels = np.array(batch["labels"], np.uint8)
    pixels = np.frombuffer(batch["data"].state[-1].encode("latin1"), np.uint8)
    return np.concatenate([labels[:, None], pixels.reshape(len(labels), -1)], axis=1)


class _Batch(pickle.Unpickler):
    """Whatever the pickle names, it gets a record of state: nothing is imported, and no version of NumPy matters."""

    def find_class(self, module: str, name: str, /) -> type[_State]:
        return _State


class _State:
    def __init__(self, *arguments: object) -> None:
        self.state: tuple[str, ...] = ()

    def __setstate__(self, state: tuple[str, ...]) -> None:
        self.state = state


def is_complete(folder: Path) -> bool:
    """True where all six files of the binary version exist and have the official checksums."""
    try:
        return all(_verified(folder / BINARY_FOLDER / name, name) for name in MD5 if name.endswith(".bin"))
    except DsslError:
        return False


def fetch(folder: Path, *, origin: str | None) -> None:
    """Write the binary version to `folder`, from a folder or archive, or from the official archive, downloaded."""
    rows = _downloaded() if origin is None else read_rows(Path(origin))
    names = [name for name in MD5 if name.endswith(".bin")]
    for name, block in zip(names, np.split(rows, len(names)), strict=True):
        write_atomically(folder / BINARY_FOLDER / name, [block.data])
    write_atomically(folder / BINARY_FOLDER / "batches.meta.txt", ["\n".join((*CLASSES, "\n")).encode()])


def _downloaded() -> NDArray[np.uint8]:
    """torchvision downloads the archive and verifies its checksum."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_url

    with tempfile.TemporaryDirectory(prefix="dssl-cifar10-") as work:
        try:
            download_url(CIFAR10.url, work, filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        except (OSError, RuntimeError, ValueError) as error:  # no network, a wrong checksum, an invalid address
            raise DsslError(
                f"{CIFAR10.url} could not be downloaded ({' '.join(str(error).split())}): get {CIFAR10.filename} some other way "
                "and give it as --origin FILE"
            ) from None
        return read_rows(Path(work))
