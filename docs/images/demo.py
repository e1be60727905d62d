"""Draw demo.png from docs/results/demo.json: ``python docs/images/demo.py``.

With the folders of ``dssl demo --seed N --out FOLDER`` for N = 0, 1, ... it measures them first and writes that file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dssl.report import page
from dssl.report.page import COLORS
from dssl.report.run_report import read_run, series
from dssl.training.health import COLLAPSED, PARTIAL
from dssl_reproduce import demo

RESULTS = Path(__file__).parents[1] / "results" / "demo.json"
ABOUT = (
    "dssl demo --seed N: SimSiam on figures:5000 at 16 px, 16 epochs, fp32; kNN accuracy in %, k = 200, 5,000 training and "
    "2,000 test images, clean and tilted by 15 degrees; curves are (epoch, value) of kNN accuracy and of the worst view's spread"
)


def measure(folders: list[Path]) -> None:
    seeds = []
    for seed, folder in enumerate(folders):
        rows: dict[str, dict[str, Any]] = {
            name: {"clean": round(clean, 2), "tilted": round(tilted, 2)}
            for name, clean, tilted in demo.accuracies(folder, seed=seed)
        }
        for name, graph in demo.RUNS.items():
            run = read_run(folder / graph)
            rows[name] |= {"verdict": run.verdict.status, "steps": run.steps}
            if seed == 0:  # the one that is drawn
                rows[name]["curves"] = {
                    "knn": [(round(x, 2), round(y, 2)) for x, y in run.curve("knn")],
                    "spread": [(round(x, 2), round(y, 3)) for x, y in run.thinned("spread", 80)],
                }
        seeds.append({"seed": seed, "rows": rows})
    RESULTS.write_text(json.dumps({"about": ABOUT, "seeds": seeds}) + "\n")


def draw(path: Path) -> None:
    rows = json.loads(RESULTS.read_text())["seeds"][0]["rows"]
    with page.styled():
        figure = Figure(figsize=(10, 3.7), layout="constrained", facecolor="white")
        accuracy, spread = figure.subplots(1, 2)
        for number, name in enumerate(demo.RUNS):
            color, _ = series(number)
            curves = {key: np.array(points).T for key, points in rows[name]["curves"].items()}
            label = "DSSL, the same heavy views" if name == "DSSL" else name
            accuracy.plot(*curves["knn"], color=color, linewidth=2.2, marker="o", markersize=4, label=label)
            spread.plot(*curves["spread"], color=color, linewidth=2.2)
        for name in ("untrained encoder", "raw pixels"):
            accuracy.axhline(rows[name]["clean"], color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
            accuracy.text(16, rows[name]["clean"] + 1, name, ha="right", fontsize=10, color=COLORS["muted"])
        for level in (PARTIAL, COLLAPSED):
            spread.axhline(level, color=COLORS["bad"], linewidth=1, linestyle=(0, (5, 4)))
        accuracy.set_title("kNN accuracy, %", loc="left", fontsize=13, color=COLORS["ink"])
        spread.set_title("spread of the worst view", loc="left", fontsize=13, color=COLORS["ink"])
        accuracy.set_ylim(0, 100)
        spread.set_ylim(0, 1.1)
        for axes in (accuracy, spread):
            axes.set_xlabel("epoch")
            axes.set_xticks(range(0, 17, 4))
            axes.grid(axis="y", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=3, handlelength=2)
        figure.savefig(path, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure([Path(word) for word in sys.argv[1:]])
    draw(Path(__file__).with_suffix(".png"))
