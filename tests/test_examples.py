"""Every example runs as it is."""

import runpy
import sys
from pathlib import Path

import pytest

from dssl.cli import main
from dssl.weights import checkpoint
from tests.test_plugins import forgetting

FOLDER = Path(__file__).parent.parent / "examples"


def run(name: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def test_own_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("own_loop.py", "--data", "shapes:64", "--steps", "3", "--batch", "16", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 2"]
    assert float(lines[-1].rpartition(" ")[2]) > 0.2


def test_own_method(tmp_path: Path) -> None:
    plugin = ["--plugin", str(FOLDER / "own_method.py"), "--method", "codingrate"]
    words = ["--data", "shapes:128", "--epochs", "1", "--out", str(tmp_path / "run")]
    with forgetting():
        assert main(["train", "shapes", *plugin, *words]) == 0
    saved = checkpoint.newest_good(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved[1].header["config"]["method"]["name"] == "codingrate"


def test_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("distillation.py", "--data", "shapes:128", "--epochs", "1", "--out", str(tmp_path), monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["teacher", "student"]
    saved = checkpoint.newest_good(tmp_path / "student" / "checkpoints")
    assert saved is not None
    assert "method.teacher.map.weight" in saved[1].tensors
