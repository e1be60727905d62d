"""``dssl reproduce``: a table or figure of the paper, run and compared."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dssl.commands.arguments import check_counts, command_line
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.reproduce.harness import Place, Status
    from dssl.reproduce.plan import Job


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run every cell of a table or figure of the paper, and write it with the paper's numbers beside ours.

    Targets: table1 to table5, figure1 to figure7, their names (main, ablation, magnitudes, byol, delta, view-pairs, coco), their
    LaTeX labels, or all. What is finished is skipped, what was broken off is continued: kill it and start it again as you like.
    """

    target: str  # positional
    """The table or figure, such as table2 or ablation."""
    scale: Literal["cpu", "day", "paper"] = "cpu"
    """cpu: minutes a cell on two cores; day: hours a cell; paper: the paper's settings, for GPUs."""
    seeds: tuple[int, ...] = (0,)
    """One run for each; the table gives mean and deviation."""
    cifar10: Path = Path("data/cifar10")
    """The folder or archive of CIFAR-10; dssl data cifar10 FOLDER fetches it."""
    imagenet: Path | None = None
    """The folder of ImageNet with train and val in it; without it the cells on ImageNet are left out."""
    out: Path = Path("results")
    """The folder for tables and for cells, one small JSON for each finished run: commit it."""
    runs: Path | None = None
    """The folder for the runs themselves with their checkpoints; runs in --out by default."""
    jobs: int | None = None
    """How many runs at a time; one for each GPU, or else one for every two cores by default."""
    plan: bool = False
    """Only say what would be run."""
    emit: Literal["torchrun", "slurm"] | None = None
    """Only print a script for a cluster that runs what is not finished; the same command without --emit then measures it."""
    gpus: int = 8
    """With --emit: GPUs of a node."""


def run(arguments: Arguments) -> int:
    _check(arguments)
    from dssl.report import page
    from dssl.reproduce import draw, table, write
    from dssl.reproduce.harness import Place, finished, run_jobs
    from dssl.reproduce.paper import chosen_targets
    from dssl.reproduce.plan import plan
    from dssl.reproduce.scales import named_scale

    targets, scale = chosen_targets(arguments.target), named_scale(arguments.scale)
    jobs = plan(targets, scale, seeds=arguments.seeds)
    if not jobs:
        notes = " ".join(text for target in targets for text in target.missing)
        raise DsslError(f"{arguments.target} has nothing to run: {notes}")
    folder = arguments.out / scale.name
    data = {} if arguments.imagenet is None else {"imagenet": str(arguments.imagenet)}
    if arguments.cifar10.exists():
        data["cifar10"] = f"cifar10:{arguments.cifar10}"
    runs = folder / "runs" if arguments.runs is None else arguments.runs / scale.name
    place = Place(data=data, runs=runs, cells=folder / "cells")
    done = finished(jobs, place)
    here = [job for job in jobs if job.name in done or job.config.data in data]
    if arguments.plan:
        _show_plan(jobs, place, set(done))
        return 0
    if not here:
        raise DsslError(_no_data(arguments, jobs))
    if arguments.emit is not None:
        from dssl.reproduce.cluster import script

        open_jobs = [job for job in here if job.name not in done]
        configs = folder / "configs"
        again = _command(arguments)
        print(script(open_jobs, place, style=arguments.emit, gpus=arguments.gpus, folder=configs, again=again), end="")
        return 0
    show = _Line()
    ended = run_jobs(here, place, workers=arguments.jobs, say=show.say, show=show.status)
    show.clear()
    outcomes = finished(jobs, place)
    for target in targets:
        made = table.build(target, scale, seeds=arguments.seeds, outcomes=outcomes)
        names = [job.name for job in plan([target], scale, seeds=arguments.seeds)]
        used = [outcomes[name] for name in names if name in outcomes]
        picture = draw.curves(made, table.runs_of(target, scale, seeds=arguments.seeds, outcomes=outcomes))
        if picture is not None:
            page.write(folder / f"{target.name}.png", picture)
        text = write.markdown(made, command=_command(arguments), outcomes=used, drawn=picture is not None)
        page.write(folder / f"{target.name}.md", text)
        page.write(folder / f"{target.name}.json", json.dumps(write.plain(made), indent=1) + "\n")
        print(f"\n{write.terminal(made)}\n\n{folder / f'{target.name}.md'}")
    left_out = len(jobs) - len(here)
    if left_out:
        print(f"{left_out} runs left out: {_no_data(arguments, jobs)}")
    for name, reason in ended.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if ended.signal is not None:
        print("stopped; every run has saved itself, and the same command goes on", file=sys.stderr)
        return 128 + ended.signal
    return 1 if ended.failed else 0


class _Line:
    """One line that is overwritten on a terminal; where nobody watches, only what happened."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = 0

    def say(self, line: str) -> None:
        self.clear()
        print(line, file=sys.stderr, flush=True)

    def status(self, status: "Status") -> None:
        if not self._live:
            return
        import shutil

        line = status_line(status)[: shutil.get_terminal_size().columns - 1]
        print("\r" + line.ljust(self._shown), end="", file=sys.stderr, flush=True)
        self._shown = len(line)

    def clear(self) -> None:
        if self._live and self._shown:
            print("\r" + " " * self._shown + "\r", end="", file=sys.stderr, flush=True)
            self._shown = 0


def status_line(status: "Status") -> str:
    """``3/9 done, 41 min left | simsiam-dssl-seed0 52 %, healthy, kNN 38.1 %``."""
    left = "" if status.seconds_left is None else f", {_duration(status.seconds_left)} left"
    parts = [f"{status.done}/{status.total} done{left}"]
    for one in status.running:
        share = f"{one.step / one.total:.0%}" if one.total else "starts"
        parts.append(f"{one.name} {share}{', ' if one.words else ''}{one.words}")
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _show_plan(jobs: "list[Job]", place: "Place", done: set[str]) -> None:
    wide = max(len(job.name) for job in jobs)
    for job in jobs:
        state = "finished" if job.name in done else "to run"
        if job.name not in done:
            if job.config.data not in place.data:
                state = f"left out: no {job.config.data}"
            elif (place.runs / job.name / "config.json").is_file():
                state = "to continue"
        print(f"{job.name:<{wide}}  {state}")


def _no_data(arguments: Arguments, jobs: "list[Job]") -> str:
    wanted = {job.config.data for job in jobs}
    words = []
    if "cifar10" in wanted and not arguments.cifar10.exists():
        words.append(
            f"no CIFAR-10 in {arguments.cifar10} (fetch it: dssl data cifar10 {arguments.cifar10}, or give --cifar10)"
        )
    if "imagenet" in wanted and arguments.imagenet is None:
        words.append("no ImageNet (give --imagenet FOLDER, with train and val in it)")
    return "; ".join(words)


def _check(arguments: Arguments) -> None:
    if not arguments.seeds or len(set(arguments.seeds)) != len(arguments.seeds):
        raise DsslError(
            f"--seeds is {' '.join(map(str, arguments.seeds)) or 'empty'}: expected different numbers, such as 0 1"
        )
    check_counts(arguments, ("jobs", "gpus"))
    if arguments.imagenet is not None and not arguments.imagenet.is_dir():
        raise DsslError(f"--imagenet is {arguments.imagenet}: no such folder; expected one with train and val in it")


def _command(arguments: Arguments) -> str:
    """The command that makes the tables again; where images and results are is up to whoever runs it."""
    default = Path("data/cifar10")
    told = dataclasses.replace(
        arguments,
        cifar10=default if arguments.cifar10 == default else Path("FOLDER"),
        imagenet=None if arguments.imagenet is None else Path("FOLDER"),
    )
    here = ("out", "runs", "jobs", "plan", "emit", "gpus")
    return command_line("reproduce", told, always=("scale",), leave_out=here)
