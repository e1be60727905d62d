"""``dssl demo``: the point in about four minutes, on built-in images and two CPU cores."""

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dssl.commands.arguments import command_line


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train SimSiam three times on built-in images (standard pair, heavy pair, DSSL) and show what happens to each.

    The same command again continues what was broken off, and shows what is finished.
    """

    out: Path = Path("runs/demo")
    """The folder for the three runs and the report."""
    seed: int = 0


def run(arguments: Arguments) -> int:
    begun = time.perf_counter()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("dssl").setLevel(logging.INFO)
    from dssl.report import page, run_report
    from dssl.report.map import embedding_maps
    from dssl.report.pictures import draw_gallery
    from dssl.report.run_data import read_run
    from dssl.reproduce import demo
    from dssl.train.pretrain import train

    runs = []
    for number, (name, graph) in enumerate(demo.RUNS.items(), 1):
        print(f"\n{number} of {len(demo.RUNS)}: SimSiam, {name}", file=sys.stderr, flush=True)
        folder = arguments.out / graph
        ended = train(demo.settings(graph, seed=arguments.seed), folder, gallery=draw_gallery)
        if ended.signal is not None:
            return ended.exit_code
        runs.append(read_run(folder, name=name))
    found = demo.sentences({run.name: demo.Ended.of(run) for run in runs})
    maps, classes, notes = embedding_maps(runs, images=600)
    path = arguments.out / "report.html"
    title = "SimSiam on shapes: standard pair, heavy pair, DSSL"
    page.write(
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
    print(f"\n{run_report.summary(runs)}\n")
    for sentence in found:
        print(f"- {sentence}")
    print(f"\nreport: {path}\n{time.perf_counter() - begun:.0f} s")
    return 0
