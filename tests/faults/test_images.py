"""Folders full of hostile files: no crash, no hang, every file that gives no image named, memory bounded."""

import io
import os
import random
import resource
import socket
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import Quarantine, UnreadableImage, check_sample, open_source
from dssl.data.index import _load, _place, open_index
from dssl.data.quarantine import Reader
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.faults.test_disk import one_line

NAMES = (b"new\nline", b"tab\there", b"<script>alert(1)<", b"=cmd|'calc'!A0", b"\x1b[2J\x1b]0;title\x07", b"\xff\xfe\xc3",
         "größe 图 🎨".encode(), b" leading and trailing ", b"-rf", b"%s%n", b"'; drop table", b"a" * 240)  # fmt: skip


def picture(kind: str, size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes that claims 900 million pixels."""
    size = (30000).to_bytes(4, "big")
    head = b"IHDR" + size + size + bytes([8, 2, 0, 0, 0])
    chunks = [head, b"IDAT" + zlib.compress(bytes(1000)), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks
    )


def write(folder: Path, name: bytes, content: bytes) -> None:
    with open(os.path.join(os.fsencode(folder), name), "wb") as file:  # noqa: PTH118, PTH123 (bytes)
        file.write(content)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int, list[str]]:
    """A folder, how many good images it holds, and a part of each printed name that must be complained about."""
    folder = tmp_path / "images"
    folder.mkdir()
    good = 0
    for number, name in enumerate(NAMES):
        write(folder, name + b".jpg", picture(("JPEG", "PNG", "WEBP", "BMP")[number % 4]))  # the ending says nothing
        good += 1
    for name, size in (("one.png", (1, 1)), ("tall.png", (1, 30000)), ("wide.png", (30000, 1))):
        write(folder, name.encode(), picture("PNG", size))
        good += 1
    jpeg, png = picture("JPEG"), picture("PNG")
    write(folder, b"cut\n.jpg", jpeg[: len(jpeg) // 2])
    write(folder, b"zero.png", b"")
    write(folder, b"text.png", b"<svg onload=alert(1)>")
    flipped = bytearray(png)
    flipped[40] ^= 1
    write(folder, b"flipped.png", bytes(flipped))
    write(folder, b"bomb.png", bomb())
    os.mkfifo(folder / "pipe.jpg")
    (folder / "null.jpg").symlink_to("/dev/zero")
    (folder / "self.jpg").symlink_to("self.jpg")
    (folder / "gone.jpg").symlink_to("nowhere")
    (folder / "up").symlink_to("..")
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.jpg")
    monkeypatch.chdir(tmp_path)
    bad = ["cut\\n.jpg", "zero.png", "text.png", "flipped.png", "bomb.png", "pipe.jpg", "null.jpg", "self.jpg", "gone.jpg",
           "socket.jpg"]  # fmt: skip
    return folder, good, bad


def test_a_run_on_a_hostile_folder(
    hostile: tuple[Path, int, list[str]], tally: Tally, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, good, bad = hostile
    with tally.trial("a hostile file among the images", good + len(bad)):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        words = f"--bad-share 0.9 --batch-size 8 --epochs 2 --normalization measure --data {folder}"
        assert train("simsiam", tmp_path / "run", *words.split()) == 0
        lines = (tmp_path / "run" / "quarantine.txt").read_text().splitlines()
        named = {line.partition("\t")[0].rpartition("/")[2]: line.partition("\t")[2] for line in lines}
        assert sorted(named) == sorted(bad)
        assert all(named.values()), "each has a reason"
        said = caplog.text + "".join(capsys.readouterr())
        assert "\x1b" not in said
        assert all(line.isprintable() for line in "\n".join(lines).replace("\t", "").split("\n"))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory  # kilobytes
        assert grown < 1_000_000, "a run needs some 400 MB, the bomb alone 2.7 GB"


def test_too_many_of_them_stop_the_run_in_one_line(
    hostile: tuple[Path, int, list[str]], tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("too many unreadable files"):
        assert train("simsiam", tmp_path / "run", "--data", str(hostile[0])) == 2
        assert "more than the allowed share" in one_line(capsys)
        assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.faults)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_mutated_files_through_index_and_decoder(count: int, tally: Tally, tmp_path: Path) -> None:
    """Mutated files under mutated names: the index lists each, and each is an image or is named with a reason.

    tests/data/test_decode.py gives another 1,200 to the decoder alone, in `make test`.
    """
    generator = random.Random(count)
    originals = [picture(kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")]
    endings = ("jpg", "JPEG", "png", "webp", "bmp", "tiff", "gif")
    written = 0
    with tally.trial("a mutated image file", count):
        for number in range(count):
            content = bytearray(generator.choice(originals))
            for _ in range(generator.randrange(1, 12)):
                content[generator.randrange(min(len(content), generator.choice((64, 10**9))))] = generator.randrange(
                    256
                )
            if number % 4 == 0:
                del content[generator.randrange(len(content)) :]
            if number % 9 == 0:
                content += content[: generator.randrange(len(content) + 1)]
            place = tmp_path / "data" / f"class {number % 7}"
            place.mkdir(parents=True, exist_ok=True)
            name = bytes(generator.choice(range(1, 256)) for _ in range(generator.randrange(1, 20))).replace(b"/", b"_")
            write(place, b"%d" % number + name + b"." + generator.choice(endings).encode(), bytes(content))
            written += 1
        source = open_source(str(tmp_path / "data"))
        assert len(source) == written
        quarantine = Quarantine(source, path=tmp_path / "quarantine.txt", max_share=1.0)
        shapes = check_sample(source, seed=0, quarantine=quarantine, count=count)
        assert len(shapes) + len(quarantine) == count
        assert min(len(shapes), len(quarantine)) > count // 20
        assert len((tmp_path / "quarantine.txt").read_text().splitlines()) == len(quarantine)
        reader = Reader(source, seed=0, quarantine=quarantine)
        assert all(image.ndim == 3 for image in reader.images(list(range(0, count, 7))))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4_000_000  # kilobytes


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.faults)])
def test_a_mutated_index_is_never_believed(
    count: int, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every single bit of the numbers in its header (of all of its header in `make test-faults`), and random damage."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data"
    (root / "c").mkdir(parents=True)
    for number in range(12):
        (root / "c" / f"{number}.jpg").write_bytes(b"x")
    for path in (root, root / "c"):
        os.utime(path, (1, 1))
    expected = open_index(root)
    place = _place(expected.root)
    assert place is not None
    whole = place.read_bytes()
    # the header of the .npy and the text with its length, as far as the checksum
    head = [*range(128), *range(whole.index(b'{"containers"'), len(whole) - 16)]
    assert _load(place, expected.root) is not None
    damages = [
        [(n, whole[n] ^ 1 << bit)] for n in head for bit in range(8) if count > 1000 or whole[n] in b"0123456789"
    ]
    generator = random.Random(count)
    for _ in range(count):
        damages.append(
            [(generator.randrange(len(whole)), generator.randrange(256)) for _ in range(generator.randrange(1, 5))]
        )
    for number, damage in enumerate(damages):
        damaged = bytearray(whole)
        for position, value in damage:
            damaged[position] = value
        if number % 97 == 0:
            del damaged[generator.randrange(len(whole)) :]
        if damaged == whole:
            continue
        with tally.trial("a mutated index"):
            place.write_bytes(damaged)
            found = _load(place, expected.root)
            assert found is None
    assert open_index(root).fingerprint == expected.fingerprint


def test_the_machine_is_not_the_file(tally: Tally, tmp_path: Path) -> None:
    """Too many open files are no reason to call images unreadable."""
    from dssl.errors import DsslError

    (tmp_path / "a.png").write_bytes(picture("PNG"))
    source = open_source(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tally.trial("too many open files"):
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(DsslError) as caught:
                source.image(0)
            assert not isinstance(caught.value, UnreadableImage)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for handle in taken:
                os.close(handle)
        assert source.image(0).shape == (30, 40, 3)
