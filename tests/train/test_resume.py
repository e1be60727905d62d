"""A run that was killed and continued ends as the same run, to the last bit; tests/faults kills it more often."""

import io
import json
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dssl.cli import main
from dssl.recipes import recipe
from dssl.state import StopSignals
from dssl.weights import checkpoint
from tests.train.running import command, end_of, kill_at, run, start, wait_for_step

STEPS = 24  # 96 images, batches of 16, 4 epochs


def assert_kills_change_nothing(method: str, folder: Path, *options: str, steps: tuple[int, ...]) -> None:
    whole, broken = folder / "whole", folder / "broken"
    untouched = run(command(method, whole, *options))
    assert untouched.returncode in (0, 3), untouched.stderr
    left = [kill_at(command(method, broken, *options), broken, step) for step in steps]
    assert 0 < left[0] < STEPS, "the first kill came too late to mean anything"
    last = run(command(method, broken, *options))
    assert last.returncode == untouched.returncode, last.stderr
    assert checkpoint.steps_in(whole / "checkpoints")[-1] == STEPS
    assert end_of(broken) == end_of(whole)
    assert metrics_of(broken) == metrics_of(whole)


@pytest.mark.parametrize(
    "method", ["byol", *(pytest.param(name, marks=pytest.mark.slow) for name in ("simsiam", "simclr"))]
)
def test_three_kills_change_nothing(method: str, tmp_path: Path) -> None:
    """Killed in the middle of an epoch, twice in one epoch, and at an epoch's end."""
    assert_kills_change_nothing(method, tmp_path, steps=(3, 5, 12))


def test_shards_in_their_own_order_resume_in_the_middle_of_a_window(tmp_path: Path) -> None:
    for shard in range(6):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(8):
                file = io.BytesIO()
                Image.effect_noise((36, 36), 40 + 8 * shard + number).convert("RGB").save(file, "PNG")
                member = tarfile.TarInfo(f"{number}.png")
                member.size = file.tell()
                file.seek(0)
                archive.addfile(member, file)
    options = ["--data", f"{tmp_path}/{{0..5}}.tar", "--shuffle", "shards", "--window", "3", "--batch-size", "8"]
    assert_kills_change_nothing("simsiam", tmp_path, *options, steps=(4,))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_polite_signal_saves_and_says_so(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command("simsiam", out, "--checkpoint.every-minutes", "1000", "--epochs", "40")
    child = start(words)
    wait_for_step(out, 6, child)
    child.send(number)
    ended, said = child.wait(), child.said()
    assert ended == code, said
    assert "saved; the same command" in said
    step = checkpoint.steps_in(out / "checkpoints")[-1]
    assert f"step {step} of 240" in said


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM, signal.SIGTERM), None),
        ((signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1), None),
        ((signal.SIGINT, signal.SIGINT), None),
        ((signal.SIGUSR1, signal.SIGTERM), 143),
    ],
)
def test_a_signal_that_comes_twice(
    numbers: tuple[signal.Signals, ...], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Slurm and from torchrun, it is one request to save."""
    assert exits_after(numbers, monkeypatch) == ([] if code is None else [code])


@pytest.mark.parametrize(("seconds", "alone", "codes"), [(0.5, True, []), (1.5, True, [130]), (60.0, False, [])])
def test_only_a_later_ctrl_c_of_a_process_that_is_alone_ends_it_at_once(
    seconds: float, alone: bool, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((100.0, 100.0 + seconds))
    assert exits_after((signal.SIGINT,) * 2, monkeypatch, alone=alone, clock=lambda: next(clock)) == codes


def exits_after(numbers: tuple[signal.Signals, ...], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[int]:
    """The exit codes with which a process would have ended at once."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with StopSignals(**options) as stop:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert stop.signal == numbers[0]
    return codes


def test_a_changed_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(command("simsiam", out, "--epochs", "1")).returncode in (0, 3)
    before = end_of(out)
    refused = run(command("simsiam", out, "--epochs", "2", "--seed", "5"))
    assert refused.returncode == 2
    assert "epochs: 1 -> 2; seed: 0 -> 5" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert end_of(out) == before
    again = run(command("simsiam", out, "--epochs", "1", "--threads", "1"))
    assert again.returncode in (0, 3)
    assert "finished" in again.stderr
    assert end_of(out) == before


def test_other_data_is_refused(tmp_path: Path) -> None:
    """The configuration names the same folder, but its images have changed."""
    images, out = draw(tmp_path / "images", 40), tmp_path / "run"
    words = command("simsiam", out, "--data", str(images), "--epochs", "1")
    first = run(words)
    assert first.returncode in (0, 3), first.stderr
    (images / "7.png").unlink()
    refused = run(words)
    assert refused.returncode == 2
    assert "fingerprint" in refused.stderr


def draw(images: Path, count: int) -> Path:
    images.mkdir()
    for number in range(count):
        Image.effect_noise((40, 40), 60 + number).convert("RGB").save(images / f"{number}.png")
    return images


def test_images_that_have_moved_are_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, out = draw(tmp_path / "images", 40), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    words = command("simsiam", out, "--epochs", "2", "--data")
    assert kill_at([*words, str(images)], out, 2) < 4
    shutil.copytree(out, tmp_path / "other")
    images.rename(tmp_path / "moved")
    resumed = run([*words, f"{tmp_path / 'moved'}/"])
    assert resumed.returncode in (0, 3), resumed.stderr
    assert "resuming at step" in resumed.stderr
    assert json.loads((out / "config.json").read_text())["config"]["data"] == f"{tmp_path / 'moved'}/"
    # other images are other images, before the first checkpoint, too
    for path in (tmp_path / "other" / "checkpoints").iterdir():
        path.unlink()
    refused = run([*command("simsiam", tmp_path / "other", "--epochs", "2", "--data"), str(draw(images, 39))])
    assert refused.returncode == 2
    assert str(images) in refused.stderr
    assert "--out" in refused.stderr


def test_a_run_whose_checkpoints_were_moved_away_starts_again_and_keeps_its_old_metrics(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command("simsiam", out, "--epochs", "1")
    assert run(words).returncode in (0, 3)
    end, metrics = end_of(out), (out / "metrics.jsonl").read_text()
    (out / "checkpoints").rename(tmp_path / "away")
    again = run(words)
    assert again.returncode in (0, 3), again.stderr
    assert str(out / "metrics.1.jsonl") in again.stderr
    assert (out / "metrics.1.jsonl").read_text() == metrics
    assert end_of(out) == end
    (out / "metrics.1.jsonl").rename(tmp_path / "away" / "metrics.jsonl")
    assert metrics_of(out) == metrics_of(tmp_path / "away")


def test_a_run_keeps_its_method_when_the_recipe_has_another(tmp_path: Path) -> None:
    """`dssl train folder` began with SimSiam once."""
    images, out = draw(tmp_path / "images", 40), tmp_path / "run"
    words = [
        "train", "folder", "--data", str(images), "--out", str(out), "--encoder", "small", "--image-size", "16", "--epochs", "1",
        "--batch-size", "16", "--optimizer.warmup-epochs", "0.5", "--precision", "fp32", "--threads", "1",
    ]  # fmt: skip
    assert main([*words, "--method", "simsiam"]) in (0, 3)
    end = end_of(out)
    assert main(words) in (0, 3)
    assert end_of(out) == end
    assert main([*words, "--method", "simclr"]) == 2
    assert recipe("folder").method == recipe("folder", method="simclr").method


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    child = start(command("simsiam", out, "--epochs", "100"))
    wait_for_step(out, 1, child)
    refused = run(command("simsiam", out, "--epochs", "100"))
    child.send(signal.SIGKILL)
    child.wait()
    assert refused.returncode == 2
    assert "in use" in refused.stderr


def metrics_of(out: Path) -> list[dict[str, object]]:
    """What was measured, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("images_per_second", "data_share")} for line in lines]
