"""One job in its own process: train or resume, measure, write the result. ``python -m dssl_reproduce.child SPEC``.

With ``--watch`` a parent holds the other end of our standard input. When the parent is gone, even by SIGKILL, we stop as on
SIGTERM: the run saves itself and can be resumed.
"""

import dataclasses
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from dssl.evaluation.runner import aligned_labels, evaluate
from torch import nn

from dssl import config_io
from dssl.config import RunConfig
from dssl.distributed import pick_device
from dssl.errors import DsslError, Stopped
from dssl.evaluation import classifier
from dssl.evaluation.classifier import Training
from dssl.evaluation.protocols import Task
from dssl.evaluation.result import Result, count_correct, weights_hash
from dssl.evaluation.store import FeatureStore
from dssl.log import show_messages
from dssl.models import feature_dim
from dssl.report.pictures import draw_gallery
from dssl.report.run_data import read_run
from dssl.run import RunFolder
from dssl.training.prepare import open_data, open_test_data, untrained_encoder
from dssl.training.pretrain import train
from dssl.version import VERSION
from dssl.weights.load import LoadedEncoder, open_weights
from dssl.weights.match import MatchReport
from dssl_reproduce.outcome import Measured, Outcome
from dssl_reproduce.scales import Job

_LEFT_OUT = ("regularisation_tried", "objective", "largest_gradient", "backbone_sha256", "train_data", "test_data")
"""Parts of a protocol that are not committed with a result: names of folders, and details of the solver."""
_OF_CHECKPOINT = ("sha256", "epoch", "step", "encoder", "image_size", "training_seed")
PROGRESS_FILE = "progress.json"
"""In the folder of a supervised job."""


def spec_of(job: Job, *, config: RunConfig, run: Path, result: Path) -> dict[str, Any]:
    """What the child has to know, as JSON holds it; ``config`` is the job's with the location of its data."""
    return {
        "name": job.name,
        "scale": job.scale,
        "seed": job.config.seed,
        "fingerprint": job.fingerprint,
        "kind": job.kind,
        "data": job.config.data,
        "config": config_io.to_dict(config),
        "training": None if job.training is None else dataclasses.asdict(job.training),
        "protocols": list(job.protocols),
        "labels": job.labels,
        "run": str(run),
        "result": str(result),
        "lock": str(run.with_name(f".{run.name}.lock")),
    }


def main(words: list[str]) -> int:
    """Do the job that a file describes: 0 when its result is written, 128 + n when signal n stopped it, 2 for a mistake."""
    spec = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    if "--watch" in words:
        threading.Thread(target=_watch_parent, daemon=True).start()
    show_messages()
    lock_file, result = Path(spec["lock"]), Path(spec["result"])
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as lock:
        # another harness, or an orphan of a killed one, may still be at this job: wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if result.is_file():
            return 0
        versions = _versions()  # of the code that is loaded: the checkout may change before the job ends
        try:
            found = _pretrained(spec) if spec["kind"] == "pretrained" else _baseline(spec)
        except Stopped as stopped:
            return 128 + stopped.signal
        except (DsslError, OSError) as mistake:
            print(f"dssl: {' '.join(str(mistake).split())}", file=sys.stderr)  # noqa: T201 (a program of its own)
            return 2
        if isinstance(found, int):
            return found
        precision = {"precision": found.pop("precision")}
        Outcome(
            **{key: spec[key] for key in ("name", "scale", "seed", "fingerprint", "training")},
            # the name of the data set instead of a folder of this machine
            config=spec["config"] | {"data": spec["data"], "threads": None},
            versions=versions | precision,
            **found,
        ).write(result)
    return 0


def _watch_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _pretrained(spec: Mapping[str, Any]) -> dict[str, Any] | int:
    """What goes into the result, or the exit code of a run that a signal stopped."""
    config, folder = config_io.from_dict(spec["config"]), Path(spec["run"])
    ended = train(config, folder, gallery=draw_gallery)
    if ended.signal is not None:
        return ended.exit_code
    run, about = read_run(folder), RunFolder(folder).read_config()
    accuracies = {}
    if ended.verdict.status != "diverged":
        accuracies = _measure(_task(config, open_weights(folder), labels=spec["labels"]), spec["protocols"])
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


def _baseline(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Raw pixels, the encoder before its first step, or that encoder trained with labels, from the start each time."""
    config, start, supervised = config_io.from_dict(spec["config"]), time.monotonic(), spec["kind"] == "supervised"
    loaded = _untrained(config, pixels=spec["kind"] == "pixels")
    task = _task(config, loaded, labels=config.limit if supervised else spec["labels"])
    steps = 0
    if supervised:
        result, steps = _train_supervised(task, Training(**spec["training"]), folder=Path(spec["run"]))
        accuracies = {"supervised": _measured(result)}
    else:
        accuracies = _measure(task, spec["protocols"])
    return {
        "verdict": spec["kind"],
        "reason": "",
        "spread": None,
        "accuracies": accuracies,
        "steps": steps,
        "seconds": round(time.monotonic() - start, 1),
        "precision": "fp32",
        "data": {"images": len(task.train), "fingerprint": task.train.fingerprint},
    }


def _untrained(config: RunConfig, *, pixels: bool) -> LoadedEncoder:
    """The encoder of a run before its first step; or one that returns the pixels of an image."""
    untrained, data = untrained_encoder(config)
    encoder = nn.Flatten() if pixels else untrained
    name = "raw pixels" if pixels else config.encoder
    return LoadedEncoder(
        encoder=encoder.eval(),
        name=name,
        image_size=config.image_size,
        channels=config.channels,
        normalization=data.normalization,
        path=Path(name),
        sha256=weights_hash(encoder),
        report=MatchReport(path=Path(name), prefix="", names="untrained", loaded=0, total=0, ignored=()),
        header={},
    )


def _task(config: RunConfig, loaded: LoadedEncoder, *, labels: int | None) -> Task:
    """The encoder with both splits; ``labels`` limits the labelled training images."""
    loaded.encoder.to(pick_device(config.device))
    train, test = open_data(dataclasses.replace(config, limit=labels)), open_test_data(config)
    if test is None:
        raise DsslError(f"{config.data} has no labelled test images, so nothing can be measured on it")
    train_labels, test_labels, classes = aligned_labels(train, test)
    return Task(
        store=FeatureStore(loaded, threads=config.threads), train=train, test=test,
        train_labels=train_labels, test_labels=test_labels, classes=classes, seed=config.seed,
    )  # fmt: skip


def _measure(task: Task, protocols: list[str]) -> dict[str, Measured]:
    """One accuracy of each kind: of several kNN results the one with the fewest neighbours, k = 20."""
    found: dict[str, Measured] = {}
    for result in evaluate(task, protocols).results:
        found.setdefault(str(result.protocol["kind"]), _measured(result))
    return found


def _train_supervised(task: Task, training: Training, *, folder: Path) -> tuple[Result, int]:
    """Accuracy on the whole test set after the last epoch, and the number of steps."""
    folder.mkdir(parents=True, exist_ok=True)

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            (folder / PROGRESS_FILE).write_text(json.dumps({"step": done, "total": total}), encoding="utf-8")

    encoder = task.loaded.encoder
    dim = feature_dim(encoder, image_size=task.loaded.image_size, channels=task.loaded.channels)
    head = classifier.new_head(dim, len(task.classes), seed=task.seed)
    used = classifier.train_classifier(
        encoder, head, task.train, labels=task.train_labels, training=training, store=task.store, seed=task.seed,
        freeze=False, progress=progress,
    )  # fmt: skip
    predicted = classifier.predict_features(head, task.store.compute(task.test).values)
    protocol = {
        "kind": "supervised",
        "train_images": len(task.train),
        "test_images": len(task.test),
        "seed": task.seed,
        **{name: getattr(used, name) for name in ("epochs", "batch_size", "rate", "weight_decay", "policy")},
    }
    correct = count_correct(predicted, torch.from_numpy(task.test_labels))
    result = Result(name="supervised from scratch", correct=correct, total=len(task.test), protocol=protocol)
    return result, used.epochs * (len(task.train) // used.batch_size)


def _measured(result: Result) -> Measured:
    low, high = result.interval
    protocol = {key: value for key, value in result.protocol.items() if key not in _LEFT_OUT}
    if "checkpoint" in protocol:
        protocol["checkpoint"] = {key: protocol["checkpoint"].get(key) for key in _OF_CHECKPOINT}
    return Measured(
        accuracy=result.accuracy, interval=(round(low, 3), round(high, 3)), protocol={"name": result.name, **protocol}
    )


def _versions() -> dict[str, str]:
    """Of the software; with the Git commit where dssl runs from a checkout ("-dirty": with changed files)."""
    found = {"dssl": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    checkout = Path(__file__).parents[1]
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if (checkout / ".git").exists():  # else it would be the commit of whatever project dssl is installed in
        with suppress(OSError, subprocess.CalledProcessError):
            found["commit"] = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
