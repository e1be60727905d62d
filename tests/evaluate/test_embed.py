"""Embeddings in files: complete, resumable, never mixed."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

from dssl.augment import CIFAR10
from dssl.commands.data import Arguments as Data
from dssl.commands.data import run as show
from dssl.commands.embed import Arguments, run
from dssl.data.shapes import Shapes
from dssl.errors import DsslError
from dssl.weights.encoder import Encoder
from tests.rejecting import states


@pytest.fixture
def expected(encoder: nn.Module) -> torch.Tensor:
    small = Encoder(network=encoder, name="small", image_size=32, normalization=CIFAR10)
    return small.features(Shapes(25)).values


def test_shards_hold_every_image_and_a_second_run_goes_on(
    run_folder: Callable[..., Path], tmp_path: Path, expected: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = Arguments(weights=run_folder(), data="shapes:25", out=tmp_path / "out", shard=10, threads=1)
    run(arguments)
    parts = [np.load(tmp_path / "out" / f"embeddings-{number:05d}.npy") for number in range(3)]
    assert [len(part) for part in parts] == [10, 10, 5]
    np.testing.assert_allclose(np.concatenate(parts), expected.numpy(), rtol=1e-4, atol=1e-5)
    names = (tmp_path / "out" / "names-00002.txt").read_text().splitlines()
    assert names == [f"shapes train {number}" for number in range(20, 25)]
    # as a kill between the two files of a shard would leave it
    (tmp_path / "out" / "names-00001.txt").unlink()
    untouched = (tmp_path / "out" / "embeddings-00000.npy").stat().st_mtime_ns
    run(arguments)
    assert "(15 were there" in capsys.readouterr().out
    assert (tmp_path / "out" / "embeddings-00000.npy").stat().st_mtime_ns == untouched
    assert len((tmp_path / "out" / "names-00001.txt").read_text().splitlines()) == 10


def test_other_weights_images_or_things_are_not_mixed(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = run_folder()
    run(Arguments(weights=folder, data="shapes:25", out=tmp_path / "out", threads=1))
    with pytest.raises(DsslError, match="source, images"):
        run(Arguments(weights=folder, data="shapes:26", out=tmp_path / "out", threads=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("x")
    with pytest.raises(DsslError, match=str(tmp_path / "full")):
        run(Arguments(weights=folder, data="shapes:25", out=tmp_path / "full", threads=1))
    with pytest.raises(DsslError, match=r"\.npz, \.csv or \.parquet"):
        run(Arguments(weights=folder, data="shapes:25", out=tmp_path / "a.npy"))


def test_parquet(run_folder: Callable[..., Path], tmp_path: Path, expected: torch.Tensor) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run(Arguments(weights=run_folder(), data="shapes:25", out=tmp_path / "e.parquet", shard=10, threads=1))
    with parquet.ParquetFile(tmp_path / "e.parquet") as file:
        assert file.metadata.num_row_groups == 3
        found = file.read().to_pydict()
    np.testing.assert_allclose(np.array(found["embedding"]), expected.numpy(), rtol=1e-4, atol=1e-5)
    source = Shapes(25)
    assert found["path"] == [source.label_of(number) for number in range(25)]
    assert source.classes is not None
    assert source.labels is not None
    assert found["label"] == [source.classes[label] for label in source.labels]
    pandas = pytest.importorskip("pandas", reason="pandas is in the benchmarks' environment")
    duckdb = pytest.importorskip("duckdb", reason="duckdb is in the benchmarks' environment")
    path = tmp_path / "e.parquet"
    frame, table = pandas.read_parquet(path), duckdb.read_parquet(str(path)).fetchnumpy()
    for column in ("path", "label"):
        assert [*frame[column]] == [*table[column]] == found[column]
    for rows in (frame["embedding"], table["embedding"]):
        assert np.array_equal(np.stack([*rows]).astype(np.float32), np.array(found["embedding"], np.float32))


def test_small_files_hold_the_same(run_folder: Callable[..., Path], tmp_path: Path, expected: torch.Tensor) -> None:
    folder = run_folder()
    run(Arguments(weights=folder, data="shapes:25", out=tmp_path / "e.npz", threads=1))
    with np.load(tmp_path / "e.npz", allow_pickle=False) as found:
        np.testing.assert_allclose(found["embeddings"], expected.numpy(), rtol=1e-4, atol=1e-5)
        assert found["names"][24] == "shapes train 24"
        assert json.loads(str(found["about"]))["encoder"] == "small"
        embeddings = found["embeddings"]
    run(Arguments(weights=folder, data="shapes:25", out=tmp_path / "e.csv", threads=1))
    with (tmp_path / "e.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0][:2] == ["name", "d0"]
    assert len(rows) == 26
    again = np.array([[float(cell) for cell in row[1:]] for row in rows[1:]], np.float32)
    assert np.array_equal(again, embeddings)  # every bit survives the text


def test_unreadable_images_have_no_row_and_are_named(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(5):
        Pillow.fromarray(np.full((40, 40, 3), 50 * number, np.uint8)).save(images / f"{number}.png")
    content = (images / "3.png").read_bytes()
    (images / "3.png").write_bytes(content[: len(content) // 2])
    run(Arguments(weights=run_folder(), data=str(images), out=tmp_path / "out", threads=1))
    states(capsys.readouterr().out, "1 images", "read")
    assert (tmp_path / "out" / "names-00000.txt").read_text().split() == ["0.png", "1.png", "2.png", "4.png"]
    assert len(np.load(tmp_path / "out" / "embeddings-00000.npy")) == 4
    assert "3.png" in (tmp_path / "out" / "unreadable.txt").read_text()


def test_shards_of_a_file_that_has_none_are_refused(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DsslError, match=r"--shard is 5.*e\.npz.*\.parquet"):
        run(Arguments(weights=run_folder(), data="shapes:25", out=tmp_path / "e.npz", shard=5, threads=1))


def test_a_shard_without_a_readable_image_has_no_rows_and_the_job_goes_to_its_end(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, folder = tmp_path / "images", run_folder()
    images.mkdir()
    for number in range(6):
        Pillow.fromarray(np.full((40, 40, 3), 40 * number, np.uint8)).save(images / f"{number}.png")
    for number in (2, 3):
        (images / f"{number}.png").write_bytes(b"x")
    arguments = Arguments(weights=folder, data=str(images), out=tmp_path / "out", shard=2, threads=1)
    run(arguments)
    parts = [np.load(tmp_path / "out" / f"embeddings-{number:05d}.npy") for number in range(3)]
    assert [len(part) for part in parts] == [2, 0, 2]
    assert len({part.shape[1] for part in parts}) == 1
    assert (tmp_path / "out" / "names-00001.txt").read_text() == ""
    states(capsys.readouterr().out, "2 images", "read")
    run(arguments)
    assert "(4 were there" in capsys.readouterr().out
    for number in (0, 1, 4, 5):
        (images / f"{number}.png").write_bytes(b"x")
    for out in ("nothing", "nothing.npz"):
        with pytest.raises(DsslError, match=str(images)):
            run(Arguments(weights=folder, data=str(images), out=tmp_path / out, threads=1))


def test_what_the_scan_and_the_decoder_could_not_read_is_one_count(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, folder = tmp_path / "images", run_folder()
    images.mkdir()
    for number in range(3):
        Pillow.fromarray(np.full((40, 40, 3), 50 * number, np.uint8)).save(images / f"{number}.png")
    (images / "cut.png").write_bytes(b"x")
    (images / "gone.png").symlink_to("nowhere")
    assert show(Data(action="show", data=str(images), all=True, bad_share=1.0)) == 0
    assert "unreadable   2 files" in capsys.readouterr().out
    for out in ("out", "out.npz"):
        run(Arguments(weights=folder, data=str(images), out=tmp_path / out, threads=1))
        states(capsys.readouterr().out, "2 images", "read")
    lines = (tmp_path / "out" / "unreadable.txt").read_text().splitlines()
    assert {line.partition("\t")[0] for line in lines} == {str(images / "cut.png"), str(images / "gone.png")}


def test_images_that_were_away_are_embedded_when_they_are_back(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(6):
        Pillow.effect_noise((32, 32), 20 + number).convert("RGB").save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "list.txt").write_text("".join(f"photos/{number}.png\n" for number in range(6)))
    arguments = Arguments(
        weights=run_folder(), data=str(tmp_path / "list.txt"), out=tmp_path / "out", shard=2, threads=1
    )
    (tmp_path / "photos").rename(tmp_path / "away")
    (tmp_path / "photos").mkdir()
    for number in (0, 1, 2):
        (tmp_path / "photos" / f"{number}.png").hardlink_to(tmp_path / "away" / f"{number}.png")
    for found in (3, 3, 6):
        if found == 6:
            for number in (3, 4, 5):
                (tmp_path / "photos" / f"{number}.png").hardlink_to(tmp_path / "away" / f"{number}.png")
        run(arguments)
        assert sum(len(np.load(path)) for path in (tmp_path / "out").glob("*.npy")) == found
        assert (tmp_path / "out" / "unreadable.txt").is_file() == (found == 3)
    said = capsys.readouterr().out.splitlines()
    assert any("(3 were there" in line for line in said)


@pytest.mark.parametrize("listed", [False, True])
def test_images_that_were_replaced_are_embedded_again(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], listed: bool
) -> None:
    """Bitmaps of equal sizes under equal names: neither a list's fingerprint nor a folder's tells them apart."""
    photos = tmp_path / "photos"
    photos.mkdir()

    def draw(number: int, seed: int) -> None:
        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Pillow.fromarray(pixels).save(photos / f"{number}.bmp")

    for number in range(6):
        draw(number, number)
    (photos / "5.bmp").write_bytes(b"x")
    (tmp_path / "list.txt").write_text("".join(f"photos/{number}.bmp\n" for number in range(6)))
    data, weights = str(tmp_path / "list.txt" if listed else photos), run_folder()
    arguments = Arguments(weights=weights, data=data, out=tmp_path / "out", shard=2, threads=1)
    run(arguments)
    draw(2, 77)
    capsys.readouterr()
    run(arguments)
    states(capsys.readouterr().out, "5 embeddings", 256, "3 shards", "(2 were there")
    run(replace(arguments, out=tmp_path / "anew"))
    for number in range(3):
        name = f"embeddings-{number:05d}.npy"
        assert np.array_equal(np.load(tmp_path / "out" / name), np.load(tmp_path / "anew" / name))
    assert (tmp_path / "out" / "unreadable.txt").read_text() == (tmp_path / "anew" / "unreadable.txt").read_text()
    # a manifest of an earlier version has no stamps: its shards count as complete
    about = json.loads((tmp_path / "out" / "embeddings.json").read_text())
    del about["files"]
    (tmp_path / "out" / "embeddings.json").write_text(json.dumps(about))
    run(arguments)
    assert "(5 were there" in capsys.readouterr().out


def test_the_split_is_named(
    run_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, folder = tmp_path / "photos", run_folder()
    for name in ("train/a/1.png", "train/a/2.png", "val/a/3.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Pillow.new("RGB", (40, 40)).save(photos / name)
    for data, split, count, others in (
        (photos, "train", 2, True), (photos, "test", 1, True), (photos / "train", "train", 2, False),
    ):  # fmt: skip
        run(Arguments(weights=folder, data=str(data), split=split, out=tmp_path / "out.npz", threads=1))
        output = capsys.readouterr().out
        (line,) = [line for line in output.splitlines() if f"({count} images): the {split} split" in line]
        assert ("--split" in line) == others
