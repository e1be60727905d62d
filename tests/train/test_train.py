"""The loop as a library call: what a run leaves, how it ends when it goes bad, and what it refuses."""

import errno
import json
import logging
import os
import pty
import re
import select
import shutil
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from PIL import Image

from dssl.cli import main
from dssl.config import CheckpointConfig, HealthConfig, OptimizerConfig, RunConfig
from dssl.data import Quarantine, open_source
from dssl.data.index import open_index
from dssl.data.packed import pack
from dssl.data.shapes import Shapes
from dssl.errors import DsslError
from dssl.methods import SimSiamConfig
from dssl.methods.simsiam import SimSiam
from dssl.report.pictures import draw_gallery
from dssl.report.run_report import embedding_maps, read_run
from dssl.run import RunFolder
from dssl.training.prepare import open_test_data
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.rejecting import rejects
from tests.train.running import command, fork

TINY = RunConfig(
    data="shapes:64", encoder="whitened", image_size=16, method=SimSiamConfig(hidden=16, output=16, bottleneck=8), epochs=2,
    batch_size=16, precision="fp32", knn_every=1, optimizer=OptimizerConfig(warmup_epochs=0), health=HealthConfig(every=2),
)  # fmt: skip


def test_knn_while_training_knows_classes_by_name_and_outlives_an_unreadable_test_image(tmp_path: Path) -> None:
    colours = {"bird": (200, 0, 0), "cat": (0, 200, 0), "dog": (0, 0, 200)}
    for split, count in (("train", 8), ("val", 3)):
        for number, (name, colour) in enumerate(colours.items()):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for place in range(count):
                Image.new("RGB", (16, 16), colour).save(folder / f"{place}.png")
            if split == "val":
                (folder / f"{number}.png").write_bytes(b"not an image")
    (tmp_path / "data" / "train" / "ape").mkdir()  # without images: the labels of the splits count differently
    config = replace(
        TINY, data=str(tmp_path / "data"), batch_size=8, epochs=1, normalization="imagenet", standard="crop(0.8,1) > flip",
        optimizer=OptimizerConfig(rate=1e-6, warmup_epochs=0),
    )  # fmt: skip
    result = train(config, tmp_path / "run")
    assert result.knn == 100.0
    (record,) = [record for record in RunFolder(tmp_path / "run").metrics() if "knn" in record]
    assert record["knn_protocol"]["queries"] == 6
    maps, classes, problems = embedding_maps([read_run(tmp_path / "run")], images=9)
    assert ([len(each.points) for each in maps], problems) == ([6], [])
    assert set(colours) <= set(classes)
    for path in (tmp_path / "data" / "val").rglob("*.png"):
        path.write_bytes(b"offline")
    maps, _, (problem,) = embedding_maps([read_run(tmp_path / "run")], images=9)
    assert maps == []
    assert problem.startswith("run: no map: ")


def test_a_line_of_progress_shows_knn_of_its_own_epoch_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dssl"):
        train(replace(TINY, epochs=5, knn_every=2), tmp_path / "run")
    records = RunFolder(tmp_path / "run").metrics()
    measured = {round(record["epoch"]) for record in records if "knn" in record}
    lines = {int(line[6]): line for line in caplog.messages if line.startswith("epoch ")}
    assert set(lines) > measured
    assert {epoch for epoch, line in lines.items() if "kNN" in line} == measured


def _on_terminal(path: str, words: list[str]) -> None:
    terminal = os.open(path, os.O_RDWR)
    os.dup2(terminal, 2)
    sys.exit(main(words))


def test_on_a_terminal_the_progress_line_fits_and_repeats_no_old_knn(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 80))
    words = command("simclr", tmp_path / "run", "--knn-every", "2", "--health.every", "1")[3:]
    child = fork(_on_terminal, os.ttyname(theirs), words, log=tmp_path / "log")
    shown = b""
    while child.process.is_alive() or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
    assert child.wait() in (0, 3), child.said()
    os.close(ours)
    os.close(theirs)
    everything = shown.decode().replace("\r", "\n").splitlines()
    bars = [
        line
        for line in everything
        if re.search(r"epoch \d/4 · .*images/s", line) and "loss" in line and "kNN" not in line
    ]
    assert bars
    for line in bars:
        assert len(line.rstrip()) <= 80
        assert re.search(r"^epoch \d/4 · \d+:\d\d left · too early · \d+ images/s \(data \d+%\) · loss", line)
    lines = [line for line in everything if "kNN" in line and line.startswith("epoch")]
    records = RunFolder(tmp_path / "run").metrics()
    measured = [round(record["epoch"]) for record in records if "knn" in record]
    assert measured == [1, 2, 4]
    assert [int(re.search(r"epoch (\d+)", line)[1]) for line in lines] == measured  # type: ignore[index]


def _counted(words: list[str]) -> None:
    """How often a run is validated and a graph parsed, by the calls of the interpreter."""
    from dssl.graph import _parse as parse

    counts = {RunConfig.__post_init__.__code__: 0, parse.__code__: 0}

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in counts:
            counts[frame.f_code] += 1

    sys.setprofile(count)
    code = main(words)
    sys.setprofile(None)
    print(json.dumps([*counts.values()]))
    sys.exit(code)


@pytest.mark.parametrize("recipe", ["shapes", "folder"])
def test_a_run_is_validated_and_its_graph_parsed_at_most_twice(recipe: str, tmp_path: Path) -> None:
    words = command("simclr", tmp_path / "run", "--epochs", "1")[3:]
    words = [recipe if word == "shapes" else word for word in words]
    for attempt in ("new", "resumed"):
        child = fork(_counted, words, log=tmp_path / attempt)
        assert child.wait() in (0, 3), child.said()
        validated, parsed = json.loads(child.said().splitlines()[-1])
        most = 3 if (recipe, attempt) == ("folder", "new") else 2  # what was measured makes other settings of it
        assert 1 <= validated <= most
        assert 1 <= parsed <= most


@pytest.mark.parametrize("layout", ["one class", "a class that train lacks"])
def test_labels_that_cannot_give_a_curve_do_not_stop_a_run(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classes = {"train": ["images"], "val": ["images"]}
    if layout != "one class":
        classes = {"train": ["bird", "cat"], "val": ["bird", "dog"]}
    for split, names in classes.items():
        for name in names:
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for place in range(8):
                Image.effect_noise((16, 16), 20 + place).convert("RGB").save(folder / f"{place}.png")
    config = replace(TINY, data=str(tmp_path / "data"), batch_size=8, epochs=1, normalization="imagenet")
    with caplog.at_level(logging.INFO, logger="dssl"):
        result = train(config, tmp_path / "run")
    assert (result.exit_code, result.knn) == (0, None)
    assert "no kNN accuracy while training: " in caplog.text


def test_a_rare_class_outside_of_the_bank_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dssl.training.knn.BANK", 3)
    assert train(replace(TINY, data="shapes:64", epochs=1), tmp_path / "run").knn is not None


def test_a_run_leaves_a_folder_that_explains_itself(tmp_path: Path) -> None:
    result = train(TINY, tmp_path / "run", gallery=draw_gallery)
    assert result.step == result.total == 8
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "views.png", "tensorboard"}
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    assert described["config"]["graph"] == "dssl"
    assert described["precision"] == "fp32"
    records = RunFolder(tmp_path / "run").metrics()
    checks = [record for record in records if "loss" in record]
    assert checks[-1]["step"] == 8
    assert set(checks[0]["edges"]) == {"s1->s2", "s2->s1", "h1->s1", "h2->s2"}
    assert set(checks[0]["spread"]) == set(checks[0]["rank"]) == {"s1", "s2", "h1", "h2"}
    knn = [record for record in records if "knn" in record]
    assert [record["epoch"] for record in knn] == [1, 2]
    assert knn[0]["knn_protocol"] == {"k": 200, "temperature": 0.1, "bank": 64, "queries": 2000}
    assert result.knn == knn[-1]["knn"]
    with Image.open(tmp_path / "run" / "views.png") as picture:
        assert picture.size[1] > 5 * 96  # originals and four rows of views
    saved = checkpoint.read(result.checkpoint)  # type: ignore[arg-type]
    assert saved.header["step"] == 8
    assert saved.header["normalization"]["mean"] == pytest.approx([0.4914, 0.4822, 0.4465])


@pytest.mark.parametrize(
    ("words", "vain"),
    [
        (["--graph", "standard", "--heavy", "ra(2,7)"], True),
        (["--graph", "dssl", "--heavy", "ra(2,7)"], False),
        (["--graph", "standard"], False),  # the recipe's own policy, which nobody asked for
    ],
)
def test_a_heavy_policy_that_no_view_uses_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: list[str], vain: bool
) -> None:
    with caplog.at_level(logging.WARNING, logger="dssl"):
        main(["train", "shapes", "--data", "shapes:16", "--batch-size", "16", "--epochs", "1", "--encoder", "small",
              "--optimizer.warmup-epochs", "0", "--knn-every", "0", "--precision", "fp32", "--threads", "1",
              "--out", str(tmp_path / "run"), *words])  # fmt: skip
    assert ("--heavy 'ra(2,7)' has no effect" in caplog.text) == vain


def test_the_first_weights_and_the_loss_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def first_loss(name: str, **changes: object) -> float:
        train(replace(TINY, epochs=1, **changes), tmp_path / name)  # type: ignore[arg-type]
        return next(float(record["loss"]) for record in RunFolder(tmp_path / name).metrics() if "loss" in record)

    one = first_loss("one")
    torch.manual_seed(99)  # no generator outside of the run has a say
    assert first_loss("two", threads=1) == one
    assert first_loss("three", seed=1) != one


def test_a_rate_beyond_reason_is_called_divergence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The good checkpoint stays, nothing that is no number is written, the step is named."""
    out = tmp_path / "run"
    train(replace(TINY, epochs=1), out)
    good = checkpoint.newest_good(out / "checkpoints")
    assert good is not None
    # the same run, continued by hand with weights that are beyond all numbers after the next step
    header = dict(good[1].header)
    del header["sha256"]
    wild = {name: value.clone() for name, value in good[1].tensors.items()}
    wild["method.predictor.3.weight"].fill_(3e38)
    config = replace(TINY, epochs=3)
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    described = json.loads((out / "config.json").read_text())
    described["config"]["epochs"] = 3
    (other / "config.json").write_text(json.dumps(described))
    checkpoint.write(checkpoint.path_at(other / "checkpoints", 4), header, wild)
    with caplog.at_level(logging.INFO, logger="dssl"):
        result = train(config, other)
    assert result.verdict.status == "diverged"
    assert result.exit_code == 4
    assert "diverged at step" in caplog.text
    assert "--optimizer.clip 1" in caplog.text
    assert checkpoint.steps_in(other / "checkpoints") == [4]


def test_weights_that_break_in_the_last_step_are_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(method: SimSiam, step: int, total: int) -> None:
        if step == total - 1:
            next(method.predictor.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(SimSiam, "after_step", breaking)
    result = train(replace(TINY, knn_every=0), tmp_path / "run")
    assert (result.verdict.status, result.exit_code) == ("diverged", 4)
    read = read_run(tmp_path / "run")
    assert read.verdict.status == "diverged"


def test_learning_rate_of_1e20_diverges(tmp_path: Path) -> None:
    config = replace(TINY, optimizer=OptimizerConfig(rate=1e20, warmup_epochs=0), checkpoint=CheckpointConfig(keep=9))
    result = train(config, tmp_path / "run")
    assert result.verdict.status == "diverged"
    assert result.exit_code == 4
    for step in checkpoint.steps_in(tmp_path / "run" / "checkpoints"):
        saved = checkpoint.read(checkpoint.path_at(tmp_path / "run" / "checkpoints", step))
        assert all(torch.isfinite(value).all() for value in saved.tensors.values())


def test_a_folder_of_images_of_every_kind(tmp_path: Path) -> None:
    """Colour, gray, palette, alpha, 16 bit and a broken one, which is named and replaced."""
    images = tmp_path / "images"
    images.mkdir()
    generator = np.random.Generator(np.random.Philox(0))
    for number in range(40):
        pixels = generator.integers(0, 256, (50, 40 + number % 3, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        mode = ("RGB", "L", "P", "RGBA", "CMYK")[number % 5]
        picture.convert(mode).save(images / f"{number}.{'tif' if mode == 'CMYK' else 'png'}")
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff no image at all")
    config = replace(TINY, data=str(images), normalization="measure", epochs=1, batch_size=40, bad_share=0.1)
    result = train(config, tmp_path / "run")
    assert result.step == 1
    listed = (tmp_path / "run" / "quarantine.txt").read_text()
    assert "broken.jpg" in listed
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    assert described["normalization"]["mean"] == pytest.approx([0.5] * 3, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"data": "shapes:8"}, ["8 images", "batch", 16]),
        ({"data": "EMPTY"}, ["EMPTY", "empty"]),
        ({"data": "ONE"}, ["1 images", "batch"]),
        ({"data": "/nowhere/at/all"}, ["'/nowhere/at/all'", os.strerror(errno.ENOENT)]),
        ({"data": "BROKEN"}, ["1 of 30", "1.0%", "BROKEN/0.jpg"]),
        ({"encoder": "resnet81"}, ["'resnet81'", "'resnet18'"]),
        ({"encoder": "alexnet", "data": "/nowhere"}, ["encoder alexnet"]),  # before the data is opened
        ({"encoder": "maxvit_t"}, ["encoder maxvit_t"]),
        ({"encoder": "vit_b_16", "image_size": 30}, ["encoder vit_b_16", "30 px"]),
        ({"encoder": "densenet121", "image_size": 8}, ["encoder densenet121", "3 x 8 x 8"]),
        ({"init": Path("nowhere.safetensors")}, ["nowhere.safetensors"]),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, object], facts: list[object]
) -> None:
    for name, count in (("EMPTY", 0), ("ONE", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (40, 40)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "BROKEN").mkdir()
    for number in range(30):
        (tmp_path / "BROKEN" / f"{number}.jpg").write_bytes(b"no image")
    if str(changes.get("data")) in ("EMPTY", "ONE", "BROKEN"):
        changes = changes | {"data": str(tmp_path / str(changes["data"]))}
    with rejects(*facts):
        train(replace(TINY, **changes), tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run" / "config.json").exists()
    assert "encoder" not in changes or not (tmp_path / "run").exists()  # it is built before the folder is


def test_a_run_inside_its_own_images_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for number in range(20):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(tmp_path / f"{number}.png")
    with rejects(tmp_path / "runs" / "folder", "outside"):
        train(replace(TINY, data=str(tmp_path)), tmp_path / "runs" / "folder")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_test_split_is_an_error_and_a_missing_one_is_not(tmp_path: Path) -> None:
    pack(Shapes(64), tmp_path / "train.npy", side=32, quarantine=Quarantine(Shapes(64)))
    config = replace(TINY, data=f"packed:{tmp_path}")
    assert open_test_data(config) is None
    for ending in ("npy", "json"):
        (tmp_path / f"test.{ending}").write_bytes((tmp_path / f"train.{ending}").read_bytes()[:-1])
    with pytest.raises(DsslError, match=r"test\.json"):
        open_test_data(config)


def write_classes(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (4 * number, 0, 0)).save(path)


def test_folders_without_images_change_nothing_for_a_run_that_resumes(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_classes(images, 64)
    config = replace(
        TINY, data=str(images), limit=48, knn_every=0, checkpoint=CheckpointConfig(every_minutes=1e-6, keep=10)
    )
    whole, folder = train(config, tmp_path / "whole"), tmp_path / "run" / "checkpoints"
    (images / "a" / "notes").mkdir()
    (images / "other").mkdir()
    saved = checkpoint.read(checkpoint.path_at(tmp_path / "whole" / "checkpoints", 3))
    header = {key: value for key, value in saved.header.items() if key != "sha256"}
    fingerprint, choice = header["fingerprint"][:32], header["fingerprint"][32:]
    earlier = open_index(images).earlier_fingerprint()  # of a7351d8, which counted the new folders
    assert earlier != fingerprint
    for written in (fingerprint, earlier):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        for step in range(4, 7):
            checkpoint.path_at(folder, step).unlink()
        checkpoint.write(checkpoint.path_at(folder, 3), header | {"fingerprint": written + choice}, saved.tensors)
        resumed = train(config, tmp_path / "run")
        assert resumed.step == whole.step == 6
        first, second = (checkpoint.read(one.checkpoint) for one in (whole, resumed))  # type: ignore[arg-type]
        assert second.header["fingerprint"] == first.header["fingerprint"]
        assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    (images / "other" / "1.png").write_bytes((images / "a" / "0.png").read_bytes())
    with pytest.raises(DsslError, match="fingerprint"):
        train(config, tmp_path / "run")


def test_runs_beside_the_only_split_are_no_part_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path / "train", 32)
    monkeypatch.chdir(tmp_path)
    config = replace(TINY, data=".", checkpoint=CheckpointConfig(every_minutes=1e-6, keep=10))
    (tmp_path / "runs" / "folder").mkdir(parents=True)  # as a start that was killed leaves it
    train(config, Path("runs/folder"), gallery=draw_gallery)
    assert Path("runs/folder/views.png").is_file()
    for step in (3, 4):
        checkpoint.path_at(Path("runs/folder/checkpoints"), step).unlink()
    assert train(config, Path("runs/folder"), gallery=draw_gallery).step == 4
    assert open_source(".").classes == ("a", "b")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DsslError, match=r"thesis\.tex"):
        train(TINY, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_file_manager_leaves_in_a_new_folder_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    assert train(replace(TINY, epochs=1, knn_every=0), tmp_path).step == 4
    assert (tmp_path / ".DS_Store").exists()


def test_a_folder_whose_name_safetensors_cannot_read_is_rejected_at_once(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"caf\xe9")
    with pytest.raises(DsslError, match="UTF-8") as caught:
        train(TINY, out)
    str(caught.value).encode()
    assert not out.exists()


def test_what_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DsslError, match=str(tmp_path / "file")):
        train(TINY, tmp_path / "file")
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        train(TINY, tmp_path / "file" / "run")
