"""A run that was killed and continued ends as the same run, to the last bit; tests/faults kills it more often."""

import io
import json
import os
import signal
import tarfile
from pathlib import Path

import pytest

from dssl.state import StopSignals
from dssl.weights import checkpoint
from tests.train.running import command, end_of, kill_at, run, start, wait_for_step

METHODS = ("simsiam", "byol", "simclr")
STEPS = 24  # 96 images, batches of 16, 4 epochs


@pytest.mark.parametrize(
    "method", [*(pytest.param(one, marks=pytest.mark.slow) for one in METHODS if one != "byol"), "byol"]
)
def test_three_kills_change_nothing(method: str, tmp_path: Path) -> None:
    """Killed in the middle of an epoch, twice in one epoch, and at an epoch's end."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    untouched = run(command(method, whole))
    assert untouched.returncode in (0, 3), untouched.stderr
    left = [kill_at(command(method, broken), broken, step) for step in (3, 5, 12)]
    assert all(step > 0 for step in left)
    assert left[0] < STEPS, "the first kill came too late to mean anything"
    last = run(command(method, broken))
    assert last.returncode == untouched.returncode, last.stderr
    assert checkpoint.steps_in(whole / "checkpoints")[-1] == STEPS
    assert end_of(broken) == end_of(whole)
    assert metrics_of(broken) == metrics_of(whole)


def test_shards_in_their_own_order_resume_in_the_middle_of_a_window(tmp_path: Path) -> None:
    from PIL import Image

    for shard in range(6):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(8):
                file = io.BytesIO()
                Image.effect_noise((36, 36), 40 + 8 * shard + number).convert("RGB").save(file, "PNG")
                member = tarfile.TarInfo(f"{number}.png")
                member.size = file.tell()
                file.seek(0)
                archive.addfile(member, file)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = ["--data", f"{tmp_path}/{{0..5}}.tar", "--shuffle", "shards", "--window", "3", "--batch-size", "8"]
    untouched = run(command("simsiam", whole, *options))
    assert untouched.returncode in (0, 3), untouched.stderr
    assert kill_at(command("simsiam", broken, *options), broken, 4) < STEPS
    last = run(command("simsiam", broken, *options))
    assert last.returncode == untouched.returncode, last.stderr
    assert end_of(broken) == end_of(whole)
    assert metrics_of(broken) == metrics_of(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_polite_signal_saves_and_says_so(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = command("simsiam", out, "--checkpoint.every-minutes", "1000", "--epochs", "40")
    child = start(words)
    wait_for_step(out, 6, child)
    child.send(number)
    ended, said = child.wait(), child.said()
    assert ended == code, said
    assert "and saved; the same command resumes it" in said
    step = checkpoint.steps_in(out / "checkpoints")[-1]
    assert f"stopped at step {step} of 240" in said


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGTERM, signal.SIGTERM), None),
        ((signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR1), None),
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGUSR1, signal.SIGTERM), 143),
    ],
)
def test_a_signal_that_comes_twice(
    numbers: tuple[signal.Signals, ...], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Slurm and from torchrun, it is one request to save; from whoever is in a hurry, it ends the run."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopSignals() as stop:
        for number in numbers:
            os.kill(os.getpid(), number)
        assert stop.signal is not None
    assert ended == ([] if code is None else [code])


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
    assert "this run is finished" in again.stderr
    assert end_of(out) == before


def test_other_data_is_refused(tmp_path: Path) -> None:
    """The configuration names the same folder, but its images have changed."""
    from PIL import Image

    images, out = tmp_path / "images", tmp_path / "run"
    images.mkdir()
    for number in range(40):
        Image.effect_noise((40, 40), 60 + number).convert("RGB").save(images / f"{number}.png")
    words = command("simsiam", out, "--data", str(images), "--epochs", "1")
    first = run(words)
    assert first.returncode in (0, 3), first.stderr
    (images / "7.png").unlink()
    refused = run(words)
    assert refused.returncode == 2
    assert "are not those that" in refused.stderr


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    child = start(command("simsiam", out, "--epochs", "100"))
    wait_for_step(out, 1, child)
    refused = run(command("simsiam", out, "--epochs", "100"))
    child.send(signal.SIGKILL)
    child.wait()
    assert refused.returncode == 2
    assert "is in use by another dssl" in refused.stderr


def metrics_of(out: Path) -> list[dict[str, object]]:
    """What was measured, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in ("images_per_second", "data_share")} for line in lines]
