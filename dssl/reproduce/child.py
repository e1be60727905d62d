"""One job in a process of its own: train or continue, measure, write the result. ``python -m dssl.reproduce.child SPEC``.

With ``--watch`` a parent holds the other end of our standard input. When it is gone, killed or not, we stop as if by SIGTERM: the
run saves itself and can be continued.
"""

import fcntl
import json
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dssl import config_io
from dssl.config import RunConfig
from dssl.errors import DsslError, Stopped

if TYPE_CHECKING:
    from dssl.evaluate.protocols import Task
    from dssl.evaluate.result import Result
    from dssl.reproduce.outcome import Measured
    from dssl.reproduce.plan import Job

_UNTOLD = ("regularisation_tried", "objective", "largest_gradient", "backbone_sha256", "train_data", "test_data")
"""What of a protocol does not go into a result that is committed: names of folders, and what only a solver's author reads."""
_OF_CHECKPOINT = ("sha256", "epoch", "step", "encoder", "image_size", "training_seed")


def main(words: list[str]) -> int:
    """Do the job that the file describes; 0 when its result is written, 128 + n when signal n stopped it, 2 for a mistake."""
    spec = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    if "--watch" in words:
        threading.Thread(target=_watch_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("dssl").setLevel(logging.INFO)
    result = Path(spec["result"])
    with Path(spec["lock"]).open("w") as lock:
        # another harness, or what is left of one that was killed, may still be at this job: wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if result.is_file():
            return 0
        try:
            return _supervised(spec, result) if spec["training"] else _pretrain(spec, result)
        except Stopped as stopped:
            return 128 + stopped.signal
        except (DsslError, OSError) as mistake:
            print(f"dssl: {' '.join(str(mistake).split())}", file=sys.stderr)  # noqa: T201
            return 2


def _watch_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _pretrain(spec: Mapping[str, Any], result: Path) -> int:
    from dssl.report.pictures import draw_gallery
    from dssl.report.run_data import read_run
    from dssl.reproduce.outcome import Outcome
    from dssl.train.pretrain import train

    config = config_io.from_dict(spec["config"])
    folder = Path(spec["run"])
    ended = train(config, folder, gallery=draw_gallery)
    if ended.signal is not None:
        return ended.exit_code
    run = read_run(folder)
    about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    accuracies = {} if ended.opinion.verdict == "diverged" else _measure(config, folder, spec["protocols"])
    Outcome(
        **_identity(spec),
        config=_placeless(config, spec),
        verdict=ended.opinion.verdict,
        reason=run.opinion.reason,
        spread=run.spread,
        accuracies=accuracies,
        steps=ended.step,
        seconds=round(run.seconds, 1),
        versions=_versions() | {"precision": about["precision"]},
        data={"images": about["images"], "fingerprint": about["fingerprint"]},
        curves={
            "knn": [(round(x, 3), round(y, 3)) for x, y in run.curve("knn")],
            "spread": [(round(x, 3), round(y, 4)) for x, y in run.thinned("spread", 60)],
        },
    ).write(result)
    return 0


def _measure(config: RunConfig, folder: Path, protocols: list[str]) -> "dict[str, Measured]":
    from dssl.evaluate.runner import evaluate

    task = _task(config, folder)
    found = evaluate(task, protocols, policy=config.standard).results
    best: dict[str, Measured] = {}
    for one in found:
        # of the kNN results the one that the paper's code uses, and the curves do: the most neighbours
        best[str(one.protocol["kind"])] = _told(one)
    return best


def _task(config: RunConfig, folder: Path) -> "Task":
    from dssl.evaluate.protocols import Task
    from dssl.evaluate.runner import aligned_labels
    from dssl.evaluate.store import FeatureStore
    from dssl.train.prepare import open_data, open_test_data
    from dssl.weights.load import open_weights
    from dssl.world import pick_device

    loaded = open_weights(folder)
    loaded.encoder.to(pick_device(config.device))
    train, test = open_data(config), open_test_data(config)
    if test is None:
        raise DsslError(f"{config.data} has no labelled test images: nothing can be measured on it")
    train_labels, test_labels, classes = aligned_labels(train, test)
    store = FeatureStore(loaded, threads=config.threads)
    return Task(
        loaded=loaded, store=store, train=train, test=test, train_labels=train_labels, test_labels=test_labels,
        classes=classes, seed=config.seed, threads=config.threads,
    )  # fmt: skip


def _supervised(spec: Mapping[str, Any], result: Path) -> int:
    """Train with labels from scratch. It is short, and is begun again where it was stopped."""
    import time

    from dssl.evaluate.classifier import Training
    from dssl.reproduce.outcome import Outcome
    from dssl.reproduce.supervised import train_supervised

    config = config_io.from_dict(spec["config"])
    begun = time.monotonic()
    folder = Path(spec["run"])
    folder.mkdir(parents=True, exist_ok=True)
    progress_file = folder / "progress.json"

    def progress(done: int, total: int) -> None:
        if done % 20 == 0 or done == total:
            progress_file.write_text(json.dumps({"step": done, "total": total}), encoding="utf-8")

    measured, about = train_supervised(config, Training(**spec["training"]), progress=progress)
    Outcome(
        **_identity(spec),
        config=_placeless(config, spec),
        verdict="supervised",
        reason="",
        spread=None,
        accuracies={"supervised": _told(measured)},
        steps=about["steps"],
        seconds=round(time.monotonic() - begun, 1),
        versions=_versions() | {"precision": "fp32"},
        data={"images": about["images"], "fingerprint": about["fingerprint"]},
    ).write(result)
    return 0


def _told(result: "Result") -> "Measured":
    from dssl.reproduce.outcome import Measured

    low, high = result.interval
    protocol = {key: value for key, value in result.protocol.items() if key not in _UNTOLD}
    if "checkpoint" in protocol:
        protocol["checkpoint"] = {key: protocol["checkpoint"].get(key) for key in _OF_CHECKPOINT}
    return Measured(
        accuracy=result.accuracy, interval=(round(low, 3), round(high, 3)), protocol={"name": result.name, **protocol}
    )


def _identity(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("name", "scale", "seed", "fingerprint", "training")}


def _placeless(config: RunConfig, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without this machine's folder: the data set's name stands for it."""
    return config_io.to_dict(config) | {"data": spec["data"], "threads": None}


def _versions() -> dict[str, str]:
    import torch

    from dssl.version import VERSION

    return {"dssl": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}


def spec_of(job: "Job", *, config: RunConfig, run: Path, result: Path) -> dict[str, Any]:
    """What the child has to know, as JSON holds it; ``config`` is the job's with its data where they are."""
    return {
        "name": job.name,
        "scale": job.scale,
        "seed": job.config.seed,
        "fingerprint": job.fingerprint,
        "data": job.config.data,
        "config": config_io.to_dict(config),
        "training": None if job.training is None else asdict(job.training),
        "protocols": list(job.protocols),
        "run": str(run),
        "result": str(result),
        "lock": str(run.with_name(f".{run.name}.lock")),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
