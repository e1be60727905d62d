"""The same jobs for a cluster: configurations as files, and the torchrun or Slurm commands that run them."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dssl import config_io
from dssl.reproduce.child import spec_of
from dssl.reproduce.harness import Place
from dssl.reproduce.plan import Job

Style = Literal["torchrun", "slurm"]


def script(jobs: Sequence[Job], place: Place, *, style: Style, gpus: int, folder: Path, again: str) -> str:
    """A shell script; each job's configuration goes into ``folder``. ``again`` is the command that measures and makes tables."""
    commands = [_command(job, place, gpus=gpus, folder=folder) for job in jobs]
    after = f"# when all have ended, this measures them and writes the tables:\n#   {again}"
    if style == "torchrun":
        return (
            "\n".join(
                [
                    "#!/bin/sh",
                    "# one after the other; each can be stopped and continued by the same command",
                    "set -e",
                    *commands,
                    after,
                ]
            )
            + "\n"
        )
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=dssl",
        f"#SBATCH --array=0-{max(0, len(jobs) - 1)}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --gpus-per-node={gpus}",
        f"#SBATCH --cpus-per-task={8 * gpus}",
        "#SBATCH --time=48:00:00",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        "# a run that is out of time saves itself; the same script continues it",
        "case $SLURM_ARRAY_TASK_ID in",
        *(f"  {number}) set -- {command} ;;" for number, command in enumerate(commands)),
        "esac",
        '"$@" &',
        "run=$!",
        "trap 'kill -TERM $run' TERM",
        "wait $run; code=$?",
        "# the trap ends a wait at once, while the run still saves itself: wait until it has ended",
        "while kill -0 $run 2>/dev/null; do wait $run; code=$?; done",
        "exit $code",
        after,
    ]
    return "\n".join(lines) + "\n"


def _command(job: Job, place: Place, *, gpus: int, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    run = place.runs / job.name
    path = folder / f"{job.name}.json"
    config = place.located(job)
    if job.training is not None:
        spec = spec_of(job, config=config, run=run, result=place.result(job))
        path.write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        words = ["python", "-m", "dssl.reproduce.child", str(path)]
    else:
        path.write_text(json.dumps(config_io.to_dict(config), indent=1) + "\n", encoding="utf-8")
        words = [
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(gpus),
            "-m",
            "dssl",
            "train",
            "--config",
            str(path),
        ]
        words += ["--out", str(run)]
    return shlex.join(words)
