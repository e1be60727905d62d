"""Runs jobs, several at a time, each in a process of its own, here or on a cluster; stopped runs can be resumed."""

import json
import multiprocessing
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from dssl import config_io
from dssl.data.pipeline import default_threads
from dssl.files import write_text
from dssl.run import RunFolder
from dssl.state import StopSignals
from dssl_reproduce import outcome
from dssl_reproduce.child import in_own_process
from dssl_reproduce.outcome import Place, finished
from dssl_reproduce.scales import Job

_POLL = 0.5
"""Seconds between two lines of progress."""
_CORES_PER_JOB = 2
_MEMORY_PER_JOB = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session of the harness ended."""

    failed: dict[str, str]
    """The reason by job."""
    signal: int | None


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    process: SpawnProcess
    gpu: str | None
    begun: float
    """The share that was done before this session."""


def workers_here() -> int:
    """Jobs to run at a time on this machine: one per GPU, or one per two cores as memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return len(gpus_here()) or max(1, min(default_threads() // _CORES_PER_JOB, memory // _MEMORY_PER_JOB))


def gpus_here() -> list[str]:
    """The GPUs that this process was given, by number, UUID or MIG name."""
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in given.split(",")][:count]


def run_jobs(
    jobs: Sequence[Job],
    place: Place,
    *,
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[str], None] = lambda line: None,
) -> SessionEnd:
    """Run what is not finished; on SIGINT or SIGTERM every run saves itself before this returns.

    ``say`` gets a line for every start and end, ``show`` one of progress every half second.
    """
    done = finished(jobs, place)
    waiting = [job for job in jobs if job.name not in done]
    count = min(workers or workers_here(), len(jobs))
    threads, gpus = max(1, default_threads() // max(1, count)), gpus_here()
    running: list[_Running] = []
    failed: dict[str, str] = {}
    start, ended_work = time.monotonic(), 0.0
    for folder in (place.runs, place.cells):
        folder.mkdir(parents=True, exist_ok=True)
    with StopSignals() as stop:
        try:
            while (waiting or running) and stop.signal is None:
                while waiting and len(running) < count:
                    gpu = min(gpus, key=[worker.gpu for worker in running].count, default=None)
                    running.append(_start(waiting.pop(0), place, threads=threads, gpu=gpu))
                    say(f"{'resuming' if running[-1].begun else 'starting'} {running[-1].job.name}")
                wait([worker.process.sentinel for worker in running], timeout=_POLL)
                for worker in [worker for worker in running if worker.process.exitcode is not None]:
                    running.remove(worker)
                    ended_work += worker.job.work * (1 - worker.begun)
                    say(_end(worker, place, failed))
                shares = [progress(worker.job, place) for worker in running]
                left = sum(job.work for job in waiting)
                work = ended_work
                for worker, (share, _) in zip(running, shares, strict=True):
                    left += worker.job.work * (1 - share)
                    work += worker.job.work * (share - worker.begun)
                seconds = left * (time.monotonic() - start) / work if work > 0 else None
                texts = [f"{worker.job.name} {text}" for worker, (_, text) in zip(running, shares, strict=True)]
                show(status_line(len(jobs) - len(waiting) - len(running), len(jobs), seconds, texts))
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.process.join()  # until its run has saved itself
    return SessionEnd(failed=failed, signal=stop.signal)


def _start(job: Job, place: Place, *, threads: int, gpu: str | None) -> _Running:
    # a fresh interpreter: torch's threads and CUDA do not survive a fork
    process = multiprocessing.get_context("spawn").Process(
        target=in_own_process, args=(job, place), kwargs={"threads": threads, "gpu": gpu}
    )
    begun, _ = progress(job, place)
    process.start()
    return _Running(job, process, gpu, begun)


def _end(worker: _Running, place: Place, failed: dict[str, str]) -> str:
    """How the job ended, in a line."""
    job, code, path = worker.job, worker.process.exitcode, place.log(worker.job)
    if code == 0 and place.result(job).is_file():
        result = outcome.read(place.result(job))
        words = [result.verdict, *(f"{kind} {entry.accuracy:.1f} %" for kind, entry in result.accuracies.items())]
        return f"finished {job.name}: {', '.join(words)}, {result.seconds / 60:.1f} min"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    reason = (
        f"ended by signal {-code}" if code is not None and code < 0 else lines[-1] if lines else f"exit code {code}"
    )
    failed[job.name] = f"{reason} (see {path})"
    return f"failed {job.name}: {failed[job.name]}"


def progress(job: Job, place: Place) -> tuple[float, str]:
    """The share that is done, and the same for people with verdict and kNN accuracy, as the folder of the job says."""
    folder = place.runs / job.name
    epochs = job.config.epochs
    if job.training is not None:
        epochs = job.training.epochs
        folder = next(iter(folder.glob("training-*")), folder)
    share = 0.0
    words: dict[str, Any] = {}
    for record in RunFolder(folder).metrics():
        share = max(share, min(1.0, record.get("epoch", 0.0) / epochs))
        words |= {key: record[key] for key in ("verdict", "knn") if key in record}
    text = f"{share:.0%}" if share else "starts"
    text += f", {words['verdict']}" if "verdict" in words and job.training is None else ""
    return share, text + (f", kNN {words['knn']:.1f} %" if "knn" in words else "")


def status_line(done: int, total: int, seconds_left: float | None, running: Sequence[str]) -> str:
    """``3/9 done, 41 min left | simsiam-dssl-seed0 52%, healthy, kNN 38.1 %``."""
    left = ""
    if seconds_left is not None:
        minutes = seconds_left / 60
        left = f", {minutes:.0f} min left" if minutes < 90 else f", {minutes / 60:.1f} h left"
    return " | ".join([f"{done}/{total} done{left}", *running])


def cluster_script(
    jobs: Sequence[Job], place: Place, *, style: Literal["torchrun", "slurm"], gpus: int, folder: Path, again: str
) -> str:
    """A shell script of the pretraining; its settings go into ``folder``. ``again`` is the command that does the rest."""
    commands = []
    for job in jobs:
        if job.kind == "pretrained":
            path, run = folder / f"{job.name}.json", place.runs / job.name
            write_text(path, json.dumps(config_io.to_dict(place.located(job)), indent=1) + "\n")
            words = ["torchrun", "--standalone", "--nproc-per-node", str(gpus), "-m", "dssl", "train"]
            commands.append(shlex.join([*words, "--config", str(path), "--out", str(run)]))
    after = f"# when all have ended, this runs and measures the rest and writes the tables:\n#   {again}\n"
    if style == "torchrun":
        head = (
            "#!/bin/sh\n# one after the other; the same command resumes a run that was stopped\n"
            "# a run that ends with an error or a collapse, which may be its result, does not hold up the next\n"
            "trap 'exit 130' INT\ntrap 'exit 143' TERM\n"
        )
        return head + "\n".join([*commands, after])
    cases = "\n".join(f"  {number}) exec {command} ;;" for number, command in enumerate(commands))
    return f"""\
#!/bin/bash
#SBATCH --job-name=dssl
#SBATCH --array=0-{max(0, len(commands) - 1)}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={8 * gpus}
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# a run that is out of time gets the signal in place of this shell and saves itself; the same script resumes it
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
{after}"""
