"""Real processes for fault injection, forked from one that has imported everything, so that a kill costs a second.

A child runs ``dssl.cli.main`` as the command does. It can be held before it starts, so that strace is attached to it in time.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests.train.running import TINY

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "dssl.cli",
        "tyro",
        "dssl.commands.train",
        "dssl.train.pretrain",
        "dssl.report.pictures",
        "torch.utils.tensorboard",
    ]
)


def command(method: str, out: Path, *extra: str) -> list[str]:
    """Six steps in two epochs that save at every step."""
    return [
        "train", "shapes", "--method", method, "--data", "shapes:24", "--batch-size", "8", "--epochs", "2",
        "--optimizer.warmup-epochs", "1", "--knn-every", "0", "--precision", "fp32", "--threads", "1",
        "--checkpoint.every-minutes", "0.000001", "--health.every", "2", "--out", str(out), *TINY[method], *extra,
    ]  # fmt: skip


@dataclass
class Child:
    """One run of the program in a process of its own."""

    process: ForkServerProcess
    log: Path

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def send(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, number)

    def wait(self, seconds: float = 300) -> int:
        """The exit code; minus the number of the signal that killed it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"the process hangs: {self.said()}")
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def launch(
    words: list[str],
    log: Path,
    *,
    held: bool = False,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start ``dssl WORDS`` with its output in a file; where it is held it waits for SIGCONT before the first step."""
    process = _CONTEXT.Process(target=_main, args=(words, str(log), held, dict(variables or {}), cwd))
    process.start()
    child = Child(process, log)
    if held:
        _wait_until_stopped(child.pid)
    return child


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


def _main(words: list[str], log: str, held: bool, variables: dict[str, str], cwd: Path | None) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # a test run in the background hands down that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # as in the process of the tests: the bits of a sum depend on the number of threads
    torch.set_num_threads(1)
    os.environ.update(variables)
    if cwd is not None:
        os.chdir(cwd)
    from dssl.cli import main

    if held:
        os.kill(os.getpid(), signal.SIGSTOP)
    code = main(words)
    sys.stdout.flush()
    sys.exit(code)


def _wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) in ("T", "t"):
            return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} did not stop")
