"""CIFAR-10: both official versions, from folders and archives, with a made-up data set under made-up checksums."""

import hashlib
import io
import os
import pickle
import tarfile
import threading
import warnings
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dssl.data import cifar10, open_source
from dssl.errors import DsslError

ROWS = 40  # instead of 10,000, so that the tests are quick
NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    made = {name: generator.integers(0, 256, (ROWS, 3073), np.uint8) for name in NAMES}
    for block in made.values():
        block[:, 0] %= 10
    return made


def as_pickle(block: np.ndarray) -> bytes:
    """The official layout, as Python 2 and its NumPy wrote it: protocol 2, with byte strings."""
    about = {"labels": block[:, 0].tolist(), "batch_label": "batch 1 of 5", "filenames": ["a.png"] * 10, "data": None}
    raw = block[:, 1:].tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\0\x85U\x01btR(K\x01"
        + b"".join(b"M" + size.to_bytes(2, "little") for size in (len(block), 3072))
        + b"\x86cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89T"
        + len(raw).to_bytes(4, "little") + raw + b"tb"
    )  # fmt: skip
    before, _, after = pickle.dumps(about, protocol=2).rpartition(b"N")
    return before + array + after


def test_the_pickle_is_one_of_numpy(rows):
    """The made-up files are what pickle itself would read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names and types that NumPy has since given up
        batch = pickle.loads(as_pickle(rows["test_batch"]), encoding="latin1")  # noqa: S301
    assert np.array_equal(batch["data"], rows["test_batch"][:, 1:])


@pytest.fixture
def official(rows, monkeypatch) -> dict[str, dict[str, bytes]]:
    """The files of both versions, with their checksums declared official."""
    binary = {f"{name}.bin": block.tobytes() for name, block in rows.items()}
    python = {name: as_pickle(block) for name, block in rows.items()}
    for name, content in (binary | python).items():
        monkeypatch.setitem(cifar10.MD5, name, hashlib.md5(content).hexdigest())
    return {"cifar-10-batches-bin": binary, "cifar-10-batches-py": python}


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def expect(source, rows, names) -> None:
    block = np.concatenate([rows[name] for name in names])
    assert len(source) == len(block)
    assert np.array_equal(source.labels, block[:, 0])
    for index in (0, 17, len(block) - 1):
        assert np.array_equal(source.image(index), block[index, 1:].reshape(3, 32, 32).transpose(1, 2, 0))


@pytest.mark.parametrize("version", ["cifar-10-batches-bin", "cifar-10-batches-py"])
@pytest.mark.parametrize("below", ["", "version"])
def test_folders(tmp_path, official, rows, version, below):
    write(tmp_path / version, official[version])
    place = tmp_path / version if below else tmp_path
    expect(open_source(f"cifar10:{place}", split="test"), rows, NAMES[5:])
    if not below:
        expect(open_source(f"cifar10:{place}"), rows, NAMES[:5])


@pytest.mark.parametrize("version", ["cifar-10-batches-bin", "cifar-10-batches-py"])
def test_archives(tmp_path, official, rows, version, monkeypatch):
    name = "cifar-10-binary.tar.gz" if version.endswith("bin") else "cifar-10-python.tar.gz"
    write_archive(tmp_path / name, {f"{version}/{file}": content for file, content in official[version].items()})
    with pytest.raises(DsslError, match="checksum"):
        open_source(f"cifar10:{tmp_path}", split="test")
    monkeypatch.setitem(cifar10.MD5, name, hashlib.md5((tmp_path / name).read_bytes()).hexdigest())
    (tmp_path / "renamed").write_bytes((tmp_path / name).read_bytes())
    for place in (tmp_path / name, tmp_path / "renamed", tmp_path):
        expect(open_source(f"cifar10:{place}", split="test"), rows, NAMES[5:])
    expect(open_source(f"cifar10:{tmp_path}"), rows, NAMES[:5])


def test_the_python_version_has_the_fingerprint_of_the_binary_one(tmp_path, official):
    for version, files in official.items():
        write(tmp_path / version, files)
    prints = {open_source(f"cifar10:{tmp_path / version}", split="test").fingerprint for version in official}
    assert len(prints) == 1


@pytest.mark.parametrize("version", ["cifar-10-batches-bin", "cifar-10-batches-py"])
def test_one_flipped_bit_is_refused(tmp_path, official, version):
    files = dict(official[version])
    name = next(name for name in files if name.startswith("test"))
    damaged = bytearray(files[name])
    damaged[12345] ^= 4
    files[name] = bytes(damaged)
    write(tmp_path / version, files)
    with pytest.raises(DsslError, match="checksum"):
        open_source(f"cifar10:{tmp_path}", split="test")


@pytest.mark.parametrize("right", [False, True])
def test_no_code_of_a_pickle_runs_even_with_the_right_checksum(tmp_path, monkeypatch, right):
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    content = pickle.dumps({"data": Evil(), "labels": [0] * 10_000}, protocol=2)
    if right:
        monkeypatch.setitem(cifar10.MD5, "test_batch", hashlib.md5(content).hexdigest())
    write(tmp_path / "cifar-10-batches-py", {"test_batch": content})
    with pytest.raises(IndexError if right else DsslError):
        open_source(f"cifar10:{tmp_path}", split="test")
    assert not mark.exists()


@pytest.mark.parametrize("state", ["whole", "changed", "gone"])
def test_the_official_archive_is_downloaded_and_checked(tmp_path, official, monkeypatch, state, capsys):
    """torchvision's own downloader against a server on this machine that plays the official one."""
    from torchvision.datasets import CIFAR10

    from dssl.cli import main

    archive, name = tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py"
    write_archive(archive, {f"{name}/{file}": content for file, content in official[name].items()})
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(cifar10.MD5, archive.name, digest)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = archive.name if state != "gone" else "nothing.tar.gz"
    monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{page}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", digest if state != "changed" else "0" * 32)
    target = tmp_path / "target"
    code = main(["data", "cifar10", str(target)])
    server.shutdown()
    server.server_close()
    if state == "whole":
        assert code == 0
        for file, content in official["cifar-10-batches-bin"].items():
            assert (target / "cifar-10-batches-bin" / file).read_bytes() == content
    else:
        assert code == 2
        assert "--origin FILE" in capsys.readouterr().err
        assert not target.exists()


@pytest.mark.parametrize("text", ["cifar10", "cifar10:", "cifar10:/nowhere"])
def test_nothing_there_says_how_to_get_it(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DsslError, match="dssl data cifar10"):
        open_source(text)
