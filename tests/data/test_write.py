"""Shards that we write: read back by us to the byte, by plain tarfile, and by WebDataset and datasets where installed."""

import errno
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.commands.data import Arguments, run
from dssl.data import Quarantine, UnreadableImage, open_source, parquet
from dssl.data import packed as module
from dssl.data.jpeg import decode_together
from dssl.data.packed import write_shards
from dssl.errors import DsslError
from tests.rejecting import rejects

FORMATS = ["tar", pytest.param("parquet", marks=pytest.mark.filterwarnings("default"))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for number in range(36):
        name = f"{('ant', 'bee', 'größe')[number % 3]}/{number}.x.{('jpg', 'PNG', 'webp')[number // 12]}"
        (root / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9, 7, 3), np.uint8)).save(root / "train" / name)
    (root / "train" / "ant" / "bad.jpg").write_bytes(b"x")
    (root / "val" / "bee").mkdir(parents=True)
    Image.new("RGB", (5, 5), (1, 2, 3)).save(root / "val" / "bee" / "v.png")
    return root


def pack(photos: Path, out: Path, form: str, **options) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    assert run(Arguments(action="pack", data=str(photos), out=out, format=form, shard=10, **options)) == 0


def original_names(source) -> list[str]:
    """Of the images in the order of the shards."""
    if hasattr(source, "_groups"):
        return [source.label_of(n).split(".parquet/")[1] for n in range(len(source))]
    names = []
    for shard in source.index.containers:
        with tarfile.open(Path(os.fsdecode(source.index.root)) / os.fsdecode(shard)) as archive:
            names += [json.load(archive.extractfile(one))["path"] for one in archive if one.name.endswith(".json")]
    return names


@pytest.mark.parametrize("form", FORMATS)
def test_round_trip(photos, tmp_path, form, capsys):
    pack(photos, tmp_path / "out", form, bad_share=0.1)
    said = capsys.readouterr().out
    assert "train: 36 images in 4 shards" in said
    assert "ant/bad.jpg" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "packed.json",
        f"test-00000-of-00001.{form}",
        *(f"train-{n:05d}-of-00004.{form}" for n in range(4)),
    ]
    before, after = open_source(str(photos)), open_source(str(tmp_path / "out"))
    place = {before.label_of(n): n for n in range(len(before))}
    names = original_names(after)
    assert sorted(names) == sorted(set(place) - {"ant/bad.jpg"})
    assert names != sorted(names), "shards are samples of the whole"
    assert after.classes == before.classes == ("ant", "bee", "größe")
    for number, name in enumerate(names):
        original = (photos / "train" / name).read_bytes()
        assert bytes(after.content(number)) == original
        assert np.array_equal(after.image(number), before.image(place[name]))
        assert after.labels[number] == before.labels[place[name]]
    held = open_source(str(tmp_path / "out"), split="test")
    assert (held.labels.tolist(), held.classes) == ([1], after.classes)
    # written again, from the shards or from the folder: the same bytes
    again = tmp_path / "again"
    pack(photos, again, form, bad_share=0.1)
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("form", FORMATS)
def test_images_of_a_group_are_those_read_alone_and_jpegs_are_decoded_in_one_call(photos, tmp_path, form, monkeypatch):
    pack(photos, tmp_path, form, bad_share=0.1)
    source = open_source(str(tmp_path))
    content, broken = source.content, next(n for n in range(36) if source.content(n)[:2] == b"\xff\xd8")

    def damaged(index: int) -> bytearray:
        return content(index) if index != broken else content(index)[:60]

    monkeypatch.setattr(source, "content", damaged)
    calls: list[int] = []

    def counted(jpegs):
        calls.append(len(jpegs))
        return decode_together(jpegs)

    monkeypatch.setattr("dssl.data.decode.decode_together", counted)
    together = list(source.read([*range(36)]))
    assert calls == [11]  # 12 are JPEG, and the header of one is cut
    for number, image in enumerate(together):
        if number == broken:
            assert isinstance(image, UnreadableImage)
            assert image.path.endswith(source.label_of(broken))
            with pytest.raises(UnreadableImage):
                source.image(number)
        else:
            assert np.array_equal(image, Image.open(io.BytesIO(content(number))).convert("RGB"))
            assert np.array_equal(image, source.image(number))


@pytest.mark.parametrize("form", FORMATS)
def test_images_that_are_no_files_become_png(tmp_path, form):
    pack("shapes:12", tmp_path, form)
    before, after = open_source("shapes:12"), open_source(str(tmp_path))
    hashes = [{hashlib.md5(one.image(n)).digest() for n in range(12)} for one in (before, after)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 12


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # its own
def test_webdataset_reads_them(photos, tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is in the benchmarks' environment")
    pack(photos, tmp_path, "tar", bad_share=0.1)
    urls = [str(tmp_path / f"train-{n:05d}-of-00004.tar") for n in range(4)]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))
    assert len(samples) == 36
    for sample in samples:
        about = sample["json"]
        ending = next(one for one in ("jpg", "png", "webp") if one in sample)
        expected = np.asarray(Image.open(photos / "train" / about["path"]).convert("RGB"))
        assert np.array_equal(sample[ending], expected)
        assert sample["cls"] == about["label"] == ("ant", "bee", "größe").index(about["class"])


def test_datasets_reads_them(photos, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is in the benchmarks' environment")
    pack(photos, tmp_path / "out", "parquet", bad_share=0.1)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 36, "test": 1}
    assert loaded["train"].features["label"].names == ["ant", "bee", "größe"]
    ours = open_source(str(tmp_path / "out"))
    for number, row in enumerate(loaded["train"]):
        assert np.array_equal(np.asarray(row["image"].convert("RGB")), ours.image(number))
        assert row["label"] == ours.labels[number]


def drawn(folder: Path, *splits: str, value: int) -> Path:
    for split in splits:
        for image in range(12):
            path = folder / split / "ab"[image % 2] / f"{value} {image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (value, 5 * image, len(split))).save(path)
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["pixels", *FORMATS])
def test_a_complete_copy_is_not_written_over(tmp_path, form):
    """Whether the other images have a test split or not, and whether these have one."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    sets = [drawn(tmp_path / "one", "train", value=1), drawn(tmp_path / "two", "train", "val", value=2)]
    for first, second in (sets, sets[::-1], [sets[1]] * 2):
        out = tmp_path / f"{first.name}-{second.name}"
        assert run(Arguments(action="pack", data=str(first), out=out, format=form)) == 0
        before = content_of(out)
        with rejects(out, "empty folder") as caught:
            run(Arguments(action="pack", data=str(second), out=out, format=form))
        assert ("these images" in str(caught.value)) == (first == second)
        assert content_of(out) == before


@pytest.mark.parametrize("form", ["pixels", *FORMATS])
def test_a_copy_that_is_interrupted_anywhere_is_incomplete_until_the_same_command_ends(tmp_path, monkeypatch, form):
    """At every rename in turn, also between the splits."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    drawn(tmp_path / "photos", "train", "val", value=1), drawn(tmp_path / "others", "train", "val", value=2)

    def arguments(place: str, out: str) -> Arguments:
        return Arguments(action="pack", data=str(tmp_path / place), out=tmp_path / out, format=form)

    def opened(out: str, split="train"):
        return open_source(f"{'packed:' if form == 'pixels' else ''}{tmp_path / out}", split=split)

    assert run(arguments("photos", "whole")) == 0
    whole, real, stop = content_of(tmp_path / "whole"), os.replace, 0

    def replace(source, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        real(source, target)

    while True:
        out, left = f"out{stop}", stop
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                run(arguments("photos", out))
                break
            except KeyboardInterrupt:
                pass
        for split in ("train", "test"):
            with pytest.raises(DsslError):
                opened(out, split)
        (tmp_path / out / ".train.npy.abc.part").write_bytes(b"left by a kill")
        if any("train" in name and name[0] != "." for name in content_of(tmp_path / out)):
            before = content_of(tmp_path / out)
            with rejects(tmp_path / out, "empty folder"):
                run(arguments("others", out))
            assert content_of(tmp_path / out) == before
        assert run(arguments("photos", out)) == 0
        assert content_of(tmp_path / out) == whole
        stop += 1
    assert stop >= 4  # the note, a file for each split, and the note again
    assert [len(opened("whole", split)) for split in ("train", "test")] == [12, 12]


def test_a_full_disk_leaves_whole_shards_and_one_line(photos, tmp_path, monkeypatch):
    """The third shard meets a full disk; a disk of its own is filled in tests/faults."""
    real, calls = module._write_tar, []

    def full(file, samples, classes):
        calls.append(1)
        if len(calls) == 3:
            next(iter(samples))
            raise OSError(errno.ENOSPC, "No space left on device")
        yield from real(file, samples, classes)

    monkeypatch.setattr(module, "_write_tar", full)
    source = open_source(str(photos))

    def write() -> tuple[int, int]:
        quarantine = Quarantine(source, max_share=0.1)
        return write_shards(source, tmp_path / "out", split="train", form="tar", shard=10, quarantine=quarantine)

    with rejects(tmp_path / "out", os.strerror(errno.ENOSPC), "20 of 37", "GB"):
        write()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"train-0000{n}-of-00004.tar" for n in range(2)
    ]
    with rejects(tmp_path / "out", "2 of 4", "number 2"):
        open_source(str(tmp_path / "out"))
    monkeypatch.undo()
    assert write()[0] == 4
    assert len(open_source(str(tmp_path / "out"))) == 36


def test_refusals(photos, tmp_path):
    for options, facts in (
        ({"form": "tar", "image_size": 64}, ["--image-size", 64, "--format pixels"]),
        ({"form": "pixels"}, ["--shard", 10, "--format tar or parquet"]),
        ({"form": "tar", "channels": 0}, ["channels", 0, 1]),
    ):
        with rejects(*facts):
            pack(photos, tmp_path / "out", **options)
    (tmp_path / "train-00000-of-00009.tar").write_bytes(b"")
    with rejects(tmp_path, "train-00000-of-00009.tar", "empty folder"):
        pack(photos, tmp_path, "tar", bad_share=0.1)
    for name in ("train.json", "packed.json"):
        path = tmp_path / name.replace(".", "-") / name
        path.parent.mkdir()
        path.write_text("of someone else")
        with rejects(path.parent, name, "empty folder"):
            run(Arguments(action="pack", data=str(photos), out=path.parent, bad_share=0.1))
        assert path.read_text() == "of someone else"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "1.png").write_bytes(b"x")
    with rejects(tmp_path / "bad", "1 images", "readable"):
        pack(tmp_path / "bad", tmp_path / "none", "tar", bad_share=1.0)


def test_the_tar_is_an_ordinary_one(photos, tmp_path):
    pack(photos, tmp_path, "tar", bad_share=0.1)
    with tarfile.open(tmp_path / "train-00001-of-00004.tar") as archive:
        members = archive.getmembers()
        assert [one.name.partition(".")[2] for one in members[1:3]] == ["cls", "json"]
        assert members[0].name.partition(".")[0] == members[2].name.partition(".")[0]
        Image.open(io.BytesIO(archive.extractfile(members[0]).read())).load()


@pytest.mark.parametrize("form", FORMATS)
def test_shards_are_not_written_over_those_that_are_read(photos, tmp_path, form):
    pack(photos, tmp_path / "shards", form)
    before = {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    for place in ("", f"train-*.{form}"):
        with rejects(tmp_path / "shards", "empty folder"):
            pack(tmp_path / "shards" / place, tmp_path / "shards", form)
    assert {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()} == before


def test_row_groups_are_read_once_when_shards_are_written_anew(photos, tmp_path, monkeypatch):
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    pack(photos, tmp_path / "first", "parquet")
    for path in (tmp_path / "first").glob("*.parquet"):
        pyarrow_parquet.write_table(pyarrow_parquet.read_table(path), path, row_group_size=2)
    monkeypatch.setattr(parquet, "_WINDOW", 1)
    source = open_source(str(tmp_path / "first"))
    write_shards(source, tmp_path / "second", split="train", form="tar", shard=100, quarantine=Quarantine(source))
    place = {source.label_of(number): number for number in range(len(source))}
    written = [place[name] for name in original_names(open_source(str(tmp_path / "second")))]
    groups = np.searchsorted(source.shards, written, side="right")
    assert (np.diff(groups) != 0).sum() == len(source.shards) - 2  # each is left once
    assert written != sorted(written)
