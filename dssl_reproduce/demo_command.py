"""``dssl demo``: the point in about four minutes, on built-in images and two CPU cores."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dssl.commands.arguments import command_line


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train SimSiam three times on built-in images (standard pair, heavy pair, DSSL) and show what happens to each.

    Rerunning the command resumes an interrupted run and shows the finished ones.
    """

    out: Path = Path("runs/demo")
    """The folder for the three runs and the report."""
    seed: int = 0
    """Determines the first weights, the order of the images and their views."""


def run(arguments: Arguments) -> int:
    begun = time.perf_counter()
    import torch

    from dssl.files import write_text
    from dssl.log import show_messages
    from dssl.report import run_report
    from dssl.report.map import embedding_maps
    from dssl.report.pictures import draw_gallery
    from dssl.report.run_data import read_run
    from dssl.training.pretrain import train
    from dssl_reproduce import demo

    show_messages()
    print("measuring raw pixels and the untrained encoder", file=sys.stderr, flush=True)
    config = demo.settings("standard", seed=arguments.seed)
    untrained = demo.untrained_accuracies(config)
    # for so small a network a second thread gains little on idle cores and loses much on busy ones
    torch.set_num_threads(1)
    runs = []
    for number, (name, graph) in enumerate(demo.RUNS.items(), 1):
        print(f"\n{number} of {len(demo.RUNS)}: SimSiam, {name}", file=sys.stderr, flush=True)
        folder = arguments.out / graph
        with demo.busy_machine_noticed(lambda line: print(line, file=sys.stderr, flush=True)):
            ended = train(demo.settings(graph, seed=arguments.seed), folder, gallery=draw_gallery)
        if ended.signal is not None:
            return ended.exit_code
        runs.append(read_run(folder, name=name))
    found = demo.sentences({run.name: demo.DemoRun.of(run) for run in runs}, untrained)
    maps, classes, notes = embedding_maps(runs, images=600)
    path = arguments.out / "report.html"
    title = "SimSiam on figures: standard pair, heavy pair, DSSL"
    write_text(
        path,
        run_report.html(
            runs,
            command=command_line("demo", arguments),
            maps=maps,
            classes=classes,
            notes=notes,
            sentences=found,
            title=title,
        ),
    )
    print(f"\n{run_report.summary(runs)}")
    print(*(f"{name}: kNN {value:.1f} %" for name, value in untrained.items()), "", sep="\n")
    for sentence in found:
        print(f"- {sentence}")
    print(f"\nreport: {path}\n{time.perf_counter() - begun:.0f} s")
    return 0
