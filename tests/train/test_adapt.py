"""Continued pretraining: what stays, what moves and how far, and a run that fell below its start says so."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dssl.config import AdaptConfig
from dssl.errors import DsslError
from dssl.models import build_encoder, register_encoder
from dssl.recipes import recipe
from dssl.report import run_report
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.training.adaptation import interpolate, rate_shares
from dssl.training.knn import OnlineKnn
from dssl.training.prepare import build_method
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from dssl.weights.load import open_weights
from tests.rejecting import rejects, states
from tests.test_plugins import forgetting
from tests.train.adapting import EPOCHS, HEADS, STEPS, config, write_weights
from tests.train.running import cut, end_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "start.pth")


def encoder_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.path_at(folder / "checkpoints", step)).part("method.encoder")


def names_of(tensors: dict[str, torch.Tensor]) -> tuple[set[str], set[str]]:
    """Trained and kept, by what a person would say: blocks 2 and 3 of 4 learn, without the statistics of BatchNorm."""
    moving = {name for name in tensors if name.startswith(("blocks.2.", "blocks.3."))}
    trained = {name for name in moving if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    return trained, set(tensors) - trained


@pytest.fixture(scope="module")
def whole(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose result is the average itself."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = train(config(weights, adapt={"max_drift": None}), out)
    assert (result.step, result.exit_code) == (EPOCHS * STEPS, 0)
    return out


def test_only_the_last_blocks_move_and_only_after_the_heads(weights: Path, whole: Path) -> None:
    start = torch.load(weights)
    trained, kept = names_of(start)
    heads_end = encoder_at(whole, HEADS * STEPS)
    assert all(torch.equal(heads_end[name], start[name]) for name in start)
    method = [
        checkpoint.read(checkpoint.path_at(whole / "checkpoints", step)).part("method.projector")
        for step in (1, HEADS * STEPS)
    ]
    assert not torch.equal(method[0]["0.weight"], method[1]["0.weight"])  # while the heads learn
    end = encoder_at(whole, EPOCHS * STEPS)
    assert all(torch.equal(end[name], start[name]) for name in kept)
    assert all(not torch.equal(end[name], start[name]) for name in trained)


def test_the_result_is_the_mean_of_the_last_quarter(weights: Path, tmp_path: Path, whole: Path) -> None:
    # 8 steps of the encoder: the last 2; a run that averages nothing saves the weights of both
    plain = tmp_path / "plain"
    train(config(weights, adapt={"max_drift": None, "average": 0.0}), plain)
    last = [encoder_at(plain, EPOCHS * STEPS - number) for number in (1, 0)]
    average = encoder_at(whole, EPOCHS * STEPS)
    trained, _ = names_of(average)
    for name in trained:
        assert torch.allclose(average[name], (last[0][name] + last[1][name]) / 2, atol=1e-7), name


def test_a_run_ends_between_its_start_and_the_average(weights: Path, tmp_path: Path, whole: Path) -> None:
    start, average = torch.load(weights), encoder_at(whole, EPOCHS * STEPS)
    train(config(weights, adapt={"max_drift": 2.0}), tmp_path / "run")
    end = encoder_at(tmp_path / "run", EPOCHS * STEPS)
    trained, _ = names_of(start)
    for name in trained:
        assert torch.allclose(end[name], (start[name] + average[name]) / 2, atol=1e-6), name


def test_a_run_that_may_not_drift_returns_its_start_and_says_so(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = torch.load(weights)
    with caplog.at_level(logging.INFO, logger="dssl"):
        train(config(weights, adapt={"max_drift": 1e-9}), tmp_path / "run")
    assert "lower than at its start" in caplog.text
    started = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["start"]["held_out"]
    # without a terminal a line for each epoch: what was measured, beside the start
    assert f"kNN {started['kNN']:.1f}% (start {started['kNN']:.1f})" in caplog.messages[-1]
    end = encoder_at(tmp_path / "run", EPOCHS * STEPS)
    assert all(torch.equal(end[name], start[name]) for name in start)
    states(caplog.text, "start, unchanged", "12%")


@pytest.mark.parametrize(("most", "expected"), [(9.0, 0.5), (0.3, 0.25), (0.2501, 0.25), (0.1201, 0.12), (0.1, 0.0)])
def test_the_largest_share_within_the_drift_is_taken(most: float, expected: float) -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    start, end = torch.full((1, 1), 3.0), torch.full((1, 1), 4.0)
    found = interpolate(
        layer, start={"weight": start}, end={"weight": end}, drift=lambda: layer.weight.item() - 3, most=most
    )
    assert found == (expected, pytest.approx(expected, abs=1e-6))
    assert layer.weight.item() == pytest.approx(3 + expected)


@pytest.mark.parametrize("left", [HEADS * STEPS, EPOCHS * STEPS - 1])
def test_a_resumed_run_ends_on_the_same_weights(weights: Path, tmp_path: Path, whole: Path, left: int) -> None:
    cut(whole, tmp_path / "run", step=left)
    train(config(weights, adapt={"max_drift": None}), tmp_path / "run")
    assert end_of(tmp_path / "run") == end_of(whole)


def test_a_run_whose_start_is_gone_does_not_end_on_other_weights(weights: Path, tmp_path: Path, whole: Path) -> None:
    cut(whole, tmp_path / "run", step=EPOCHS * STEPS - 1)
    (tmp_path / "run" / "start.safetensors").unlink()
    with pytest.raises(DsslError, match=r"start\.safetensors"):
        train(config(weights, adapt={"max_drift": None}), tmp_path / "run")
    assert EPOCHS * STEPS not in checkpoint.steps_in(tmp_path / "run" / "checkpoints")


def test_weights_that_have_moved_are_the_same_weights(weights: Path, tmp_path: Path, whole: Path) -> None:
    cut(whole, tmp_path / "run", step=EPOCHS * STEPS - 1)
    moved, other = tmp_path / "moved.pth", tmp_path / "other.pth"
    shutil.copyfile(weights, moved)
    torch.save({name: value * 1.25 for name, value in torch.load(weights).items()}, other)
    with pytest.raises(DsslError, match=str(other)):
        train(config(other, adapt={"max_drift": None}), tmp_path / "run")
    train(config(moved, adapt={"max_drift": None}), tmp_path / "run")
    ours, theirs = (encoder_at(run, EPOCHS * STEPS) for run in (tmp_path / "run", whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_start_that_a_killed_run_left_is_not_believed(weights: Path, tmp_path: Path, whole: Path) -> None:
    """Killed before the first checkpoint, and the file of weights replaced since."""
    cut(whole, tmp_path / "run", step=0)
    other = tmp_path / weights.name
    torch.save({name: value * 1.25 for name, value in torch.load(weights).items()}, other)
    left = json.loads((tmp_path / "run" / "config.json").read_text())
    left["config"]["init"] = str(other)
    (tmp_path / "run" / "config.json").write_text(json.dumps(left))
    train(config(other, adapt={"max_drift": None}), tmp_path / "run")
    started = open_weights(tmp_path / "run" / "start.safetensors").network.state_dict()
    assert all(torch.equal(value, started[name]) for name, value in torch.load(other).items())
    steps = [record["step"] for record in RunFolder(tmp_path / "run").metrics() if "start" in record]
    assert steps == [0, 8, 12], "no line twice"


def test_the_start_is_kept_and_the_size_of_whole_images_known(weights: Path, whole: Path) -> None:
    loaded = open_weights(whole / "start.safetensors")
    start = torch.load(weights)
    assert all(torch.equal(value, start[name]) for name, value in loaded.network.state_dict().items())
    assert open_weights(whole).image_size == 18
    records = RunFolder(whole).metrics()
    standings = [(record["step"], record["start"]) for record in records if "start" in record]
    assert [step for step, _ in standings] == [0, 8, 12]  # while the heads learn there is nothing to measure
    assert standings[0][1]["drift"] == 0
    assert standings[-1][1]["drift"] > 0
    assert set(standings[0][1]["held_out"]) == {"kNN", "probe"}


def test_the_report_shows_the_start_in_every_curve(whole: Path) -> None:
    run = read_run(whole)
    drift = run.since_start("drift")
    assert [epoch for epoch, _ in drift] == [0, 2, 3]
    assert drift[0][1] == 0 < drift[1][1]
    assert len(run.since_start("kNN")) == len(run.since_start("probe")) == 3
    text = run_report.html([run], command="dssl report")
    assert "Compared with the start" in text
    (_, before), *_, (_, after) = run.since_start("kNN")
    assert f">{before:.1f} → {after:.1f}%<" in text
    assert f">{drift[-1][1]:.2f}<" in text
    plot = str(run_report.start_plot([run]).svg)
    assert plot.count("stroke-dasharray") >= 4  # the dashed line of the start in each of the four panels
    assert "not measured" not in plot
    without = replace(run, starts=())
    bare = run_report.html([without], command="dssl report")
    assert "Compared with the start" not in bare
    # also in the curve of kNN on a test split, where there is one
    measured = replace(run, knns=({"epoch": 0.0, "knn": 60.0}, {"epoch": 1.0, "knn": 61.0}))
    dashes = [
        str(run_report.curves_plot([one]).svg).count("stroke-dasharray")
        for one in (run, replace(measured, starts=()), measured)
    ]
    assert dashes == [dashes[0], dashes[0], dashes[0] + 1]


def test_knn_on_the_test_split_is_measured_at_the_start_too(weights: Path, tmp_path: Path) -> None:
    train(config(weights, knn_every=1, epochs=2, adapt={"max_drift": None}), tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert [epoch for epoch, _ in run.curve("knn")] == [0, 1, 2]
    assert run.curve("knn")[0][1] == run.curve("knn")[1][1]  # only the heads have learned
    board = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("events.out.tfevents.*"))
    assert all(f"start/{name}".encode() in board for name in ("drift", "feature_rank", "kNN", "probe"))


def test_the_last_knn_is_that_of_the_weights_that_are_saved(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(self: OnlineKnn, *_: object) -> dict[str, Any]:
        measured.append({name: value.clone() for name, value in self.encoder.network.state_dict().items()})
        return {"knn": 50.0, "knn_protocol": {"queries": 1}}

    monkeypatch.setattr(OnlineKnn, "measure", measure)
    train(config(weights, knn_every=1, adapt={"max_drift": 1e-9}), tmp_path / "run")  # it ends on its start
    saved = encoder_at(tmp_path / "run", EPOCHS * STEPS)
    assert all(torch.equal(measured[-1][name], value) for name, value in saved.items())
    assert any(not torch.equal(measured[-2][name], value) for name, value in saved.items())


def test_layers_further_from_the_output_learn_more_slowly() -> None:
    encoder = build_encoder("small", image_size=32)
    shares = rate_shares(encoder, AdaptConfig(trained_blocks=None, encoder_rate=0.5, layer_decay=0.1))
    assert len(shares) == len(list(encoder.parameters()))
    assert shares["encoder.blocks.3.conv1.weight"] == 0.5
    assert shares["encoder.stem.0.weight"] == pytest.approx(0.5 * 1e-4)


@pytest.mark.parametrize("method", ["byol", "simsiam"])
def test_other_methods_keep_the_statistics_too(weights: Path, method: str) -> None:
    made = build_method(replace(config(weights), method=recipe("shapes", method=method).method), init=weights)
    assert isinstance(made, torch.nn.Module)
    for name, part in made.named_children():
        assert part.training == ("encoder" not in name)


def test_a_transformer_is_trained_and_measured_at_one_size(tmp_path: Path) -> None:
    name = "timm:vit_tiny_patch16_224"
    torch.save(build_encoder(name, image_size=64).state_dict(), tmp_path / "vit.pth")
    wanted = config(tmp_path / "vit.pth", encoder=name, image_size=32, epochs=2)
    train(wanted, tmp_path / "run")
    loaded = open_weights(tmp_path / "run")
    assert loaded.image_size == 32
    assert "resized" in open_weights(tmp_path / "run", image_size=48).report
    # an encoder of one size that is not known as such is refused in a line
    with forgetting():
        register_encoder("one-size", lambda image_size, channels: build_encoder(name, image_size=32))
        with rejects("18 px", "--adapt.evaluation-size 32"):
            build_method(replace(wanted, encoder="one-size"))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"head_epochs": 9}, ["adapt.head_epochs", 9]),
        ({"head_epochs": -1}, ["adapt.head_epochs", -1]),
        ({"trained_blocks": 0}, ["adapt.trained_blocks", 0, 1]),
        ({"layer_decay": 0.0}, ["adapt.layer_decay", 0.0]),
        ({"max_drift": 0.0}, ["adapt.max_drift", 0.0]),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], facts: list[object]) -> None:
    with rejects(*facts):
        recipe("adapt", adapt=AdaptConfig(**changes))


def test_there_is_nothing_to_keep_without_weights() -> None:
    with pytest.raises(DsslError, match="--init imagenet"):
        recipe("adapt", init=None)
