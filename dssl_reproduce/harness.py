"""Runs jobs, each in a process of its own, here or on a cluster: train or resume, measure, write the result."""

import dataclasses
import fcntl
import json
import logging
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from dssl import config_io
from dssl.augment import SEVERITIES, kinds_seen
from dssl.cli import keep_freed_memory
from dssl.config import RunConfig
from dssl.data.pipeline import default_threads
from dssl.distributed import pick_device
from dssl.errors import DsslError, Stopped, one_line
from dssl.evaluation import Result
from dssl.evaluation.protocols import Benchmark, evaluate, supervised
from dssl.evaluation.robustness import robustness
from dssl.files import write_text
from dssl.log import show_messages
from dssl.report.pictures import draw_gallery
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.state import StopSignals
from dssl.training.prepare import open_data, open_test_data, untrained_encoder
from dssl.training.pretrain import train
from dssl.version import VERSION
from dssl.weights.encoder import Encoder, FeatureStore
from dssl.weights.load import open_weights
from dssl_reproduce import CORRUPTIONS, outcome
from dssl_reproduce.outcome import Corrupted, Measured, Outcome, Place, finished, pack, pack_counts
from dssl_reproduce.scales import Job

logger = logging.getLogger("dssl")
_LEFT_OUT = ("regularisation_tried", "objective", "largest_gradient", "backbone_sha256", "train_data", "test_data")
"""Parts of a protocol that are not committed with a result: names of folders, and details of the solver."""
_OF_CHECKPOINT = ("sha256", "epoch", "step", "encoder", "image_size", "training_seed")
_POLL = 0.5
"""Seconds until a signal is noticed."""
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


def workers_here() -> int:
    """Jobs to run at a time on this machine: one per GPU, or one per two cores as memory allows."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return len(gpus_here()) or max(1, min(default_threads() // _CORES_PER_JOB, memory // _MEMORY_PER_JOB))


def gpus_here() -> list[str]:
    """The GPUs that this process was given, by number, UUID or MIG name."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in given.split(",")][:count]


def run_jobs(
    jobs: Sequence[Job], place: Place, *, workers: int | None = None, say: Callable[[str], None] = lambda line: None
) -> SessionEnd:
    """Run what is not finished; on SIGINT or SIGTERM every run saves itself before this returns.

    ``say`` gets a line for every start and end.
    """
    done = finished(jobs, place)
    waiting = [job for job in jobs if job.name not in done]
    count = min(workers or workers_here(), len(jobs))
    threads, gpus = max(1, default_threads() // max(1, count)), gpus_here()
    spawn = multiprocessing.get_context("spawn")  # torch's threads and CUDA do not survive a fork
    running: list[_Running] = []
    failed: dict[str, str] = {}
    for folder in (place.runs, place.cells):
        folder.mkdir(parents=True, exist_ok=True)
    with StopSignals() as stop:
        try:
            while (waiting or running) and stop.signal is None:
                while waiting and len(running) < count:
                    gpu = min(gpus, key=[worker.gpu for worker in running].count, default=None)
                    job = waiting.pop(0)
                    word = "resuming" if (place.runs / job.name).exists() else "starting"
                    say(f"{word} {job.name}: {place.log(job)}")
                    options = {"threads": threads, "gpu": gpu}
                    process = spawn.Process(target=in_own_process, args=(job, place), kwargs=options)
                    process.start()
                    running.append(_Running(job, process, gpu))
                wait([worker.process.sentinel for worker in running], timeout=_POLL)
                for worker in [worker for worker in running if worker.process.exitcode is not None]:
                    running.remove(worker)
                    ended = len(jobs) - len(waiting) - len(running)
                    say(f"{_end(worker, place, failed)} ({ended} of {len(jobs)} runs)")
        finally:
            for worker in running:
                worker.process.terminate()
            for worker in running:
                worker.process.join()  # until its run has saved itself
    return SessionEnd(failed=failed, signal=stop.signal)


def _end(worker: _Running, place: Place, failed: dict[str, str]) -> str:
    """How the job ended, in a line."""
    job, code, path = worker.job, worker.process.exitcode, place.log(worker.job)
    if code == 0 and place.result(job).is_file():
        result = outcome.read(place.result(job))
        words = [result.verdict, *(f"{kind} {entry.accuracy:.1f}%" for kind, entry in result.accuracies.items())]
        return f"finished {job.name}: {', '.join(words)}, {result.seconds / 60:.1f} min"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.is_file() else []
    reason = lines[-1] if lines else f"exit code {code}"
    if code is not None and code < 0:
        reason = f"ended by signal {-code}"
    failed[job.name] = f"{reason} (see {path})"
    return f"failed {job.name}: {failed[job.name]}"


def pretraining_commands(jobs: Sequence[Job], place: Place, *, gpus: int, folder: Path) -> list[str]:
    """A command for each pretraining, for several GPUs each; the settings go into ``folder``."""
    commands = []
    for job in jobs:
        if job.kind == "pretrained":
            path = folder / f"{job.name}.json"
            write_text(path, json.dumps(config_io.to_dict(place.located(job)), indent=1) + "\n")
            words = ["torchrun", "--standalone", "--nproc-per-node", str(gpus), "-m", "dssl", "train"]
            commands.append(shlex.join([*words, "--config", str(path), "--out", str(place.runs / job.name)]))
    return commands


def in_own_process(job: Job, place: Place, *, threads: int, gpu: str | None) -> None:
    """What a process of the harness does: the job, with its messages in the job's log; the exit code is ``run_job``'s.

    SIGTERM from the harness stops the job, and so does the end of the harness, even by SIGKILL: a run saves itself and can be
    resumed.
    """
    keep_freed_memory()
    os.setsid()  # Ctrl-C reaches the harness alone, which passes it on
    log = os.open(place.log(job), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    show_messages()
    sys.exit(run_job(job, place, threads=threads))


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def run_job(job: Job, place: Place, *, threads: int | None = None) -> int:
    """0 when the result is written, 128 + n when signal n stopped the job, 2 for a mistake, which is logged."""
    run, result = place.runs / job.name, place.result(job)
    located = place.located(job)
    # the untrained encoder is a row of the table: no run needs to measure it again
    health = dataclasses.replace(located.health, compare_with_start=False)
    config = dataclasses.replace(located, threads=threads, health=health)
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_name(f".{run.name}.lock").open("w") as lock:
        # another harness, or an orphan of a killed one, may still be at this job: wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        versions = _versions()  # of the code that is loaded: the checkout may change before the job ends
        try:
            if finished([job], place):
                return 0
            measured = _pretrained(job, config, run) if job.kind == "pretrained" else _baseline(job, config, run)
        except Stopped as stopped:
            return 128 + stopped.signal
        except (DsslError, OSError) as mistake:
            logger.error(one_line(mistake, longest=1000))
            return 2
        versions["precision"] = measured.pop("precision")
        training = None if job.training is None else dataclasses.asdict(job.training)
        # with the name of the data set instead of a folder of this machine
        settings = config_io.to_dict(dataclasses.replace(job.config, threads=None))
        Outcome(
            name=job.name, scale=job.scale, seed=job.config.seed, fingerprint=job.fingerprint, config=settings,
            training=training, versions=versions, **measured,
        ).write(result)  # fmt: skip
    return 0


def _pretrained(job: Job, config: RunConfig, folder: Path) -> dict[str, Any]:
    """What goes into the result."""
    ended = train(config, folder, gallery=draw_gallery)
    if ended.signal is not None:
        raise Stopped(ended.signal)
    run, about = read_run(folder), RunFolder(folder).read_config()
    measured: dict[str, Any] = {"accuracies": {}, "corruptions": {} if job.corruptions else None}
    if ended.verdict.status != "diverged":
        measured = _measure(_benchmark(config, open_weights(folder), labels=job.labels), job)
    return {
        "verdict": ended.verdict.status,
        "reason": run.verdict.reason,
        "spread": run.spread,
        **measured,
        "steps": ended.step,
        "seconds": round(run.seconds, 1),
        "precision": about["precision"],
        "data": {"images": about["images"], "fingerprint": about["fingerprint"]},
        "curves": {
            "knn": [(round(x, 3), round(y, 3)) for x, y in run.curve("knn")],
            "spread": [(round(x, 3), round(y, 4)) for x, y in run.thinned("spread", 60)],
        },
    }


def _baseline(job: Job, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Raw pixels, the encoder before its first step, or that encoder trained with labels."""
    start, steps = time.monotonic(), 0
    encoder = untrained_encoder(config)
    if job.kind == "pixels":
        encoder = encoder.raw_pixels()
    benchmark = _benchmark(config, encoder, labels=config.limit if job.training else job.labels)
    if job.training is None:
        measured = _measure(benchmark, job)
    else:  # on the whole test set after the last epoch; a stopped training resumes in the folder
        folder.mkdir(parents=True, exist_ok=True)
        resumable = dataclasses.replace(benchmark, folder=folder)
        (result,) = supervised(resumable, network=encoder.network, training=job.training)
        measured = {"accuracies": {"supervised": _measured(result, benchmark)}}
        used = result.protocol["training"]
        steps = used["epochs"] * (len(benchmark.train) // used["batch_size"])
    return {
        "verdict": job.kind,
        **measured,
        "steps": steps,
        "seconds": round(time.monotonic() - start, 1),
        "precision": "fp32",
        "data": {"images": len(benchmark.train), "fingerprint": benchmark.train.fingerprint},
    }


def _benchmark(config: RunConfig, encoder: Encoder, *, labels: int | None) -> Benchmark:
    """The encoder with both splits; ``labels`` limits the labelled training images."""
    encoder.network.to(pick_device(config.device))
    train, test = open_data(dataclasses.replace(config, limit=labels)), open_test_data(config)
    if test is None:
        raise DsslError(f"{config.data} has no labeled test images, so nothing can be measured on it")
    store = FeatureStore(dataclasses.replace(encoder, threads=config.threads))
    return Benchmark.of(store, train, test, seed=config.seed)


def _measure(benchmark: Benchmark, job: Job) -> dict[str, Any]:
    """One accuracy of each kind: of several kNN results the one with the fewest neighbours, k = 20."""
    accuracies: dict[str, Measured] = {}
    for result in evaluate(benchmark, job.protocols).results:
        accuracies.setdefault(str(result.protocol["kind"]), _measured(result, benchmark))
    return {"accuracies": accuracies, "corruptions": _corrupted(benchmark) if job.corruptions else None}


def _corrupted(benchmark: Benchmark) -> dict[str, Corrupted]:
    """Seen are the kinds of the policy ``corrupt``, whatever the run's own policies: the sets are the same for every run."""
    found = robustness(benchmark, familiarity=kinds_seen("corrupt"))
    rows = {name: found.sets()[name] for name in CORRUPTIONS}
    return {
        name.split()[0]: Corrupted(  # "linear probe", "knn k=20"
            accuracies={
                kind: [round(100 * float(right[found.row(kind, severity)].mean()), 3) for severity in SEVERITIES]
                for kind in found.kinds
            },
            conditions={name: len(conditions) for name, conditions in rows.items()},
            right={name: pack_counts(right[conditions].sum(axis=0)) for name, conditions in rows.items()},
            protocol=_without_places(found.protocol) | {"name": name},
        )
        for name, right in found.right.items()
    }


def _without_places(protocol: dict[str, Any]) -> dict[str, Any]:
    """A protocol as it is committed."""
    kept = {key: value for key, value in protocol.items() if key not in _LEFT_OUT}
    if "checkpoint" in kept:
        kept["checkpoint"] = {key: kept["checkpoint"].get(key) for key in _OF_CHECKPOINT}
    return kept


def _measured(result: Result, benchmark: Benchmark) -> Measured:
    low, high = result.interval
    assert result.predicted is not None
    right = pack(result.predicted.numpy() == benchmark.test_labels)
    about = {"name": result.name, **_without_places(result.protocol)}
    return Measured(accuracy=result.accuracy, interval=(round(low, 3), round(high, 3)), protocol=about, right=right)


def _versions() -> dict[str, str]:
    """Of the software; with the Git commit where dssl runs from a checkout ("-dirty": with changed files)."""
    versions = {"dssl": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    checkout = Path(__file__).parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if (checkout / ".git").exists():  # else it would be the commit of whatever project dssl is installed in
        with suppress(OSError, subprocess.CalledProcessError):
            versions["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return versions
