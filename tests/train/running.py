"""Real training processes for tests: tiny runs that save at every step."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dssl.weights import checkpoint

TINY = {
    "simsiam": ["--method.hidden", "32", "--method.output", "32", "--method.bottleneck", "8"],
    "byol": ["--method.hidden", "32", "--method.output", "16"],
    "simclr": ["--method.output", "16"],
}


def command(method: str, out: Path, *extra: str) -> list[str]:
    return [
        sys.executable, "-m", "dssl", "train", "shapes", "--method", method, "--data", "shapes:96", "--batch-size", "16",
        "--epochs", "4", "--optimizer.warmup-epochs", "1", "--knn-every", "0", "--precision", "fp32", "--threads", "2",
        "--checkpoint.every-minutes", "0.000001", "--health.every", "5", "--out", str(out), *TINY[method], *extra,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment())


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run has saved a step at or after this one, or has ended."""
    while process.poll() is None:
        steps = checkpoint.steps_in(out / "checkpoints")
        if steps and steps[-1] >= step:
            return
        time.sleep(0.002)


def kill_at(words: list[str], out: Path, step: int, *, delay: float = 0.0) -> int:
    """Start a run, kill it with SIGKILL once it has saved this step; returns the newest step that it left."""
    process = start(words)
    wait_for_step(out, step, process)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return checkpoint.steps_in(out / "checkpoints")[-1]


def end_of(out: Path) -> str:
    """The hash of everything in the last checkpoint: weights, moving average, optimiser, BatchNorm, step, health."""
    found = checkpoint.newest_good(out / "checkpoints")
    assert found is not None
    return str(found[1].header["sha256"])
