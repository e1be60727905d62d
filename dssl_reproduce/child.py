"""One job: train or resume, measure, write the result; in a process of its own or in this one."""

import dataclasses
import fcntl
import logging
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dssl import config_io
from dssl.config import RunConfig
from dssl.distributed import pick_device
from dssl.errors import DsslError, Stopped, one_line
from dssl.evaluation.classifier import Training
from dssl.evaluation.protocols import Benchmark, evaluate, supervised
from dssl.evaluation.result import Result
from dssl.evaluation.store import FeatureStore
from dssl.log import show_messages
from dssl.report.pictures import draw_gallery
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.training.prepare import open_data, open_test_data, untrained_encoder
from dssl.training.pretrain import train
from dssl.version import VERSION
from dssl.weights.encoder import Encoder
from dssl.weights.load import open_weights
from dssl_reproduce.outcome import Measured, Outcome, Place, pack
from dssl_reproduce.scales import Job

logger = logging.getLogger("dssl")
_LEFT_OUT = ("regularisation_tried", "objective", "largest_gradient", "backbone_sha256", "train_data", "test_data")
"""Parts of a protocol that are not committed with a result: names of folders, and details of the solver."""
_OF_CHECKPOINT = ("sha256", "epoch", "step", "encoder", "image_size", "training_seed")


def in_own_process(job: Job, place: Place, *, threads: int, gpu: str | None) -> None:
    """What a process of the harness does: the job, with its messages in the job's log; the exit code is ``run_job``'s.

    SIGTERM from the harness stops the job, and so does the end of the harness, even by SIGKILL: a run saves itself and can be
    resumed.
    """
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
    config = dataclasses.replace(place.located(job), threads=threads)
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_name(f".{run.name}.lock").open("w") as lock:
        # another harness, or an orphan of a killed one, may still be at this job: wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if result.is_file():
            return 0
        versions = _versions()  # of the code that is loaded: the checkout may change before the job ends
        try:
            measured = _pretrained(job, config, run) if job.kind == "pretrained" else _baseline(job, config, run)
        except Stopped as stopped:
            return 128 + stopped.signal
        except (DsslError, OSError) as mistake:
            logger.error(one_line(mistake, longest=1000))
            return 2
        precision = {"precision": measured.pop("precision")}
        Outcome(
            name=job.name,
            scale=job.scale,
            seed=job.config.seed,
            fingerprint=job.fingerprint,
            training=None if job.training is None else dataclasses.asdict(job.training),
            # with the name of the data set instead of a folder of this machine
            config=config_io.to_dict(dataclasses.replace(job.config, threads=None)),
            versions=versions | precision,
            **measured,
        ).write(result)
    return 0


def _pretrained(job: Job, config: RunConfig, folder: Path) -> dict[str, Any]:
    """What goes into the result."""
    ended = train(config, folder, gallery=draw_gallery)
    if ended.signal is not None:
        raise Stopped(ended.signal)
    run, about = read_run(folder), RunFolder(folder).read_config()
    accuracies = {}
    if ended.verdict.status != "diverged":
        accuracies = _measure(_benchmark(config, open_weights(folder), labels=job.labels), job.protocols)
    return {
        "verdict": ended.verdict.status,
        "reason": run.verdict.reason,
        "spread": run.spread,
        "accuracies": accuracies,
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
    start = time.monotonic()
    encoder = untrained(config, pixels=job.kind == "pixels")
    benchmark = _benchmark(config, encoder, labels=config.limit if job.training else job.labels)
    steps = 0
    if job.training is None:
        accuracies = _measure(benchmark, job.protocols)
    else:
        result, steps = _supervised(benchmark, job.training, folder=folder)
        accuracies = {"supervised": _measured(result, benchmark)}
    return {
        "verdict": job.kind,
        "reason": "",
        "spread": None,
        "accuracies": accuracies,
        "steps": steps,
        "seconds": round(time.monotonic() - start, 1),
        "precision": "fp32",
        "data": {"images": len(benchmark.train), "fingerprint": benchmark.train.fingerprint},
    }


def untrained(config: RunConfig, *, pixels: bool) -> Encoder:
    """The encoder of a run before its first step; or one that returns the pixels of an image."""
    encoder = untrained_encoder(config)
    return encoder.raw_pixels() if pixels else encoder


def _benchmark(config: RunConfig, encoder: Encoder, *, labels: int | None) -> Benchmark:
    """The encoder with both splits; ``labels`` limits the labelled training images."""
    encoder.network.to(pick_device(config.device))
    train, test = open_data(dataclasses.replace(config, limit=labels)), open_test_data(config)
    if test is None:
        raise DsslError(f"{config.data} has no labelled test images, so nothing can be measured on it")
    store = FeatureStore(dataclasses.replace(encoder, threads=config.threads))
    return Benchmark.of(store, train, test, seed=config.seed)


def _measure(benchmark: Benchmark, protocols: Sequence[str]) -> dict[str, Measured]:
    """One accuracy of each kind: of several kNN results the one with the fewest neighbours, k = 20."""
    accuracies: dict[str, Measured] = {}
    for result in evaluate(benchmark, protocols).results:
        accuracies.setdefault(str(result.protocol["kind"]), _measured(result, benchmark))
    return accuracies


def _supervised(benchmark: Benchmark, training: Training, *, folder: Path) -> tuple[Result, int]:
    """Accuracy on the whole test set after the last epoch, and the number of steps; a stopped training resumes in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    resumable = dataclasses.replace(benchmark, folder=folder)
    (result,) = supervised(resumable, network=benchmark.encoder.network, training=training)
    used = result.protocol["training"]
    return result, used["epochs"] * (len(benchmark.train) // used["batch_size"])


def _measured(result: Result, benchmark: Benchmark) -> Measured:
    low, high = result.interval
    protocol = {key: value for key, value in result.protocol.items() if key not in _LEFT_OUT}
    if "checkpoint" in protocol:
        protocol["checkpoint"] = {key: protocol["checkpoint"].get(key) for key in _OF_CHECKPOINT}
    assert result.predicted is not None
    return Measured(
        accuracy=result.accuracy,
        interval=(round(low, 3), round(high, 3)),
        protocol={"name": result.name, **protocol},
        right=pack(result.predicted.numpy() == benchmark.test_labels),
    )


def _versions() -> dict[str, str]:
    """Of the software; with the Git commit where dssl runs from a checkout ("-dirty": with changed files)."""
    versions = {"dssl": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    checkout = Path(__file__).parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if (checkout / ".git").exists():  # else it would be the commit of whatever project dssl is installed in
        with suppress(OSError, subprocess.CalledProcessError):
            versions["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return versions
