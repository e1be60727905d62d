"""A run that exists gives the value of everything that is not typed; a finished one takes more epochs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dssl import config_io
from dssl.cli import main
from dssl.recipes import recipe
from dssl.run import RunFolder
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.rejecting import states
from tests.train.running import end_of
from tests.train.test_train import TINY

SHORT = ["--image-size", "16", "--encoder", "whitened", "--batch-size", "16", "--threads", "1", "--precision", "fp32"]


def kept(out: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((out / "config.json").read_text())["config"]
    return plain


def shapes(out: Path, *more: str) -> int:
    return main(["train", "shapes", "--data", "shapes:64", "--out", str(out), *SHORT, "--knn-every", "0", *more])


def rates(out: Path) -> list[float]:
    return [record["rate"] for record in RunFolder(out).metrics() if "rate" in record]


def test_what_is_typed_still_has_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert shapes(out, "--epochs", "1") == 0
    end = end_of(out)
    for more in (["--seed", "3"], ["--method", "byol"], ["--encoder", "small"]):
        assert main(["train", "shapes", "--out", str(out), *more]) == 2
        assert more[1] in capsys.readouterr().err
    assert main(["train", "adapt", "--out", str(out)]) == 2  # this run names its recipe
    assert main(["train", "--resume", str(out), "--out", str(tmp_path / "other")]) == 2
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
    assert main(["train", "shapes", "--resume", str(out)]) == 2
    assert end_of(out) == end
    assert main(["train", "--resume", str(out)]) == 0  # finished


def test_a_runs_own_file_starts_another_run(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert shapes(one, "--epochs", "1") == 0
    assert main(["train", "--config", str(one / "config.json"), "--out", str(two), "--seed", "1"]) == 0
    differs = {key for key, value in kept(two).items() if kept(one)[key] != value}
    assert differs == {"seed"}


def test_a_finished_run_takes_more_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "run"
    assert shapes(out, "--epochs", "2", "--health.every", "1") == 0
    first = rates(out)
    assert main(["train", "shapes", "--out", str(out), "--epochs", "5"]) == 0
    states(caplog.text, "2 epochs", "3 more")
    assert checkpoint.steps_in(out / "checkpoints")[-1] == 20
    assert (kept(out)["epochs"], kept(out)["schedule_from"]) == (5, 2)
    again = rates(out)
    assert again[: len(first)] == first
    assert max(again[len(first) :]) > 10 * first[-1]  # it rises anew
    assert again[-1] < max(again) / 10  # and falls
    caplog.clear()
    assert main(["train", "--resume", str(out)]) == 0
    assert "finished: 20 steps" in caplog.text
    config = config_io.load(out / "config.json")
    assert train(config, out).step == 20


def test_more_epochs_after_a_kill_are_the_same_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out in (whole, broken):
        assert shapes(out, "--epochs", "2", "--checkpoint.keep", "99") == 0
        assert main(["train", "--resume", str(out), "--epochs", "4"]) == 0
    for step in (12, 16):  # as if it had been killed before it saved these
        checkpoint.path_at(broken / "checkpoints", step).unlink()
    assert main(["train", "--resume", str(broken)]) == 0
    assert end_of(broken) == end_of(whole)


@pytest.mark.parametrize(("epochs", "finished"), [("1", True), ("6", False)])
def test_fewer_epochs_or_more_of_an_unfinished_run_are_an_error(
    epochs: str, finished: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert shapes(out, "--epochs", "3", "--checkpoint.keep", "99") == 0
    if not finished:
        checkpoint.path_at(out / "checkpoints", 12).unlink()
    assert main(["train", "--resume", str(out), "--epochs", epochs]) == 2
    said = capsys.readouterr().err
    assert ("--epochs is 1" if finished else "epochs: 3 -> 6") in said
    assert said.count("\n") == 1


def test_more_epochs_from_python(tmp_path: Path) -> None:
    config = replace(TINY, knn_every=0)
    assert train(config, tmp_path / "run").step == 8
    assert train(replace(config, epochs=3), tmp_path / "run").step == 12
    assert train(replace(config, epochs=3), tmp_path / "run").step == 12


@pytest.mark.parametrize(
    ("name", "epochs", "warmup", "heads"),
    [
        ("folder", 5, 0.25, 0),
        ("adapt", 3, 0.133, 2),
        ("adapt", 1, 0.044, 0),
        ("robust", 3, 0.2, 0),
        ("shapes", 20, 1, 0),
    ],
)
def test_warm_up_and_head_epochs_are_shares_of_a_shorter_run(name: str, epochs: int, warmup: float, heads: int) -> None:
    config = recipe(name, epochs=epochs)
    assert (config.optimizer.warmup_epochs, config.head_epochs) == (pytest.approx(warmup), heads)


def test_a_warm_up_that_is_typed_stays(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = ["train", "folder", "--epochs", "5", "--write-config", str(file)]
    assert main([*words, "--optimizer.warmup-epochs", "2"]) == 0
    assert config_io.load(file).optimizer.warmup_epochs == 2
    assert main(words) == 0
    assert config_io.load(file).optimizer.warmup_epochs == pytest.approx(0.25)
    assert recipe("folder", epochs=5, optimizer={"warmup_epochs": 3.0}).optimizer.warmup_epochs == 3
