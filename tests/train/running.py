"""Real training processes for tests: tiny runs that save at every step.

They are forked from one process that has imported everything and has the kernels, so that a run, and a kill, costs a second.
A child runs ``dssl.cli.main`` as the command does.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from dssl.weights import checkpoint

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "dssl.cli", "dssl.commands.train", "dssl.training.pretrain", "dssl.report.pictures", "torch.utils.tensorboard",
    "tests.train.warm",
])  # fmt: skip

_ENCODER = ["--encoder", "whitened", "--image-size", "16"]
TINY = {
    "simsiam": [*_ENCODER, "--method.hidden", "32", "--method.output", "32", "--method.bottleneck", "8"],
    "byol": [*_ENCODER, "--method.hidden", "32", "--method.output", "16"],
    "simclr": [*_ENCODER, "--method.output", "16"],
}


def command(method: str, out: Path, *extra: str) -> list[str]:
    return [
        sys.executable, "-m", "dssl", "train", "shapes", "--method", method, "--data", "shapes:96", "--batch-size", "16",
        "--epochs", "4", "--optimizer.warmup-epochs", "1", "--knn-every", "0", "--precision", "fp32", "--threads", "2",
        "--checkpoint.every-minutes", "0.000001", "--health.every", "5", "--out", str(out), *TINY[method], *extra,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


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

    def wait(self, seconds: float = 600) -> int:
        """The exit code; minus the number of the signal that killed it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"the process hangs: {self.said()}")
        return self.process.exitcode

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def fork(work: Callable[..., None], *arguments: object, log: Path) -> Child:
    """Call a function of a module in a process of its own, with its output in a file."""
    process = _CONTEXT.Process(target=_logged, args=(str(log), work, *arguments))
    process.start()
    return Child(process, log)


def launch(
    words: list[str], log: Path, *, held: bool = False, variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Child:  # fmt: skip
    """Start ``dssl WORDS`` with its output in a file; if it is held it waits for SIGCONT before the first step."""
    child = fork(_program, words, held, dict(variables or {}), cwd, log=log)
    if held:
        _wait_until_stopped(child.pid)
    return child


def start(words: list[str]) -> Child:
    """Start a command with its output in a file beside its --out."""
    assert words[:3] == [sys.executable, "-m", "dssl"]
    out = Path(words[words.index("--out") + 1])
    out.parent.mkdir(parents=True, exist_ok=True)
    return launch(words[3:], out.with_name(f"{out.name}.{time.monotonic_ns()}.log"))


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; a launcher such as torchrun is a fresh process, and what the program says is ``stderr``."""
    if words[:3] != [sys.executable, "-m", "dssl"]:
        return subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment())
    child = start(words)
    return subprocess.CompletedProcess(words, child.wait(), "", child.said())


def wait_for_step(out: Path, step: int, process: Child | subprocess.Popen[str]) -> None:
    """Until the run has saved a step at or after this one, or has ended."""
    while process.process.is_alive() if isinstance(process, Child) else process.poll() is None:
        steps = checkpoint.steps_in(out / "checkpoints")
        if steps and steps[-1] >= step:
            return
        time.sleep(0.002)


def kill_at(words: list[str], out: Path, step: int, *, delay: float = 0.0) -> int:
    """Start a run, kill it with SIGKILL once it has saved this step; returns the newest step that it left."""
    child = start(words)
    wait_for_step(out, step, child)
    time.sleep(delay)
    child.send(signal.SIGKILL)
    child.wait()
    return checkpoint.steps_in(out / "checkpoints")[-1]


def end_of(out: Path) -> str:
    """The hash of everything in the last checkpoint: weights, moving average, optimiser, BatchNorm, step, health."""
    newest = checkpoint.newest_good(out / "checkpoints")
    assert newest is not None
    return str(newest[1].header["sha256"])


def cut(run: Path, to: Path, *, step: int) -> None:
    """A copy of a run as it was when it was killed after this step."""
    shutil.copytree(run, to)
    for later in checkpoint.steps_in(to / "checkpoints"):
        if later > step:
            checkpoint.path_at(to / "checkpoints", later).unlink()


def _logged(log: str, work: Callable[..., None], *arguments: object) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # a test run in the background hands down that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # as in the process of the tests: the bits of a sum depend on the number of threads
    torch.set_num_threads(1)
    work(*arguments)


def _program(words: list[str], held: bool, variables: dict[str, str], cwd: Path | None) -> None:
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
