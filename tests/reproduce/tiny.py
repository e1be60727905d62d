"""A table of two entries at a scale of seconds, and a program that runs it as ``dssl reproduce`` would."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from dssl.config import CheckpointConfig, HealthConfig, OptimizerConfig, RunConfig
from dssl.evaluation.classifier import SUPERVISED
from dssl.methods import SimSiamConfig
from dssl_reproduce import Experiment, PaperCell, Target, table
from dssl_reproduce.harness import SessionEnd, run_jobs
from dssl_reproduce.outcome import Place, finished
from dssl_reproduce.scales import Scale, jobs_of


def settings(data: str, method: str) -> RunConfig:
    return RunConfig(
        encoder="small",
        method=SimSiamConfig(hidden=16, output=16, bottleneck=8),
        heavy="ra(2,5)",
        limit=48,
        epochs=4,
        batch_size=16,
        precision="fp32",
        knn_every=0,
        optimizer=OptimizerConfig(rate=0.06, warmup_epochs=1),
        checkpoint=CheckpointConfig(every_minutes=1e-6),
        health=HealthConfig(every=2),
    )


SCALE = Scale(
    name="tiny",
    differs=("everything",),
    settings=settings,
    training=lambda data: dataclasses.replace(SUPERVISED, epochs=1, batch_size=16),
    linear=lambda data, method: "probe",
)
STANDARD = Experiment(data="cifar10", method="simsiam", graph="standard")
DSSL = Experiment(data="cifar10", method="simsiam", graph="dssl", heavy="ra(2,5)")
TARGET = Target(
    name="tiny",
    also=(),
    label="tab:tiny",
    title="Tiny",
    measure="linear accuracy, %",
    compare_rows=(("dssl", "standard"),),
    cells=(
        PaperCell(row="standard", column="a", paper="92.1", experiment=STANDARD),
        PaperCell(row="dssl", column="a", paper="94.5", experiment=DSSL),
    ),
)


def place(folder: Path) -> Place:
    return Place(data={"cifar10": "shapes:64"}, runs=folder / "runs", cells=folder / "cells")


def run(folder: Path, *, say: Callable[[str], None] = lambda line: None) -> SessionEnd:
    """Runs what is open and writes the table, as the command does."""
    folder.mkdir(exist_ok=True)
    jobs = jobs_of([TARGET], SCALE, seeds=(0,))
    ended = run_jobs(jobs, place(folder), workers=1, say=say)
    made = table.build(TARGET, SCALE, seeds=(0,), outcomes=finished(jobs, place(folder)))
    (folder / "table.json").write_text(json.dumps(table.plain(made), indent=1))
    return ended


if __name__ == "__main__":
    ended = run(Path(sys.argv[1]))
    sys.exit(1 if ended.failed else 128 + ended.signal if ended.signal else 0)
