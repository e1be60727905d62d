"""The packed copy: the same images, smaller; damage is named; a failed attempt leaves nothing."""

import errno
import hashlib
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import NoSplitError, Quarantine, UnreadableImage, open_source
from dssl.data.packed import pack, shrink_to
from dssl.errors import DsslError
from tests.rejecting import rejects

GENERATOR = np.random.default_rng(4)


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "data"
    for number, shape in enumerate([(20, 30), (64, 48), (100, 33), (8, 8)]):
        place = root / ("ab"[number % 2]) / f"{number} ü.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(GENERATOR.integers(0, 256, (*shape, 3), np.uint8)).save(place)
    (root / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    return root


def packed(folder: Path, tmp_path: Path, side: int = 32):
    source = open_source(str(folder))
    pack(source, tmp_path / "out" / "train.npy", side=side, quarantine=Quarantine(source, max_share=0.5))
    return source, open_source(f"packed:{tmp_path / 'out'}")


def test_what_is_packed_is_what_was_there(folder, tmp_path):
    source, copy = packed(folder, tmp_path)
    assert len(copy) == len(source) - 1  # the broken one is left out
    names = {source.label_of(index): index for index in range(len(source))}
    assert copy.classes == source.classes
    for index in range(len(copy)):
        original = names[copy.label_of(index)]
        assert copy.labels[index] == source.labels[original]
        assert np.array_equal(copy.image(index), shrink_to(source.image(original), side=32))
        assert not copy.image(index).flags.writeable  # nobody can change the file


def test_sizes():
    assert shrink_to(np.zeros((100, 40, 3), np.uint8), side=20).shape == (50, 20, 3)
    assert shrink_to(np.zeros((30, 40, 1), np.uint8), side=20).shape == (20, 27, 1)
    small = GENERATOR.integers(0, 256, (7, 90, 3), np.uint8)
    assert shrink_to(small, side=7) is small
    large = GENERATOR.integers(0, 256, (90, 60, 3), np.uint8)
    expected = Image.fromarray(large).resize((30, 45), Image.Resampling.BICUBIC)
    assert np.array_equal(shrink_to(large, side=30), np.asarray(expected))


def test_the_fingerprint_follows_source_and_side(folder, tmp_path):
    source, first = packed(folder, tmp_path)
    _, again = packed(folder, tmp_path)
    _, other = packed(folder, tmp_path, side=31)
    assert first.fingerprint == again.fingerprint
    assert len({source.fingerprint, first.fingerprint, other.fingerprint}) == 3


def test_numpy_opens_the_pixels(folder, tmp_path):
    _, copy = packed(folder, tmp_path)
    pixels = np.load(tmp_path / "out" / "train.npy", mmap_mode="r")
    assert np.array_equal(pixels, np.concatenate([copy.image(index).ravel() for index in range(len(copy))]))


def test_a_flipped_pixel_bit_is_an_unreadable_image(folder, tmp_path):
    packed(folder, tmp_path)
    path = tmp_path / "out" / "train.npy"
    content = bytearray(path.read_bytes())
    content[np.load(path, mmap_mode="r").offset + 20] ^= 1
    path.write_bytes(content)
    copy = open_source(f"packed:{path}")
    with rejects(tmp_path / "out" / "train.npy", "checksum", error=UnreadableImage):
        copy.image(0)
    copy.image(1)


def damaged(path: Path, lengths: list[int], positions: list[int]) -> None:
    """Whatever is cut or flipped there is an error of one line."""
    whole, place = path.read_bytes(), path.with_name("train.pack" if path.suffix == ".pack" else "train.npy")
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(DsslError):
            open_source(f"packed:{place}")
    for position in positions:
        content = bytearray(whole)
        content[position] ^= 64
        path.write_bytes(content)
        with pytest.raises(DsslError) as caught:
            open_source(f"packed:{place}")
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)


def test_other_damage_is_an_error(folder, tmp_path):
    packed(folder, tmp_path)
    pixels, about = tmp_path / "out" / "train.npy", tmp_path / "out" / "train.json"
    damaged(pixels, [0, 5, 128, pixels.stat().st_size - 1], [])
    size = about.stat().st_size
    damaged(about, [0, 1, size // 2, size - 40, size - 1], [*range(60), *range(size - 60, size), *range(60, size, 7)])
    about.unlink()
    with rejects(pixels, os.strerror(errno.ENOENT), "dssl data pack"):
        open_source(f"packed:{pixels}")


@pytest.fixture
def earlier(tmp_path) -> Path:
    """A copy that an earlier version wrote."""
    (kept,) = (Path(__file__).parents[1] / "train" / "earlier").glob("*.tar.*")
    with tarfile.open(kept) as archive:
        archive.extractall(tmp_path / "earlier", filter="data")
    return next((tmp_path / "earlier").rglob("train.pack"))


def test_a_copy_of_an_earlier_version(earlier):
    copies = [open_source(f"packed:{place}") for place in (earlier, earlier.parent)]
    assert len({copy.fingerprint for copy in copies}) == 1
    assert copies[0].image(0).shape == (16, 16, 3)
    assert copies[0].classes is not None
    size, tables = earlier.stat().st_size, int.from_bytes(earlier.read_bytes()[8:16], "little")
    positions = [*range(16), *range(tables, tables + 60), *GENERATOR.integers(tables, size, 60).tolist()]
    damaged(earlier, [0, 5, 12, 16, tables, tables + 4, tables + 40, size - 1], positions)


@pytest.fixture
def large() -> int:
    """More bytes than this machine has memory and swap."""
    if not Path("/proc/meminfo").exists():
        pytest.skip("needs /proc/meminfo")
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(sizes[name].split()[0]) for name in ("MemTotal", "SwapTotal")) * 1024 + (1 << 30)


def test_a_copy_larger_than_memory_and_swap(folder, tmp_path, large):
    """A sparse file: its pixels take no room, and only their mapping is as large as it says."""
    packed(folder, tmp_path)
    path, rows = tmp_path / "out" / "train.npy", large // (3 * 60_000)
    about = json.loads(path.with_suffix(".json").read_bytes())
    del about["digest"]
    added = {"heights": rows, "widths": 60_000, "checksums": 0, "names": "large", "labels": 0}
    body = json.dumps(about | {name: [*about[name], value] for name, value in added.items()}).encode()[:-1]
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    path.with_suffix(".json").write_bytes(body + b', "digest": "%s"}' % digest.encode())
    os.truncate(path, path.stat().st_size + rows * 60_000 * 3)
    assert open_source(f"packed:{path}").image(0).any()


def test_an_earlier_copy_larger_than_memory_and_swap(earlier, large):
    """Its tables move back, so that its last image ends far behind its pixels."""
    content = earlier.read_bytes()
    position = int.from_bytes(content[8:16], "little")
    tail = bytearray(content[position + 16 :])
    heights = 16 + int.from_bytes(tail[8:16], "little")
    last = heights + 4 * (json.loads(tail[16:heights])["count"] - 1)
    rows = large // (16 * 3)
    tail[last : last + 4] = rows.to_bytes(4, "little")
    end = position + (rows - 16) * 16 * 3
    tail[:8] = end.to_bytes(8, "little")
    with earlier.open("r+b") as file:
        file.truncate(position)
        file.seek(8)
        file.write(end.to_bytes(8, "little"))
        file.seek(end)
        file.write(hashlib.blake2b(tail, digest_size=16).digest() + tail)
    assert open_source(f"packed:{earlier}").image(0).any()


def test_splits(folder, tmp_path):
    packed(folder, tmp_path)
    for place in (tmp_path / "out", tmp_path / "out" / "train.npy"):
        with pytest.raises(NoSplitError):
            open_source(f"packed:{place}", split="test")
    for ending in ("npy", "json"):
        (tmp_path / "out" / f"test.{ending}").write_bytes((tmp_path / "out" / f"train.{ending}").read_bytes())
    assert len(open_source(f"packed:{tmp_path / 'out'}", split="test")) == 4
    with rejects(tmp_path / "out", "3 channels", 1):
        open_source(f"packed:{tmp_path / 'out'}", channels=1)
    with rejects("/nowhere", "dssl data pack"):
        open_source("packed:/nowhere")


def test_a_full_disk_keeps_the_old_copy_and_says_what_is_needed(folder, tmp_path, monkeypatch):
    source, _ = packed(folder, tmp_path)
    before = (tmp_path / "out" / "train.npy").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with rejects(tmp_path / "out" / "train.npy", os.strerror(errno.ENOSPC), "5 of 5", "GB"):
        pack(source, tmp_path / "out" / "train.npy", side=32, quarantine=Quarantine(source, max_share=0.5))
    assert (tmp_path / "out" / "train.npy").read_bytes() == before
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"train.npy", "train.json"}
