"""The weights that a run started from, and what became of them: measured beside them, judged, named when they were better."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dssl.config import CheckpointConfig, OptimizerConfig, RunConfig
from dssl.data import UnreadableImage
from dssl.models import build_encoder
from dssl.recipes import recipe
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.training.baseline import Baseline, Comparison
from dssl.training.prepare import build_method, encoder_of, fit_to_data, training_data
from dssl.training.pretrain import train
from tests.train.adapting import STEPS, config, write_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "start.pth")


def test_a_run_that_made_things_worse_says_so_and_has_its_own_exit_code(tmp_path: Path) -> None:
    # the label is a tint, which views in gray and a wild rate forget
    from PIL import Image as Pillow

    generator = np.random.Generator(np.random.Philox(0))
    for number, colour in enumerate(((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40))):
        folder = tmp_path / "images" / f"class{number}"
        folder.mkdir(parents=True)
        tint = 128 + 0.15 * (np.array(colour) - 128)
        for image in range(100):
            pixels = np.clip(generator.normal(tint, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
            Pillow.fromarray(pixels).save(folder / f"{image}.png")
    torch.manual_seed(0)
    torch.save(build_encoder("small", image_size=16).state_dict(), tmp_path / "start.pth")
    worse = RunConfig(
        data=str(tmp_path / "images"), encoder="small", image_size=16, init=tmp_path / "start.pth", batch_size=40,
        epochs=3, graph="standard", standard="crop(0.9,1) > gray", threads=1, knn_every=0,
        precision="fp32",
        method=recipe("shapes").method, optimizer=OptimizerConfig(rate=500.0, warmup_epochs=0),
    )  # fmt: skip
    result = train(worse, tmp_path / "run")
    assert result.verdict.status == "below where it started"
    assert result.exit_code == 5
    assert "held-out" in result.verdict.reason
    assert any("dssl train adapt" in remedy for remedy in result.verdict.remedies)
    assert any(str(tmp_path / "run" / "start.safetensors") in remedy for remedy in result.verdict.remedies)
    run = read_run(tmp_path / "run")
    assert run.verdict.status == "below where it started"
    # the same command again finds it finished, and does not forget
    assert train(worse, tmp_path / "run").exit_code == 5


@pytest.mark.parametrize("drifts", [(0.1, 0.15, 0.6), (0.6, 0.6, 0.6)])
def test_a_run_below_its_start_names_the_last_checkpoint_that_was_close(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drifts: tuple[float, ...]
) -> None:
    found = iter(drifts)

    def measure(self: Baseline) -> Comparison:
        self.start = replace(self.start, held_out={"kNN": 70.0, "probe": 70.0})
        drift = next(found)
        accuracy, p = (70.0, 1.0) if drift < 0.5 else (10.0, 1e-6)
        self.latest = Comparison(
            drift=drift,
            feature_rank=9.0,
            held_out={"kNN": accuracy, "probe": accuracy},
            p_values={"kNN": p, "probe": p},
        )
        return self.latest

    monkeypatch.setattr(Baseline, "measure", measure)
    # every step is saved, and of these the newest alone is kept; within an epoch nothing is measured
    plain = replace(config(weights, checkpoint=CheckpointConfig(every_minutes=1e-9, keep=1)), adapt=None)
    result = train(plain, tmp_path / "run")
    assert result.exit_code == 5
    close = tmp_path / "run" / "checkpoints" / f"step-{2 * STEPS:09d}.safetensors"
    instead = result.verdict.remedies[-1]
    assert str(tmp_path / "run" / "start.safetensors") in instead
    assert (str(close) in instead) == close.is_file()
    assert close.is_file() == (drifts[1] < 0.2)
    assert "drift" in instead
    assert ("no checkpoint" in instead) != close.is_file()
    assert read_run(tmp_path / "run").verdict.remedies[-1] == instead  # and so does the report


class _Given(Baseline):
    """Without a run: what was measured is given."""

    def __init__(self, standing: Comparison, *, before: dict[str, float], apart: float) -> None:
        self.latest, self.start, self.apart = standing, replace(standing, held_out=before), apart
        self.config = recipe("adapt")


@pytest.mark.parametrize(
    ("now", "p_values", "drift", "below"),
    [
        ({"kNN": 60.0, "probe": 70.0}, {"kNN": 0.001, "probe": 0.4}, 0.1, True),
        ({"kNN": 60.0, "probe": 70.0}, {"kNN": 0.02, "probe": 0.4}, 0.1, False),  # chance does that
        ({"kNN": 60.0, "probe": 90.0}, {"kNN": 0.001, "probe": 0.001}, 0.1, False),  # not only worse
        ({"kNN": 75.0, "probe": 75.0}, {"kNN": 1.0, "probe": 1.0}, 0.5, False),  # labels go before drift
        ({}, {}, 0.49, False),
        ({}, {}, 0.51, True),
    ],
)
def test_the_verdict(now: dict[str, float], p_values: dict[str, float], drift: float, below: bool) -> None:
    standing = Comparison(drift=drift, feature_rank=10.0, held_out=now, p_values=p_values)
    verdict = _Given(standing, before={"kNN": 75.0, "probe": 75.0}, apart=0.5).judge(7, "take the start")
    assert (verdict is not None) == below
    if verdict is not None:
        assert verdict.remedies[-1] == "take the start"


def test_an_image_of_the_sample_that_vanishes_counts_as_unchanged(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(weights)
    method, data = build_method(settings), training_data(settings)
    fit_to_data(settings, method, data, new=True)
    encoder = encoder_of(settings, method.encoder, data)
    baseline = Baseline(settings, data.source, encoder, RunFolder(tmp_path), header={"fingerprint": ""}, new=True)
    whole = baseline.drift()
    read = data.source.image

    def image(index: int) -> Any:
        if index == 7:
            raise UnreadableImage("7.png", "it is gone")
        return read(index)

    monkeypatch.setattr(data.source, "image", image)
    assert baseline.drift() == pytest.approx(whole, abs=1e-6)
    assert baseline.measure().drift == pytest.approx(whole, abs=1e-6)
