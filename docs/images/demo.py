"""Draw demo.png, the three runs of ``dssl demo``: ``python docs/images/demo.py runs/demo``."""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dssl.report import figures
from dssl.report.figures import COLORS
from dssl.report.run_data import read_run
from dssl.report.run_report import series
from dssl.training.health import COLLAPSED, PARTIAL

RUNS = {"standard": "standard pair", "heavy": "heavy pair", "dssl": "DSSL, the same heavy views"}
BASELINES = {"untrained encoder": 33.1, "raw pixels": 22.5}
"""kNN accuracy that the demo prints beside the runs, seed 0."""


def draw(runs: Path, path: Path) -> None:
    with figures.styled():
        figure = Figure(figsize=(10, 3.7), layout="constrained", facecolor="white")
        accuracy, spread = figure.subplots(1, 2)
        for number, (folder, name) in enumerate(RUNS.items()):
            run = read_run(runs / folder)
            color, _ = series(number)
            accuracy.plot(
                *np.array(run.curve("knn")).T, color=color, linewidth=2.2, marker="o", markersize=4, label=name
            )
            spread.plot(*np.array(run.thinned("spread", 200)).T, color=color, linewidth=2.2)
        for name, value in BASELINES.items():
            accuracy.axhline(value, color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
            accuracy.text(16, value + 1, name, ha="right", fontsize=10, color=COLORS["muted"])
        for level in (PARTIAL, COLLAPSED):
            spread.axhline(level, color=COLORS["bad"], linewidth=1, linestyle=(0, (5, 4)))
        accuracy.set_title("kNN accuracy, %", loc="left", fontsize=13, color=COLORS["ink"])
        spread.set_title("spread of the worst view", loc="left", fontsize=13, color=COLORS["ink"])
        accuracy.set_ylim(0, 90)
        spread.set_ylim(0, 1.1)
        for axes in (accuracy, spread):
            axes.set_xlabel("epoch")
            axes.set_xticks(range(0, 17, 4))
            axes.grid(axis="y", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=3, handlelength=2)
        figure.savefig(path, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(__file__).with_suffix(".png"))
