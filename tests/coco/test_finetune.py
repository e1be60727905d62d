"""The whole command on drawn images: one run and what it leaves, kill and resume, NaN, and what is refused."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dssl import config_io, rng
from dssl.cli import main
from dssl.distributed import BatchNorm2dAcrossRanks, World
from dssl.errors import DsslError
from dssl.weights import checkpoint
from dssl_coco import CocoConfig
from dssl_coco.data import CocoBatches, read_split
from dssl_coco.detector import Origin, build_detector
from dssl_coco.finetune import Finetuning, detect_all, finetune
from tests.coco.drawing import command, draw, environment, pretrained, square, tiny, write
from tests.distributed.test_torchrun import torchrun
from tests.rejecting import rejects, states
from tests.train.running import end_of, kill_at, run


def metrics(out: Path) -> list[dict[str, Any]]:
    """What was measured, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("images_per_second", "data_share")} for line in lines]


def test_a_run_from_a_checkpoint_leaves_numbers_pictures_and_where_they_come_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = pretrained(tmp_path / "step-000000007.safetensors")
    config = tiny(draw(tmp_path / "data"), weights=str(file), encoder=None, steps=2)
    with caplog.at_level(logging.INFO, logger="dssl"):
        ending, scores = finetune(config, tmp_path / "run", command="dssl evaluate-coco <weights>")
    assert ending.exit_code == 0
    assert ending.step == 2
    assert "100 of 100 tensors" in caplog.text
    assert "not strictly comparable" in caplog.text
    assert "1 crowd regions" in caplog.text
    assert "BatchNorm frozen" in caplog.text

    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert set(record["scores"]["box"]) == set(record["scores"]["mask"]) == {"AP", "AP50", "AP75"}
    assert [one["name"] for one in record["scores"]["classes"]] == ["square", "never there", "triangle"]
    assert [one["objects"] for one in record["scores"]["classes"]] == [3, 0, 3]
    assert record["scores"]["images"] == 6
    assert "Detectron" in record["protocol"]["note"]
    assert record["protocol"]["weights"]["verified_tensors"] == 100
    assert (record["protocol"]["precision"], record["protocol"]["processes"]) == ("fp32", 1)
    assert record["protocol"]["checkpoint"]["sha256"] == end_of(tmp_path / "run")
    listed = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(listed) == record["scores"]["detections"]
    assert {one["category_id"] for one in listed} <= {3, 41, 90}

    page = (tmp_path / "run" / "evaluation.html").read_text()
    images = _images(page)
    assert len(images) == 2
    assert all(image["src"].startswith("data:image/jpeg;base64,") and "annotated" in image["alt"] for image in images)
    assert "not strictly comparable" in page
    assert "&lt;weights&gt;" in page
    looks = metrics(tmp_path / "run")
    assert [look["step"] for look in looks] == [1, 2]
    assert set(looks[0]["parts"]) == {"classifier", "box_reg", "mask", "objectness", "rpn_box_reg"}
    assert looks[0]["loss"] == pytest.approx(sum(looks[0]["parts"].values()), rel=1e-5)

    file.unlink()  # a run that has begun needs the encoder's file no more, and a finished one is only scored again
    with caplog.at_level(logging.INFO, logger="dssl"):
        _, again = finetune(config, tmp_path / "run")
    assert "finished: 2 steps" in caplog.text
    assert again == scores
    with pytest.raises(DsslError, match=r"flip: True -> False; rate: 0\.02 -> 0\.5"):
        finetune(replace(config, rate=0.5, flip=False, threads=2), tmp_path / "run")


def test_kills_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose process was killed with SIGKILL and that resumes in another ends with the bits and scores of a whole one."""
    data = draw(tmp_path / "data")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert finetune(tiny(data), whole)[0].exit_code == 0
    left = kill_at(command(data, broken), broken, 2)
    assert left == 2, "the kill came too late to mean anything"
    assert main(command(data, broken)[3:]) == 0
    assert "step 2 of 4" in caplog.text
    assert end_of(broken) == end_of(whole)
    assert metrics(broken) == metrics(whole)
    assert (broken / "results.json").read_text() == (whole / "results.json").read_text()
    printed = capsys.readouterr().out
    assert "box AP  box AP50  box AP75  mask AP  mask AP50  mask AP75" in printed
    assert "not strictly comparable" in printed


@pytest.mark.slow
def test_two_processes_average_their_gradients_and_share_the_scoring(tmp_path: Path) -> None:
    """One step of torchrun against the same step by hand: the mean of the two halves' gradients."""
    data = draw(tmp_path / "data")
    words = command(data, tmp_path / "two", "--steps", "1", "--batch-size", "4", "--norm", "frozen")
    weights = pretrained(tmp_path / "step-000000007.safetensors")
    words[words.index("scratch")] = str(weights)
    done = run(torchrun(words))
    assert done.returncode == 0, done.stderr
    saved = checkpoint.read(tmp_path / "two" / "checkpoints" / "step-000000001.safetensors")

    config = tiny(data, weights=str(weights), steps=1, batch_size=4, norm="frozen")
    detector, _ = build_detector(config, classes=3)
    optimizer = torch.optim.SGD(
        [parameter for parameter in detector.parameters() if parameter.requires_grad],
        lr=config.rate_at(0), momentum=0.9, weight_decay=1e-4,
    )  # fmt: skip
    with CocoBatches(read_split(data, "all").trainable(), config, start=0) as batches:
        samples = batches.at(0)
    for rank, half in enumerate((samples[:2], samples[2:])):
        torch.manual_seed(rng.key(config.seed, "forward", 0, rank) % 2**63)
        (detector.train()(half).total / 2).backward()
    optimizer.step()
    for name, value in detector.state_dict().items():
        torch.testing.assert_close(saved.tensors[f"detector.{name}"], value, rtol=1e-4, atol=1e-6, msg=name)

    shared = json.loads((tmp_path / "two" / "results.json").read_text())
    detector.load_state_dict(saved.part("detector"))
    alone = detect_all(detector, read_split(data, "all"), config, world=World(0, 1, torch.device("cpu")))
    assert [one["image_id"] for one in shared] == [one["image_id"] for one in alone]
    assert len({one["image_id"] for one in shared}) > 3
    assert [one["score"] for one in shared] == pytest.approx([one["score"] for one in alone], rel=1e-4)


@pytest.mark.parametrize(("processes", "kind"), [(1, nn.BatchNorm2d), (2, BatchNorm2dAcrossRanks)])
def test_trained_batchnorm_sees_the_batch_of_all_processes(tmp_path: Path, processes: int, kind: type) -> None:
    config = tiny(tmp_path, norm="sync")
    world = World(0, processes, torch.device("cpu"))
    task = Finetuning(config, [], build_detector(config, classes=3)[0], world=world, header={}, precision="fp32")
    norms = [module for module in task.module.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert all(type(norm) is kind for norm in norms)


@pytest.mark.parametrize("health_every", [1, 50])
def test_a_rate_beyond_reason_ends_as_divergence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, health_every: int
) -> None:
    """Seen at the first look after it began, named by the step at which it began, and never saved in between."""
    steps = {"steps": 4, "health_every": health_every, "round": 50, "save_minutes": 1e-6, "keep": 9}
    config = tiny(draw(tmp_path / "data"), rate=1e20, warmup=0, **steps)
    with caplog.at_level(logging.INFO, logger="dssl"):
        ending, scores = finetune(config, tmp_path / "run")
    assert ending.verdict.status == "diverged"
    assert ending.verdict.step == 1
    assert ending.step == (2 if health_every == 1 else 4)
    assert ending.exit_code == 4
    assert scores is None
    assert "diverged at step 1" in caplog.text
    assert "lower --rate" in caplog.text
    assert [look["loss"] is None for look in metrics(tmp_path / "run")] == [False, True]  # JSON has no NaN
    for step in checkpoint.steps_in(tmp_path / "run" / "checkpoints"):
        saved = checkpoint.read(checkpoint.path_at(tmp_path / "run" / "checkpoints", step))
        assert all(torch.isfinite(value).all() for value in saved.tensors.values())


def test_the_schedule_is_1x_and_scales_linearly(tmp_path: Path) -> None:
    full = CocoConfig(weights="scratch", data=tmp_path)
    assert (full.total, full.drops) == (90_000, (60_000, 80_000))
    at = (0, 249, 499, 500, 59_999, 60_000, 79_999, 80_000, 89_999)
    expected = [0.02 / 500, 0.01, 0.02, 0.02, 0.02, 0.002, 0.002, 0.0002, 0.0002]
    assert [full.rate_at(step) for step in at] == pytest.approx(expected)
    half = replace(full, batch_size=8)
    assert (half.total, half.drops) == (180_000, (120_000, 160_000))
    assert half.rate_at(1_000) == pytest.approx(0.01)
    assert half.rate_at(998) < 0.01
    assert (replace(full, schedule=2.0).total, replace(full, schedule=2.0).drops) == (180_000, (120_000, 160_000))
    short = replace(full, steps=90)
    assert (short.total, short.drops) == (90, (60, 80))
    assert short.rate_at(8) == pytest.approx(0.02)
    assert replace(short, warmup=0).rate_at(0) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"batch_size": 0}, ["batch_size", 0]),
        ({"rate": float("nan")}, ["rate", "nan"]),
        ({"sizes": ()}, ["sizes"]),
        ({"sizes": (16,)}, ["sizes", 16]),
        ({"test_size": 2000}, ["max_size", 96]),
        ({"anchors": (1, 2)}, ["anchors", "(1, 2)", "five"]),
        ({"momentum": 1.0}, ["momentum", 1.0]),
        ({"precision": "fp64"}, ["precision", "fp64"]),
        ({"steps": 0}, ["steps", 0]),
    ],
)
def test_settings_without_sense_are_refused(tmp_path: Path, changes: dict[str, Any], facts: list[object]) -> None:
    with rejects(*facts):
        tiny(tmp_path, **changes)


def test_settings_and_origin_as_the_first_version_wrote_them_are_read(tmp_path: Path) -> None:
    settings = (
        '{"weights": "scratch", "data": "coco", "train": "all", "test": "all", "train_images": null, "test_images": null, '
        '"encoder": "resnet18", "schedule": 1.0, "steps": 4, "batch_size": 2, "rate": 0.02, "warmup": null, "momentum": 0.9, '
        '"weight_decay": 0.0001, "clip": null, "norm": "auto", "sizes": [48, 64], "test_size": 64, "max_size": 96, '
        '"flip": true, "anchors": [8, 16, 32, 64, 96], "proposals": 16, "samples": 8, "seed": 0, "precision": "fp32", '
        '"device": "auto", "threads": 1, "look_every": 1, "round": 2, "save_minutes": 15.0, "keep": 2, "pictures": 2}'
    )
    assert config_io.build(CocoConfig, json.loads(settings), where="config.json") == tiny(Path("coco"))
    origin = (
        '{"text": "resnet18 from scratch", "encoder": "resnet18", "sha256": null, "normalization": '
        '{"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}, "verified_tensors": 0}'
    )
    assert Origin.of(json.loads(origin)) == build_detector(tiny(tmp_path), classes=3)[1]
    assert Origin.of(json.loads(origin)).plain() == json.loads(origin)


def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    draw(tmp_path)
    write(tmp_path, "empty", [(64, 64, [])])
    write(tmp_path, "other", [(64, 64, [square(1, 1, 30)])], categories=[{"id": 3, "name": "cat"}])
    for changes, part in (
        ({"train": "empty"}, "empty .*train"),
        ({"test": "empty"}, "empty .*score"),
        ({"test": "other"}, "other"),
        ({"train": "train2017"}, r"instances_train2017\.json"),
    ):
        with pytest.raises(DsslError, match=part):
            finetune(tiny(tmp_path, **changes), tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()


def test_runs_of_another_kind_are_left_alone(tmp_path: Path) -> None:
    from dssl.config import RunConfig
    from dssl.training.pretrain import train

    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {}}))
    with rejects(folder, "another kind"):
        finetune(tiny(tmp_path), folder)
    (folder / "config.json").write_text(json.dumps({"task": "coco", "config": {}}))
    with pytest.raises(DsslError, match=r"\(coco\)"):
        train(RunConfig(), folder)


def test_without_pycocotools_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("pycocotools")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    assert main(["evaluate-coco", "scratch", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    states(capsys.readouterr().err, "pycocotools", "pip install 'dssl[coco]'")
    assert not (tmp_path / "run").exists()


def test_help_needs_neither_torch_nor_pycocotools() -> None:
    check = (
        "import sys, dssl_coco.command\n"
        "print([name for name in ('torch', 'torchvision', 'pycocotools', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


class _Images(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append({name: value or "" for name, value in attrs})


def _images(page: str) -> list[dict[str, str]]:
    parser = _Images()
    parser.feed(page)
    return parser.found
