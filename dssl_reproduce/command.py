"""``dssl reproduce``: a table or figure of the paper, run and compared."""

import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dssl.commands.arguments import check_counts, command_line
from dssl.commands.options import Usage
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl_reproduce.outcome import Place
    from dssl_reproduce.scales import Job
    from dssl_reproduce.table import ResultTable


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run every entry of a table or figure of the paper, and write it with the paper's numbers next to ours.

    Targets: table1 to table5, figure1 to figure7, their names (main, ablation, magnitudes, byol, delta, view-pairs, coco), their
    LaTeX labels, or all; and four tables that are not in the paper: beyond (each of our additions alone), steps (the gain of
    DSSL at equal compute against the number of steps), robustness (accuracy under corruption at equal compute) and methods (nine
    methods, each with several graphs).

    You may stop it at any time: the same command skips finished runs and resumes interrupted ones. dssl data cifar10 FOLDER
    downloads CIFAR-10.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"target": "TARGET"},
        examples=(
            "dssl reproduce table2 --plan",
            "dssl reproduce table2 --scale hour --seeds 0 1 2",
            "dssl reproduce ablation --part 1/4 --out shared/results",
        ),
    )

    target: str
    """The table or figure, such as table2 or ablation."""
    scale: Literal["cpu", "cpu-few", "cpu-1000", "hour", "hour-few", "paper"] = "cpu"
    """cpu: minutes per run on two cores; hour: up to an hour; -few and -1000: on 5,000 and 1,000 images; paper: the paper's."""
    seeds: tuple[int, ...] = (0,)
    """One run per seed; the table gives mean and standard deviation."""
    rows: tuple[str, ...] = ()
    """Run only these rows of the table, such as "w/ DSSL"; all by default."""
    part: str = "1/1"
    """Run only the I-th of N parts of the runs, such as 2/4: give each machine its own part and the same --out."""
    cifar10: Path = Path("data/cifar10")
    """The folder or archive of CIFAR-10; dssl data cifar10 FOLDER makes one from the official archive."""
    imagenet: Path | None = None
    """The folder of ImageNet that contains train and val; without it the runs on ImageNet are skipped."""
    out: Path = Path("results")
    """The folder for tables and, in cells, one small JSON file per finished run: commit it."""
    runs: Path | None = None
    """The folder for the runs themselves with their checkpoints; runs inside --out by default."""
    jobs: int | None = None
    """Runs at a time; by default one per GPU, or one per two cores."""
    plan: bool = False
    """Only list what would be run."""
    emit: bool = False
    """Only print a torchrun command for each unfinished pretraining run. Afterwards, the same command without --emit runs and
    measures the rest."""
    gpus: int = 8
    """With --emit: GPUs per run."""

    def __post_init__(self) -> None:
        check_counts(self, "jobs", "gpus")


def run(arguments: Arguments) -> int:
    number, parts = _check(arguments)
    from dssl_reproduce import chosen_targets
    from dssl_reproduce.harness import pretraining_commands, run_jobs
    from dssl_reproduce.outcome import Place, finished
    from dssl_reproduce.scales import SCALES, jobs_of
    from dssl_reproduce.table import build

    targets, scale = chosen_targets(arguments.target), SCALES[arguments.scale]
    jobs = jobs_of(targets, scale, seeds=arguments.seeds, rows=arguments.rows)
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
    mine = jobs[number - 1 :: parts]
    here = [job for job in mine if job.name in done or job.config.data in data]
    if arguments.plan:
        _show_plan(mine, place, set(done))
        return 0
    if not here:
        raise DsslError(_no_data(arguments, mine) or f"--part {arguments.part}: there are only {len(jobs)} runs")
    if arguments.emit:
        missing = [job for job in here if job.name not in done]
        print(*pretraining_commands(missing, place, gpus=arguments.gpus, folder=folder / "configs"), sep="\n")
        return 0
    ended = run_jobs(here, place, workers=arguments.jobs, say=lambda line: print(line, file=sys.stderr, flush=True))
    outcomes = finished(jobs_of(targets, scale, seeds=arguments.seeds), place)
    for target in targets:
        made = build(target, scale, seeds=arguments.seeds, outcomes=outcomes)
        _write_table(made, folder, _command(arguments))
    if skipped := len(mine) - len(here):
        print(f"{skipped} runs skipped: {_no_data(arguments, mine)}")
    for name, reason in ended.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if ended.signal is not None:
        print("stopped; every run has saved itself, and the same command resumes them", file=sys.stderr)
        return 128 + ended.signal
    return 1 if ended.failed else 0


def _write_table(made: "ResultTable", folder: Path, command: str) -> None:
    from dssl.files import write_atomically, write_text
    from dssl_reproduce import table

    path = folder / f"{made.target.name}.md"
    if (picture := table.picture(made)) is not None:
        write_atomically(path.with_suffix(".png"), [picture])
    document = table.document(made, command=command, drawn=picture is not None)
    write_text(path, document)
    write_text(path.with_suffix(".json"), json.dumps(table.plain(made), indent=1) + "\n")
    print(f"\n{document.partition('## What to know')[0]}{path}")


def _show_plan(jobs: "list[Job]", place: "Place", done: set[str]) -> None:
    from dssl.run import RunFolder
    from dssl.text import columns

    def state(job: "Job") -> str:
        if job.name in done:
            return "finished"
        if job.config.data not in place.data:
            return f"skipped: no {job.config.data}"
        return "to resume" if RunFolder(place.runs / job.name).has_run else "to run"

    print(*columns([(job.name, state(job)) for job in jobs]), sep="\n")


def _no_data(arguments: Arguments, jobs: "list[Job]") -> str:
    wanted = {job.config.data for job in jobs}
    words, folder = [], arguments.cifar10
    if "cifar10" in wanted and not folder.exists():
        words.append(f"no CIFAR-10 in {folder} (get it: dssl data cifar10 {folder}; or give --cifar10 FOLDER)")
    if "imagenet" in wanted and arguments.imagenet is None:
        words.append("no ImageNet (give --imagenet FOLDER, which contains train and val)")
    return "; ".join(words)


def _check(arguments: Arguments) -> tuple[int, int]:
    """Mistakes are found before anything is imported; gives the part and the number of parts."""
    if not arguments.seeds or len(set(arguments.seeds)) != len(arguments.seeds):
        given = " ".join(map(str, arguments.seeds)) or "empty"
        raise DsslError(f"--seeds is {given}: expected distinct numbers, such as 0 1")
    if (imagenet := arguments.imagenet) is not None and not imagenet.is_dir():
        raise DsslError(f"--imagenet is {imagenet}, which is not a folder: expected one that contains train and val")
    if not (match := re.fullmatch(r"(\d+)/(\d+)", arguments.part)) or not 1 <= int(match[1]) <= int(match[2]):
        raise DsslError(f"--part is {arguments.part!r}: expected I/N with I from 1 to N, such as 2/4")
    return int(match[1]), int(match[2])


def _command(arguments: Arguments) -> str:
    """The command that makes the tables again; where images and results are is up to whoever runs it."""
    cifar10 = arguments.cifar10 if arguments.cifar10 == Arguments.cifar10 else Path("FOLDER")
    named = dataclasses.replace(arguments, cifar10=cifar10, imagenet=arguments.imagenet and Path("FOLDER"))
    here = ("rows", "part", "out", "runs", "jobs", "plan", "emit", "gpus")
    return command_line("reproduce", named, always=("scale",), leave_out=here)
