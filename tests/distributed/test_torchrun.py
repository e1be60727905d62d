"""`torchrun -m dssl train`: two processes give the weights of one, survive a killed rank, and refuse what cannot be shared."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dssl.weights import checkpoint
from tests.train.running import command, environment, run, wait_for_step


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(words: list[str], *options: str) -> list[str]:
    """The words of `python -m dssl train ...`, as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [*launcher, *meeting, *options, *words[1:]]


def end(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest_good(out / "checkpoints")
    assert found is not None
    return found[1].tensors


@pytest.mark.parametrize(
    "method", [pytest.param("simsiam", marks=pytest.mark.slow), "byol", pytest.param("simclr", marks=pytest.mark.slow)]
)
def test_two_processes_give_the_weights_of_one(method: str, tmp_path: Path) -> None:
    """The whole program in float64 on a convolutional encoder with BatchNorm: views, order, loss, optimiser."""
    extra = ("--precision", "fp64", "--epochs", "1", "--checkpoint.every-minutes", "1000")
    alone = run(command(method, tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    together = run(torchrun(command(method, tmp_path / "two", *extra)))
    assert together.returncode == alone.returncode, together.stderr
    one, two = end(tmp_path / "one"), end(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-10, msg=name)


def test_a_killed_rank_is_survived_by_a_restart(tmp_path: Path) -> None:
    """torchrun starts both again; they continue at the last checkpoint and end as an untouched run does."""
    extra = (
        "--epochs",
        "4",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    untouched = run(torchrun(command("simsiam", whole, *extra)))
    assert untouched.returncode in (0, 3), untouched.stderr
    words = torchrun(command("simsiam", broken, *extra), "--max-restarts", "1")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    wait_for_step(broken, 4, process)
    os.kill(_rank_process(process.pid, "1"), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == untouched.returncode, errors
    assert "resuming at step" in errors
    one, two = end(whole), end(broken)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    result = run(torchrun(command("simsiam", tmp_path / "run", "--batch-size", "15")))
    assert result.returncode != 0
    assert "batch_size is 15, the global one, and there are 2 processes" in result.stderr
    assert not (tmp_path / "run").exists()


def _rank_process(launcher: int, rank: str) -> int:
    """The process that torchrun started with this RANK."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == launcher and f"RANK={rank}".encode() in variables:
                return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"torchrun {launcher} has no rank {rank}")
