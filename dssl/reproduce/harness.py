"""Runs jobs, each in a process of its own, several at a time where the machine allows; any kill leaves what can be continued."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from dssl.config import RunConfig
from dssl.data.sources import default_threads
from dssl.errors import DsslError
from dssl.reproduce import outcome
from dssl.reproduce.child import spec_of
from dssl.reproduce.outcome import Outcome
from dssl.reproduce.plan import Job

_POLL, _LOOK = 0.2, 2.0
"""Seconds between looks at the processes, and at the folders of their runs."""
_CORES_A_JOB = 2
_MEMORY_A_JOB = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where things are: images by data set, run folders, results."""

    data: Mapping[str, str]
    """From the name of a data set to what ``open_source`` takes; a data set that is missing is not run."""
    runs: Path
    cells: Path

    def located(self, job: Job) -> RunConfig:
        """The configuration that really runs: the images are where they are."""
        return dataclasses.replace(job.config, data=self.data[job.config.data])

    def result(self, job: Job) -> Path:
        return self.cells / f"{job.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How one running job is."""

    name: str
    step: int
    total: int
    words: str
    """Verdict and kNN accuracy, where there are any yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How it all is."""

    done: int
    total: int
    running: tuple[Progress, ...]
    seconds_left: float | None
    """None until something can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it all ended."""

    failed: dict[str, str]
    """The reason by job."""
    signal: int | None


@dataclass
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    log: IO[bytes]
    began_with: float = 0.0
    """The share of the work that was done before this session."""
    share: float = 0.0
    """Of the work, as far as its folder tells."""
    seen: Progress | None = None
    seen_at: float = 0.0


def finished(jobs: Sequence[Job], place: Place) -> dict[str, Outcome]:
    """Results that are there already and are of these very settings."""
    found: dict[str, Outcome] = {}
    for job in jobs:
        path = place.result(job)
        if path.is_file() and (one := outcome.read(path)).fingerprint == job.fingerprint:
            found[job.name] = one
    return found


def workers_here() -> int:
    """How many jobs this machine runs at a time: one for each GPU, or else one for every two cores, as memory allows."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(default_threads() // _CORES_A_JOB, memory // _MEMORY_A_JOB))


def run_jobs(
    jobs: Sequence[Job],
    place: Place,
    *,
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[Status], None] = lambda status: None,
) -> Ended:
    """Run what is not finished; SIGINT and SIGTERM let every run save itself before this returns."""
    done = finished(jobs, place)
    waiting = [job for job in jobs if job.name not in done]
    count = max(1, min(workers or workers_here(), len(waiting) or 1))
    threads = max(1, default_threads() // count)
    children: list[_Child] = []
    failed: dict[str, str] = {}
    begun, earlier = time.monotonic(), 0.0
    with _signals() as caught:
        try:
            while waiting or children:
                if caught:
                    _stop(children)
                    return Ended(failed=failed, signal=caught[0])
                while waiting and len(children) < count:
                    slot = min(set(range(count)) - {child.slot for child in children})
                    child = _start(waiting.pop(0), place, slot=slot, threads=threads)
                    say(f"{'continuing' if child.share else 'starting'} {child.job.name}")
                    children.append(child)
                for child in list(children):
                    if child.process.poll() is not None:
                        children.remove(child)
                        earlier += child.job.work * (1 - child.began_with)
                        _end(child, place, failed, say)
                running = tuple(_progress(child, place) for child in children)
                now = earlier + sum(child.job.work * (child.share - child.began_with) for child in children)
                left = sum(job.work for job in waiting) + sum(child.job.work * (1 - child.share) for child in children)
                elapsed = time.monotonic() - begun
                total = len(jobs)
                show(
                    Status(
                        done=total - len(waiting) - len(children),
                        total=total,
                        running=running,
                        seconds_left=left * elapsed / now if now > 0 else None,
                    )
                )
                time.sleep(_POLL)
        finally:
            _stop(children)
    return Ended(failed=failed, signal=None)


def _start(job: Job, place: Place, *, slot: int, threads: int) -> _Child:
    place.runs.mkdir(parents=True, exist_ok=True)
    place.cells.mkdir(parents=True, exist_ok=True)
    run = place.runs / job.name
    config = dataclasses.replace(place.located(job), threads=threads)
    spec = place.runs / f".{job.name}.spec.json"
    spec.write_text(json.dumps(spec_of(job, config=config, run=run, result=place.result(job))), encoding="utf-8")
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if _gpus() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % _gpus())
    log = (place.runs / f"{job.name}.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "dssl.reproduce.child", str(spec), "--watch"],
        stdin=subprocess.PIPE,  # its end tells the child that we are gone
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C is for us; we tell the children
    )
    child = _Child(job=job, process=process, slot=slot, log=log)
    _progress(child, place)
    child.began_with = child.share
    return child


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _end(child: _Child, place: Place, failed: dict[str, str], say: Callable[[str], None]) -> None:
    child.log.close()
    if child.process.stdin is not None:
        child.process.stdin.close()
    path = place.result(child.job)
    if child.process.returncode == 0 and path.is_file():
        one = outcome.read(path)
        words = ", ".join(f"{kind} {found.accuracy:.1f} %" for kind, found in one.accuracies.items())
        say(f"finished {child.job.name}: {one.verdict}{', ' if words else ''}{words}, {one.seconds / 60:.1f} min")
        return
    log = place.runs / f"{child.job.name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    code = child.process.returncode
    reason = lines[-1] if code > 0 and lines else f"ended by signal {-code}"
    failed[child.job.name] = f"{reason} (see {log})"
    say(f"failed {child.job.name}: {failed[child.job.name]}")


def _stop(children: list[_Child]) -> None:
    """Ask every child to save itself, and wait until it has."""
    for child in children:
        with suppress(ProcessLookupError):
            child.process.terminate()
    for child in children:
        child.process.wait()
        child.log.close()
        if child.process.stdin is not None:
            child.process.stdin.close()
    children.clear()


def _progress(child: _Child, place: Place) -> Progress:
    """From what the run's folder tells, so that nothing of it is lost when we are."""
    from dssl.report.run_data import read_run

    if child.seen is not None and time.monotonic() - child.seen_at < _LOOK:
        return child.seen
    job, folder = child.job, place.runs / child.job.name
    step, total, words = 0, 0, ""
    if job.training is not None:
        with suppress(OSError, json.JSONDecodeError):
            plain = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
            step, total = plain["step"], plain["total"]
    else:
        with suppress(DsslError, OSError):
            run = read_run(folder)
            step, total = run.steps, run.total
            words = run.opinion.verdict + ("" if run.knn is None else f", kNN {run.knn:.1f} %")
    child.share = step / total if total else 0.0
    child.seen, child.seen_at = Progress(name=job.name, step=step, total=total, words=words), time.monotonic()
    return child.seen


@contextmanager
def _signals() -> Iterator[list[int]]:
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
