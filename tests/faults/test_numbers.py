"""Numbers that are none, images that say nothing: the verdict is right and every checkpoint is safe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dssl.data.loader import Batch, Batches
from dssl.objective import Objective
from dssl.weights import checkpoint
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.train.running import end_of
from tests.train.test_resume import metrics_of

STEP = 3
"""Where the fault happens, counted from 0; the run has six steps and saves after each."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("numbers")

    def made(method: str) -> Path:
        if not (folder / method).exists():
            assert train(method, folder / method) == 0
        return folder / method

    return made


def spoil_pixels(patch: pytest.MonkeyPatch, value: float) -> None:
    original = Batches.at

    def at(self: Batches, step: int) -> Batch:
        batch = original(self, step)
        if step == STEP:
            next(iter(batch.views.values()))[0, 0, 0, 0] = value
        return batch

    patch.setattr(Batches, "at", at)


def spoil_loss(patch: pytest.MonkeyPatch, value: float) -> None:
    backward, total, count = Objective.backward, Objective._total, [0]

    def counted(self: Objective, *arguments: Any, **named: Any) -> object:
        report = backward(self, *arguments, **named)
        count[0] += 1
        return report

    def spoilt(self: Objective, *arguments: Any) -> Tensor:
        loss = total(self, *arguments)
        return loss * value if count[0] == STEP else loss

    patch.setattr(Objective, "backward", counted)
    patch.setattr(Objective, "_total", spoilt)


def spoil_gradients(patch: pytest.MonkeyPatch, value: float) -> None:
    """The loss of this step is still a number; the weights after it are not."""
    original, count = torch.optim.SGD.step, [0]

    def step(self: torch.optim.SGD, *arguments: object) -> object:
        if count[0] == STEP:
            self.param_groups[0]["params"][0].grad[0, 0, 0, 0] = value
        count[0] += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(torch.optim.SGD, "step", step)


FAULTS = {"pixels": spoil_pixels, "loss": spoil_loss, "gradients": spoil_gradients}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.parametrize(
    "method",
    ["simsiam", pytest.param("byol", marks=pytest.mark.faults), pytest.param("simclr", marks=pytest.mark.faults)],
)
def test_what_is_no_number(
    where: str, value: float, method: str, untouched: Callable[[str], Path], tally: Tally, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is called divergence, at its step; every checkpoint is made of numbers; without the fault the run goes on as ever."""
    with tally.trial("NaN or Inf in pixels, loss or gradients"):
        out = tmp_path / "run"
        with monkeypatch.context() as patch:
            FAULTS[where](patch, value)
            assert train(method, out) == 4
        assert "diverged at step" in caplog.text
        assert f"diverged at step {STEP}:" in caplog.text or where == "gradients"
        steps = checkpoint.steps_in(out / "checkpoints")
        assert steps[-1] == STEP, "the state before the fault is the last that was saved"
        for step in steps:
            saved = checkpoint.read(checkpoint.path_at(out / "checkpoints", step))
            assert all(torch.isfinite(v).all() for v in saved.tensors.values() if v.is_floating_point())
        assert train(method, out) == 0
        assert end_of(out) == end_of(untouched(method))
        assert metrics_of(out) == metrics_of(untouched(method))


@pytest.mark.parametrize("rate", ["1e20", "1e38"])
def test_a_learning_rate_beyond_reason(
    rate: str, tally: Tally, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tally.trial("a learning rate beyond reason"):
        assert train("simsiam", tmp_path / "run", "--optimizer.rate", rate, "--optimizer.warmup-epochs", "0") == 4
        assert "lower --optimizer.rate" in caplog.text
        for step in checkpoint.steps_in(tmp_path / "run" / "checkpoints"):
            saved = checkpoint.read(checkpoint.path_at(tmp_path / "run" / "checkpoints", step))
            assert all(torch.isfinite(v).all() for v in saved.tensors.values() if v.is_floating_point())


def test_a_batch_whose_views_are_all_flat(tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One such batch is no reason to stop: the loss stays a number and the run ends."""
    original = Batches.at

    def at(self: Batches, step: int) -> Batch:
        batch = original(self, step)
        if step == STEP:
            for view in batch.views.values():
                view.fill_(0.25)
        return batch

    with tally.trial("a batch whose views are all flat"):
        monkeypatch.setattr(Batches, "at", at)
        assert train("simsiam", tmp_path / "run") == 0
        found = checkpoint.newest_good(tmp_path / "run" / "checkpoints")
        assert found is not None
        assert found[1].header["step"] == 6
        assert all(torch.isfinite(v).all() for v in found[1].tensors.values() if v.is_floating_point())


@pytest.mark.faults
@pytest.mark.parametrize("method", ["simsiam", "byol", "simclr"])
def test_constant_images_are_called_a_collapse(
    method: str, tally: Tally, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be told apart, and the verdict says so; mean and deviation are measured, and the deviation is 0."""
    with tally.trial("constant images"):
        (tmp_path / "images").mkdir()
        for number in range(16):
            Image.fromarray(np.full((32, 32, 3), 127, np.uint8)).save(tmp_path / "images" / f"{number}.png")
        # no change of colour, which would tell views apart where images cannot be
        flags = ("--data", str(tmp_path / "images"), "--normalization", "measure", "--epochs", "55", "--health.every", "5",
                 "--checkpoint.every-minutes", "1000", "--checkpoint.every-epochs", "100", "--graph", "standard2",
                 "--standard", "crop")  # fmt: skip
        assert train(method, tmp_path / "run", *flags) == 3
        assert "collapse" in caplog.text
        found = checkpoint.newest_good(tmp_path / "run" / "checkpoints")
        assert found is not None
        assert found[1].header["verdict"] in ("collapsed", "partial collapse")
        assert all(torch.isfinite(v).all() for v in found[1].tensors.values() if v.is_floating_point())
