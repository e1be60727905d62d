"""Real processes for fault injection: held before they start, so that strace is attached in time."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.train.running import TINY, Child, launch

__all__ = ["Child", "command", "launch", "run", "under_strace"]


def command(method: str, out: Path, *extra: str) -> list[str]:
    """Six steps in two epochs that save at every step."""
    return [
        "train", "shapes", "--method", method, "--data", "shapes:24", "--batch-size", "8", "--epochs", "2",
        "--optimizer.warmup-epochs", "1", "--knn-every", "0", "--precision", "fp32", "--threads", "1",
        "--checkpoint.every-minutes", "0.000001", "--health.every", "2", "--out", str(out), *TINY[method], *extra,
    ]  # fmt: skip


def run(words: list[str], log: Path, **options: Any) -> tuple[int, str]:
    """Run to the end: exit code and everything it said."""
    child = launch(words, log, **options)
    return child.wait(), child.said()


def under_strace(child: Child, *options: str) -> subprocess.Popen[bytes]:
    """Attach strace to a held child and let it go; ``strace`` ends with it."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(child.log.with_suffix(".strace")), "-p", str(child.pid), *options],
        stdin=subprocess.DEVNULL,
    )
    status = Path(f"/proc/{child.pid}/status")
    deadline = time.monotonic() + 30
    while "TracerPid:\t0\n" in status.read_text():
        if tracer.poll() is not None or time.monotonic() > deadline:
            raise AssertionError("strace cannot attach")
        time.sleep(0.005)
    child.send(signal.SIGCONT)
    return tracer
