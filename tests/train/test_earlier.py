"""Files of an earlier version open: a run resumes, is reported, evaluated and exported; packed images and settings are read."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dssl import config_io
from dssl.cli import main
from dssl.data import open_source
from dssl.report.run_data import read_run
from dssl.weights import checkpoint
from dssl.weights.load import open_weights

FILES = Path(__file__).with_name("earlier") / "371ebfb.tar.xz"


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, as it was when the earlier version had run there."""
    with tarfile.open(FILES) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_resumes_with_its_own_command(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = (earlier / "run" / "metrics.jsonl").read_text().splitlines()
    assert main(["train", "--config", "config.json", "--out", "run"]) == 0
    assert "resuming at step 3 of 6" in caplog.text
    assert checkpoint.steps_in(earlier / "run" / "checkpoints")[-1] == 6
    after = (earlier / "run" / "metrics.jsonl").read_text().splitlines()
    assert after[:3] == before[:3]
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4, 5, 6]


def test_packed_images_and_settings_are_read(earlier: Path) -> None:
    config = config_io.load(earlier / "config.json")
    assert (config.data, config.image_size, config.batch_size) == ("packed:packed", 16, 8)
    assert config == read_run(earlier / "run").config
    for split, count in (("train", 24), ("test", 20)):
        source = open_source(config.data, split=split)  # type: ignore[arg-type]
        assert len(source) == count
        assert source.image(3).shape == (16, 16, 3)
        assert source.labels is not None
        assert np.bincount(source.labels).min() >= 2
    kept = json.loads((earlier / "run" / "config.json").read_text())
    assert open_source(config.data).fingerprint == kept["fingerprint"]


def test_its_weights_are_evaluated_exported_and_reported(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "run", "--protocols", "knn", "probe", "--no-page", "--threads", "1"]) == 0
    found = json.loads((earlier / "run" / "evaluation" / "evaluation.json").read_text())
    assert [one["total"] for one in found["results"]] == [20, 20, 20]
    assert main(["export", "run"]) == 0
    assert "every tensor loaded (72)" in capsys.readouterr().out
    weights = open_weights(earlier / "run" / "export" / "encoder.safetensors")
    assert (weights.name, weights.image_size, weights.header["step"]) == ("small", 16, 3)
    assert main(["report", "run", "--images", "0"]) == 0
    assert "packed:packed" in (earlier / "report.html").read_text()
