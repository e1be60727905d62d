"""Runs on objects of a Python program: they stop at Ctrl-C, resume by the same call, and say which call that is."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

import dssl
from dssl.cli import main
from dssl.errors import DsslError
from dssl.models import build_encoder, named_encoder
from dssl.run import RunFolder
from dssl.weights import checkpoint
from tests.distributed.test_torchrun import assert_same_weights, free_port, start_agent
from tests.test_plugins import forgetting
from tests.train.running import end_of, fork

SETTINGS: dict[str, Any] = {
    "image_size": 16, "batch_size": 16, "threads": 1, "knn_every": 0, "precision": "fp32", "epochs": 12,
    "method": {"name": "simclr", "output": 16}, "health": {"every": 1}, "optimizer": {"warmup_epochs": 1.0},
}  # fmt: skip


class Photos(Dataset[tuple[NDArray[np.uint8], int]]):
    def __init__(self, seed: int = 0, length: int = 48) -> None:
        self.pixels = np.random.default_rng(seed).integers(0, 256, (length, 20, 20, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return self.pixels[index], index % 4


class StoppedEarly(Photos):
    """Ctrl-C comes before the first step: after the images of the fingerprint, when a sample is checked."""

    count = 0

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        self.count += 1
        if self.count == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


class Own(nn.Module):
    """Ends in a feature map, not in vectors."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)
        return features


class Vectors(Own):
    """The same tensors, as an encoder that a plugin registers."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).mean(dim=(2, 3))


def train(out: Path, *, data: Any = None, encoder: nn.Module | None = None, **changes: Any) -> dssl.Run:
    return dssl.train("shapes", data=data or Photos(), out=out, encoder=encoder or Own(), **SETTINGS | changes)


def interrupted_and_resumed(out: str) -> None:
    """In a process of its own: a real Ctrl-C when the first steps are done, then the same call again."""

    def interrupt() -> None:
        while len(RunFolder(Path(out)).metrics()) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    first = train(Path(out))
    shutil.copytree(out, f"{out}-stopped")
    said = {"stopped": not first.finished, "next": first.next_steps()}
    said["finished"] = train(Path(out)).finished
    try:
        train(Path(f"{out}-early"), data=StoppedEarly())
    except KeyboardInterrupt:
        said["early"] = Path(f"{out}-early").exists()
    Path(f"{out}.json").write_text(json.dumps(said))


def test_ctrl_c_saves_and_returns_and_the_same_call_resumes_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole")
    child = fork(interrupted_and_resumed, str(tmp_path / "run"), log=tmp_path / "log")
    assert child.wait() == 0, child.said()
    said = json.loads((tmp_path / "run.json").read_text())
    assert said["stopped"]
    assert said["finished"]
    assert said["early"] is False  # there was nothing to return
    assert "dssl train" not in said["next"][0]  # no command has these objects
    assert end_of(tmp_path / "run") == end_of(whole.path)

    stopped = tmp_path / "run-stopped"
    capsys.readouterr()
    assert main(["train", "--resume", str(stopped)]) == 2
    assert "dssl.train" in capsys.readouterr().err
    with pytest.raises(DsslError, match="encoder"):  # of another structure
        train(stopped, encoder=Own(width=9))
    with pytest.raises(DsslError, match="images"):
        train(stopped, data=Photos(seed=1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dssl.Run:
    """Adapted from a module's own weights."""
    out = tmp_path_factory.mktemp("own") / "run"
    adapt = {"head_epochs": 1, "evaluation_size": 16, "trained_blocks": None, "max_drift": None}
    return dssl.train("adapt", data=Photos(), out=out, encoder=Own(), **SETTINGS | {"epochs": 3, "adapt": adapt})


def test_a_module_is_not_changed_and_its_weights_are_the_start(run: dssl.Run) -> None:
    assert run.config.init is not None
    assert str(run.config.init) == run.config.encoder
    assert run.config.encoder.startswith("python:Own(")
    started = checkpoint.read(RunFolder(run.path).start_file).part("method.encoder")
    trained = run.encoder(Own(seed=7)).state_dict()
    given = Own().state_dict()
    assert given.keys() == started.keys() == trained.keys()
    assert all(torch.equal(value, started[name]) for name, value in given.items())
    assert not torch.equal(trained["body.0.weight"], given["body.0.weight"])


def test_another_module_of_the_same_structure_gets_the_weights(run: dssl.Run, tmp_path: Path) -> None:
    photos, module = Photos(), Own(seed=7)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    vectors = dssl.embed(run, photos, encoder=module, threads=1)
    assert vectors.labels is not None
    assert vectors.labels.tolist() == [index % 4 for index in range(48)]
    assert vectors.vectors.shape == (48, 8)
    loaded, transform = dssl.load_encoder(run.path, encoder=module, transform=True)
    # by hand: the module with the run's weights, and the mean over its feature map
    plain = Own()
    plain.load_state_dict(loaded.state_dict())
    from PIL import Image

    with torch.no_grad():
        expected = plain.eval()(transform(Image.fromarray(photos.pixels[5]))[None]).mean(dim=(2, 3))
    np.testing.assert_allclose(vectors.vectors[5], expected[0].numpy(), rtol=1e-5, atol=1e-6)
    folder = dssl.export(run, encoder=module, formats=["safetensors", "torch"], out=tmp_path / "export")
    exported = dssl.load_encoder(folder / "encoder.safetensors", encoder=module)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in exported.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with pytest.raises(DsslError, match="timm"):
        dssl.export(run, encoder=module, formats=["timm"], out=tmp_path / "timm")
    with pytest.raises(DsslError):
        dssl.load_encoder(run.path, encoder=Own(width=9))
    with pytest.raises(DsslError, match=r"encoder=MODULE"):
        dssl.load_encoder(run.path)


def test_it_is_evaluated_against_its_start_on_objects(run: dssl.Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = dssl.evaluate(
        run, data=Photos(), test=Photos(seed=2), encoder=Own(), against=["start", run], protocols=["knn"], threads=1
    )
    assert [other["against"] for other in result["against"]] == ["start", str(run.path)]
    assert result["against"][1]["protocols"][0]["difference"] == 0
    assert all(f"{name}=..." in run.next_steps()[0] for name in ("data", "encoder"))
    capsys.readouterr()
    assert main(["evaluate", str(run.path), "--data", "shapes:64"]) == 2
    assert "--plugin" in capsys.readouterr().err
    words = ["--encoder", "own-vectors", "--data", "shapes:64", "--protocols", "knn", "--threads", "1", "--no-page"]
    with forgetting():
        dssl.register_encoder("own-vectors", lambda image_size, channels: Vectors())
        assert main(["evaluate", str(run.path), "--out", str(run.path / "by-name"), *words]) == 0


def test_views_are_drawn_of_objects(tmp_path: Path) -> None:
    page = dssl.views(Photos().pixels, policies=["ra(2,5)"], out=tmp_path / "views.html", size=16)
    assert "python:ndarray(48 images" in page.read_text()


def test_a_name_of_a_module_is_that_of_its_structure() -> None:
    with named_encoder(Own(seed=1)) as first, named_encoder(Own(seed=2)) as second, named_encoder(Own(9)) as third:
        assert first == second != third
        assert second is not None
        assert build_encoder(second, image_size=16)(torch.zeros(2, 3, 16, 16)).shape == (2, 8)
    with named_encoder("small") as name:
        assert name == "small"


def two_processes(words: list[str], folder: str) -> None:
    """Each of them makes the same call."""
    torch.set_num_threads(1)
    train(Path(words[0]), precision="fp64", epochs=2)


def test_several_processes_that_make_the_same_call_are_as_one(tmp_path: Path) -> None:
    train(tmp_path / "one", precision="fp64", epochs=2)
    words = ["", "", "", str(tmp_path / "two")]
    agent = start_agent(words, tmp_path / "log", port=free_port(), worker=two_processes)
    assert agent.wait() == 0, agent.said()
    assert_same_weights(tmp_path / "one", tmp_path / "two")
