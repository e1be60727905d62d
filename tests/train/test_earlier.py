"""Files of commit a7351d8 open: runs resume, are reported, evaluated, exported; packed images, shards, settings are read."""

import json
import shlex
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dssl import config_io
from dssl.cli import main
from dssl.data import open_source
from dssl.report.run_report import read_run
from dssl.weights import checkpoint
from dssl.weights.load import open_weights

FILES = Path(__file__).with_name("earlier") / "a7351d8.tar.xz"
SETTINGS = (
    "--image-size 16 --batch-size 8 --epochs 2 --threads 1 --encoder small --knn-every 0 --precision fp32 --health.every 1 "
    "--checkpoint.every-minutes 0.000001 --checkpoint.keep 9"
)
HEADS = "--method.hidden 16 --method.output 16 --method.bottleneck 8"
FOLDER = f"train folder --method simsiam {SETTINGS} {HEADS} --optimizer.warmup-epochs 1 --normalization cifar10"
ADAPT = (
    f"train adapt --method simclr {SETTINGS} --method.output 16 --adapt.evaluation-size 16 --optimizer.warmup-epochs 0 "
    "--adapt.head-epochs 1 --init run-images"
)
COMMANDS = {
    "run-images": f"{FOLDER} --data images",
    "run-packed": f"{FOLDER} --data packed:packed",
    "run-shards": f"{FOLDER} --data shards",
    "run-adapt": f"{ADAPT} --data images",
}


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, as it was when that commit had run there."""
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("run", COMMANDS)
def test_a_run_resumes_with_its_own_command(earlier: Path, run: str, caplog: pytest.LogCaptureFixture) -> None:
    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]

    metrics = earlier / run / "metrics.jsonl"
    before = metrics.read_text()
    assert main([*shlex.split(COMMANDS[run]), "--out", run]) == 0
    assert "step 3 of 6" in caplog.text
    assert checkpoint.steps_in(earlier / run / "checkpoints")[-1] == 6
    assert metrics.read_text().startswith(before)
    assert sorted({*steps()} - {0}) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "words",
    [
        "train folder --data images --out run-images",
        "train --resume run-images",
        "train --config run-images/config.json",
    ],
)
def test_a_run_resumes_without_its_settings(earlier: Path, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the recipe's defaults are by now."""
    before = json.loads((earlier / "run-images" / "config.json").read_text())
    assert main(shlex.split(words)) == 0
    assert "step 3 of 6" in caplog.text
    assert json.loads((earlier / "run-images" / "config.json").read_text()) == before


def test_a_run_is_no_other_recipes(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "folder", "--data", "images", "--out", "run-adapt"]) == 2
    assert main(["train", "adapt", "--data", "images", "--out", "run-images"]) == 2
    assert capsys.readouterr().err.count("another recipe") == 2
    assert main(["train", "--resume", "run-adapt"]) == 0
    assert checkpoint.steps_in(earlier / "run-adapt" / "checkpoints")[-1] == 6


def test_a_run_resumes_from_its_written_configuration(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["train", "--config", "config.json", "--out", "run-images"]) == 0
    assert "step 3 of 6" in caplog.text


def test_settings_are_read(earlier: Path) -> None:
    config = config_io.load(earlier / "config.json")
    assert (config.data, config.image_size, config.batch_size) == ("images", 16, 8)
    assert config == read_run(earlier / "run-images").config


@pytest.mark.parametrize(("run", "data"), [("run-packed", "packed:packed"), ("run-shards", "shards")])
def test_packed_images_and_shards_are_read_and_recognised(earlier: Path, run: str, data: str) -> None:
    for split, count in (("train", 24), ("test", 12)):
        source = open_source(data, split=split)  # type: ignore[arg-type]
        assert len(source) == count
        assert source.image(3).shape == (16, 16, 3)
        assert source.labels is not None
        assert np.bincount(source.labels).min() >= 2
    kept = json.loads((earlier / run / "config.json").read_text())
    assert open_source(data).fingerprint == kept["fingerprint"]


def test_its_weights_are_evaluated_exported_and_reported(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((earlier / "run-images" / "evaluation" / "evaluation.json").read_text())
    assert main(["evaluate", "run-images", "--protocols", "knn", "--no-page", "--threads", "1"]) == 0
    assert "0 features computed" in capsys.readouterr().out  # they are kept
    after = json.loads((earlier / "run-images" / "evaluation" / "evaluation.json").read_text())
    assert [(row["name"], row["correct"]) for row in after["results"]] == [
        (row["name"], row["correct"]) for row in before["results"]
    ]
    assert main(["export", "run-images"]) == 0
    assert "every tensor loaded (72)" in capsys.readouterr().out
    weights = open_weights(earlier / "run-images" / "export" / "encoder.safetensors")
    assert (weights.name, weights.image_size, weights.header["step"]) == ("small", 16, 3)
    for run in COMMANDS:
        assert main(["report", run, "--images", "0"]) == 0
        assert run in (earlier / "report.html").read_text()
