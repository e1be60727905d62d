"""Archives and downloads: nothing outside the target, nothing half-written used, memory bounded."""

import gzip
import hashlib
import io
import os
import random
import shutil
import tarfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from dssl.cli import main
from dssl.data import cifar10
from tests.faults.conftest import Tally
from tests.faults.test_disk import one_line

ROWS = 40  # instead of 10,000
FOLDER = "cifar-10-batches-bin"


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Six small files, and an archive of them, that are declared the official ones."""
    generator = np.random.default_rng(0)
    files = {}
    for name in [name for name in cifar10.MD5 if name.endswith(".bin")]:
        block = generator.integers(0, 256, (ROWS, 3073), np.uint8)
        block[:, 0] %= 10
        files[name] = block.tobytes()
        monkeypatch.setitem(cifar10.MD5, name, hashlib.md5(files[name]).hexdigest())
    monkeypatch.setitem(cifar10.MD5, "cifar-10-binary.tar.gz", hashlib.md5(packed(files)).hexdigest())
    return files


def packed(files: dict[str, bytes], *, hostile: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    content = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as members,
    ):
        if hostile is not None:
            hostile(members)
        for name, data in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(data)
            members.addfile(member, io.BytesIO(data))
    return content.getvalue()


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_an_archive_with_hostile_members_is_not_opened(
    official: dict[str, bytes], tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Absolute and climbing paths, links out and a device, before the files that are asked for."""

    def hostile(members: tarfile.TarFile) -> None:
        for name in ("../outside", str(tmp_path / "outside"), f"{FOLDER}/../../outside", "C:\\outside", "a/\0b"):
            member = tarfile.TarInfo(name)
            member.size = 4
            members.addfile(member, io.BytesIO(b"evil"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"{FOLDER}/test_batch.bin")
            member.type, member.linkname = kind, "/etc/passwd"
            members.addfile(member)

    with tally.trial("a hostile member of an archive", 9):
        (tmp_path / "a.tar.gz").write_bytes(packed(official, hostile=hostile))
        assert main(["data", "cifar10", str(tmp_path / "target"), "--origin", str(tmp_path / "a.tar.gz")]) == 2
        assert "checksum" in one_line(capsys)
        assert everything(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("kind", ["long header", "long name", "member"])
def test_a_bomb(kind: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few hundred kilobytes that unpack to gigabytes, in the header that a reader of archives keeps in memory whole."""
    with tally.trial("a decompression bomb"):
        types = {"long header": tarfile.XHDTYPE, "long name": tarfile.GNUTYPE_LONGNAME, "member": tarfile.REGTYPE}
        member = tarfile.TarInfo("bomb")
        member.type, member.size = types[kind], 4_000_000_000
        block = gzip.compress(bytes(64_000_000), 1)
        head = gzip.compress(member.tobuf(tarfile.GNU_FORMAT))
        (tmp_path / "a.tar.gz").write_bytes(head + 6 * block)
        assert main(["data", "cifar10", str(tmp_path / "target"), "--origin", str(tmp_path / "a.tar.gz")]) == 2
        assert "checksum" in one_line(capsys)
        assert not (tmp_path / "target").exists()


def test_a_damaged_archive_gives_nothing(
    official: dict[str, bytes], tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = packed(official)
    generator = random.Random(0)
    for number in range(60):
        damaged = bytearray(whole)
        if number % 2:
            del damaged[generator.randrange(len(whole) - 9) :]
        else:
            damaged[generator.randrange(len(whole) - 9)] ^= 1 << generator.randrange(8)
        with tally.trial("a damaged or interrupted download"):
            (tmp_path / "a.tar.gz").write_bytes(damaged)
            assert main(["data", "cifar10", str(tmp_path / "target"), "--origin", str(tmp_path / "a.tar.gz")]) == 2
            assert one_line(capsys)
            assert not (tmp_path / "target").exists()


def test_interrupted_while_it_writes_the_files(
    official: dict[str, bytes], tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename in turn: what is there is whole, the whole set is not taken for complete, the next time completes it."""
    (tmp_path / "a.tar.gz").write_bytes(packed(official))
    words = ["data", "cifar10", str(tmp_path / "target"), "--origin", str(tmp_path / "a.tar.gz")]
    real = os.replace
    for stop in range(7):
        with tally.trial("interrupted while it writes the files"):
            left = [stop]

            def replace(source: str, target: str, left: list[int] = left) -> None:
                if left[0] == 0:
                    raise KeyboardInterrupt
                left[0] -= 1
                real(source, target)

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", replace)
                assert main(words) == 130
            there = list((tmp_path / "target" / FOLDER).iterdir())
            assert len(there) == stop
            assert all(path.read_bytes() == official.get(path.name) for path in there)
            assert cifar10.is_complete(tmp_path / "target") == (stop == 6)
            shutil.rmtree(tmp_path / "target")
    assert main(words) == 0


class _Server(BaseHTTPRequestHandler):
    """Answers as it is told to."""

    answer: Callable[["_Server"], None]

    def do_GET(self) -> None:
        type(self).answer(self)

    def reply(self, body: bytes, kind: str = "application/octet-stream", claimed: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(claimed or len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def redirect(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


DOWNLOADS: dict[str, Callable[[_Server], None]] = {
    "redirect to a file": lambda self: self.redirect("file:///etc/passwd"),
    "interrupted": lambda self: self.reply(bytes(1000), claimed=100_000),
    "wrong checksum": lambda self: self.reply(packed({"test_batch.bin": b"x"})),
    "a page instead": lambda self: self.reply(b"<html>log in first</html>", "text/html"),
}


@pytest.mark.parametrize("kind", DOWNLOADS)
def test_downloads_that_go_wrong(
    kind: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's downloader against a real server on this machine."""
    from torchvision.datasets import CIFAR10

    handler = type("Server", (_Server,), {"answer": DOWNLOADS[kind]})
    with (
        tally.trial("a download that is redirected, interrupted, changed or no archive"),
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{CIFAR10.filename}")
        assert main(["data", "cifar10", str(tmp_path / "target")]) == 2
        server.shutdown()
        assert one_line(capsys)
        assert everything(tmp_path / "target") == []


def test_dssl_itself_opens_no_connection() -> None:
    """What is fetched comes by torchvision, pinned, and is checked; no module of ours speaks to the network on its own."""
    import dssl

    for path in Path(dssl.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(f"import {name}" in text for name in ("urllib.request", "requests", "http.client", "ftplib")), (
            path
        )
