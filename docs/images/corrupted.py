"""Draw corrupted.png, photos under corruption and what it costs: ``python docs/images/corrupted.py PHOTO PHOTO``.

The accuracies are those of docs/results/robust.json.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import robust
from dssl.augment import corrupt_images
from dssl.data.loader import centre_crop
from dssl.report import page
from dssl.report.page import COLORS

KINDS = {
    "shot": "shot noise",
    "impulse": "impulse noise",
    "motion": "motion blur",
    "fog": "fog",
    "pixelate": "pixelated",
}
SIZE, SEVERITY = 160, 3


def draw(paths: list[Path]) -> Figure:
    photos = np.stack([centre_crop(np.asarray(Image.open(path).convert("RGB")), size=SIZE) for path in paths])
    shown = {"clean": photos}
    for kind in KINDS:
        shown[kind] = corrupt_images(photos, kind, SEVERITY, seed=0, indices=np.arange(len(photos)), threads=1)
    figure = Figure(figsize=(11, 0.7 + 1.25 * len(paths)), layout="constrained", facecolor=COLORS["surface"])
    parts = figure.subfigures(1, 2, width_ratios=[6, 2.6])
    grid = parts[0].subplots(len(paths), len(shown), squeeze=False)
    for column, (kind, images) in enumerate(shown.items()):
        grid[0, column].set_title(KINDS.get(kind, kind), fontsize=10, color=COLORS["ink"])
        for row, image in enumerate(images):
            grid[row, column].imshow(image)
            grid[row, column].set_axis_off()
    _bars(parts[1].subplots())
    return figure


def _bars(axes: Any) -> None:
    """Linear accuracy of the start and of ``dssl train robust``, clean and under the ten kinds that training has not seen."""
    runs = robust.kept()
    names = {"start": "ImageNet weights", "directed": "after dssl train robust"}
    for number, (arm, label) in enumerate(names.items()):
        found = [run for name, run in runs.items() if name.startswith(f"photos-{arm}-")]
        means = np.mean([robust.scores(run, "linear probe").mean(axis=0) for run in found], axis=0)[[0, 2]]
        color = COLORS["muted"] if arm == "start" else COLORS["good"]
        bars = axes.bar(np.arange(2) + 0.4 * number, means, width=0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=2, color=COLORS["ink"])
    axes.set_xticks(np.arange(2) + 0.2, ["clean", "10 kinds\nnot seen"])
    axes.set_ylim(0, 108)
    axes.set_ylabel("linear accuracy, %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    with page.styled():
        draw([Path(path) for path in sys.argv[1:]]).savefig(Path(__file__).with_suffix(".png"), dpi=90)
