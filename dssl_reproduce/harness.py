"""Runs jobs, each in its own process, here or on a cluster; killed runs can be resumed."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from dssl import config_io
from dssl.config import RunConfig
from dssl.data.pipeline import default_threads
from dssl.errors import DsslError
from dssl.files import write_text
from dssl.state import StopSignals
from dssl_reproduce import outcome
from dssl_reproduce.child import PROGRESS_FILE, spec_of
from dssl_reproduce.outcome import Outcome
from dssl_reproduce.scales import Job

_POLL, _LOOK = 0.2, 2.0
"""Seconds between looks at the processes, and at the folders of their runs."""
_CORES_PER_JOB = 2
_MEMORY_PER_JOB = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Locations: images by data set, run folders, results."""

    data: Mapping[str, str]
    """From the name of a data set to what ``open_source`` takes; jobs on other data sets are not run."""
    runs: Path
    cells: Path

    def located(self, job: Job) -> RunConfig:
        """The job's configuration with the location of its images."""
        return dataclasses.replace(job.config, data=self.data[job.config.data])

    def result(self, job: Job) -> Path:
        return self.cells / f"{job.name}.json"

    def log(self, job: Job) -> Path:
        return self.runs / f"{job.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a running job is."""

    name: str
    share: float = 0.0
    """Of its steps; 0 before the first."""
    words: str = ""
    """Status and kNN accuracy, once there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How far all jobs are."""

    done: int
    total: int
    running: tuple[JobProgress, ...]
    seconds_left: float | None
    """None until it can be estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session of the harness ended."""

    failed: dict[str, str]
    """The reason by job."""
    signal: int | None


@dataclass
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    log: IO[bytes]
    begun: float
    """The share that was done before this session."""
    seen: JobProgress
    seen_at: float

    def close(self) -> None:
        self.log.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def finished(jobs: Sequence[Job], place: Place) -> dict[str, Outcome]:
    """The results that exist and have exactly the settings of these jobs."""
    found: dict[str, Outcome] = {}
    for job in jobs:
        path = place.result(job)
        if path.is_file() and (one := outcome.read(path)).fingerprint == job.fingerprint:
            found[job.name] = one
    return found


def workers_here() -> int:
    """Jobs to run at a time on this machine: one per GPU, or one per two cores as memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _gpus() or max(1, min(default_threads() // _CORES_PER_JOB, memory // _MEMORY_PER_JOB))


def run_jobs(
    jobs: Sequence[Job],
    place: Place,
    *,
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[Status], None] = lambda status: None,
) -> SessionEnd:
    """Run what is not finished; on SIGINT or SIGTERM every run saves itself before this returns."""
    done = finished(jobs, place)
    waiting = [job for job in jobs if job.name not in done]
    count = max(1, min(workers or workers_here(), len(waiting)))
    threads = max(1, default_threads() // count)
    children: list[_Child] = []
    failed: dict[str, str] = {}
    start, ended_work = time.monotonic(), 0.0
    with StopSignals() as stop:
        try:
            while (waiting or children) and stop.signal is None:
                while waiting and len(children) < count:
                    slot = min(set(range(count)) - {child.slot for child in children})
                    child = _start(waiting.pop(0), place, slot=slot, threads=threads)
                    say(f"{'resuming' if child.begun else 'starting'} {child.job.name}")
                    children.append(child)
                for child in list(children):
                    if child.process.poll() is not None:
                        children.remove(child)
                        ended_work += child.job.work * (1 - child.begun)
                        say(_end(child, place, failed))
                    elif time.monotonic() - child.seen_at >= _LOOK:
                        child.seen, child.seen_at = _progress(child.job, place), time.monotonic()
                work = ended_work + sum(child.job.work * (child.seen.share - child.begun) for child in children)
                left = sum(job.work for job in waiting) + sum(
                    child.job.work * (1 - child.seen.share) for child in children
                )
                show(
                    Status(
                        done=len(jobs) - len(waiting) - len(children),
                        total=len(jobs),
                        running=tuple(child.seen for child in children),
                        seconds_left=left * (time.monotonic() - start) / work if work > 0 else None,
                    )
                )
                time.sleep(_POLL)
        finally:
            for child in children:
                child.process.terminate()
            for child in children:
                child.process.wait()  # until its run has saved itself
                child.close()
    return SessionEnd(failed=failed, signal=stop.signal)


def _start(job: Job, place: Place, *, slot: int, threads: int) -> _Child:
    place.runs.mkdir(parents=True, exist_ok=True)
    place.cells.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(place.located(job), threads=threads)
    spec = place.runs / f".{job.name}.spec.json"
    write_text(spec, json.dumps(spec_of(job, config=config, run=place.runs / job.name, result=place.result(job))))
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    if (gpus := _gpus()) > 1:
        # those that this process was given, by number, UUID or MIG name
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        environment["CUDA_VISIBLE_DEVICES"] = given.split(",")[slot % gpus].strip()
    log = place.log(job).open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "dssl_reproduce.child", str(spec), "--watch"],
        stdin=subprocess.PIPE,  # when it closes, the child knows that we are gone
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on
    )
    seen = _progress(job, place)
    return _Child(job, process, slot, log, seen.share, seen, time.monotonic())


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _end(child: _Child, place: Place, failed: dict[str, str]) -> str:
    """How the job ended, in a line."""
    child.close()
    job, code = child.job, child.process.returncode
    if code == 0 and place.result(job).is_file():
        one = outcome.read(place.result(job))
        words = [one.verdict, *(f"{kind} {found.accuracy:.1f} %" for kind, found in one.accuracies.items())]
        return f"finished {job.name}: {', '.join(words)}, {one.seconds / 60:.1f} min"
    lines = place.log(job).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = lines[-1] if code >= 0 and lines else f"ended by signal {-code}"
    failed[job.name] = f"{reason} (see {place.log(job)})"
    return f"failed {job.name}: {failed[job.name]}"


def _progress(job: Job, place: Place) -> JobProgress:
    """What the run's folder says, so that a new session knows it too."""
    from dssl.report.run_data import read_run

    folder = place.runs / job.name
    with suppress(DsslError, OSError, ValueError):
        if job.kind == "supervised":
            plain = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            return JobProgress(name=job.name, share=plain["step"] / plain["total"])
        if job.kind == "pretrained":
            run = read_run(folder)
            words = run.verdict.status + ("" if run.knn is None else f", kNN {run.knn:.1f} %")
            return JobProgress(name=job.name, share=run.steps / max(1, run.total), words=words)
    return JobProgress(name=job.name)


def cluster_script(
    jobs: Sequence[Job], place: Place, *, style: Literal["torchrun", "slurm"], gpus: int, folder: Path, again: str
) -> str:
    """A shell script that runs the jobs; their settings go into ``folder``. ``again`` is the command that measures them."""
    commands = [_cluster_command(job, place, gpus=gpus, path=folder / f"{job.name}.json") for job in jobs]
    after = f"# when all have ended, this measures them and writes the tables:\n#   {again}\n"
    if style == "torchrun":
        head = (
            "#!/bin/sh\n# one after the other; the same command resumes a run that was stopped\n"
            "# a run that ends with an error or a collapse, which may be its result, does not hold up the next\n"
            "trap 'exit 130' INT\ntrap 'exit 143' TERM\n"
        )
        return head + "\n".join([*commands, after])
    cases = "\n".join(f"  {number}) set -- {command} ;;" for number, command in enumerate(commands))
    return f"""\
#!/bin/bash
#SBATCH --job-name=dssl
#SBATCH --array=0-{max(0, len(jobs) - 1)}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={8 * gpus}
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# a run that is out of time saves itself; the same script resumes it
case $SLURM_ARRAY_TASK_ID in
{cases}
esac
trap 'kill -TERM $!' TERM
"$@" &
run=$!
wait $run; code=$?
# the trap ends a wait at once, while the run still saves itself: wait until it has ended
while kill -0 $run 2>/dev/null; do wait $run; code=$?; done
exit $code
{after}"""


def _cluster_command(job: Job, place: Place, *, gpus: int, path: Path) -> str:
    run, config = place.runs / job.name, place.located(job)
    if job.kind == "pretrained":
        plain = config_io.to_dict(config)
        words = ["torchrun", "--standalone", "--nproc-per-node", str(gpus), "-m", "dssl", "train"]
        words += ["--config", str(path), "--out", str(run)]
    else:
        plain = spec_of(job, config=config, run=run, result=place.result(job))
        words = ["python", "-m", "dssl_reproduce.child", str(path)]
    write_text(path, json.dumps(plain, indent=1) + "\n")
    return shlex.join(words)
