"""The packed copy: the same images, smaller; damage is named; a failed attempt leaves nothing."""

import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import NoSplitError, Quarantine, UnreadableImage, open_source
from dssl.data.packed import pack, shrink_to
from dssl.errors import DsslError

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
    pack(source, tmp_path / "out" / "train.pack", side=side, quarantine=Quarantine(source, max_share=0.5))
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
        assert copy.image(index).flags.writeable
    copy.image(0)[:] = 0  # copy on write: the file is not touched
    assert open_source(f"packed:{tmp_path / 'out'}").image(0).any()


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


def test_a_flipped_pixel_bit_is_an_unreadable_image(folder, tmp_path):
    packed(folder, tmp_path)
    path = tmp_path / "out" / "train.pack"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    copy = open_source(f"packed:{path}")
    with pytest.raises(UnreadableImage, match="checksum"):
        copy.image(0)
    copy.image(1)


def test_other_damage_is_refused(folder, tmp_path):
    packed(folder, tmp_path)
    path = tmp_path / "out" / "train.pack"
    whole = path.read_bytes()
    tables = int.from_bytes(whole[8:16], "little")
    for length in [0, 5, 12, 16, tables, tables + 4, tables + 40, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(DsslError):
            open_source(f"packed:{path}")
    for position in [*range(16), *range(tables, tables + 60), *GENERATOR.integers(tables, len(whole), 60).tolist()]:
        damaged = bytearray(whole)
        damaged[position] ^= 64
        path.write_bytes(damaged)
        with pytest.raises(DsslError) as caught:
            open_source(f"packed:{path}")
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc")
def test_a_copy_larger_than_memory_and_swap(folder, tmp_path):
    """A sparse file: its pixels take no room, and only their mapping is as large as it says."""
    packed(folder, tmp_path)
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    large = sum(int(sizes[name].split()[0]) for name in ("MemTotal", "SwapTotal")) * 1024 + (1 << 30)
    path = tmp_path / "out" / "train.pack"
    grow(path, large)
    copy = open_source(f"packed:{path}")
    assert path.stat().st_size > large
    copy.image(0)[:] = 7
    assert open_source(f"packed:{path}").image(0).any()


def grow(path: Path, by: int) -> None:
    """Move the tables of a packed file back, so that its last image ends far behind its pixels."""
    content = path.read_bytes()
    position = int.from_bytes(content[8:16], "little")
    tail = content[position + 16 :]
    tail = tail.replace(position.to_bytes(8, "little"), (position + by).to_bytes(8, "little"))
    digest = hashlib.blake2b(tail, digest_size=16).digest()
    with path.open("r+b") as file:
        file.seek(8)
        file.write((position + by).to_bytes(8, "little"))
        file.truncate(position)
        file.seek(position + by)
        file.write(digest + tail)


def test_splits(folder, tmp_path):
    packed(folder, tmp_path)
    for place in (tmp_path / "out", tmp_path / "out" / "train.pack"):
        with pytest.raises(NoSplitError):
            open_source(f"packed:{place}", split="test")
    (tmp_path / "out" / "test.pack").write_bytes((tmp_path / "out" / "train.pack").read_bytes())
    assert len(open_source(f"packed:{tmp_path / 'out'}", split="test")) == 4
    with pytest.raises(DsslError, match="3 channels"):
        open_source(f"packed:{tmp_path / 'out'}", channels=1)
    with pytest.raises(DsslError, match="dssl data pack"):
        open_source("packed:/nowhere")


def test_a_full_disk_keeps_the_old_copy_and_says_what_is_needed(folder, tmp_path, monkeypatch):
    source, _ = packed(folder, tmp_path)
    before = (tmp_path / "out" / "train.pack").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DsslError, match=r"train\.pack: No space left on device after .* GB are needed"):
        pack(source, tmp_path / "out" / "train.pack", side=32, quarantine=Quarantine(source, max_share=0.5))
    assert (tmp_path / "out" / "train.pack").read_bytes() == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.pack"]
