"""Three kinds of picture: bars side by side, points on log-log axes with their exponent, and curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, PEER, MARK = "#1a7f5a", "#9aa5b1", "#b5541c"
Row = Mapping[str, Any]


def bars(groups: Mapping[str, Sequence[Row]], path: Path, *, label: str, digits: int = 0, columns: int = 1) -> None:
    """One panel for each group; a row has a name, a ``rate`` (summary) and a ``ratio`` to the panel's baseline."""
    lines = -(-len(groups) // columns)
    names = list(groups)
    heights = [max(len(groups[name]) for name in names[line * columns : (line + 1) * columns]) for line in range(lines)]
    figure, axes = plt.subplots(
        lines, columns, figsize=(8 * columns, 1.1 + 0.36 * sum(heights) + 0.6 * lines), height_ratios=heights,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        shown = list(groups[name])[::-1]
        values = [row["rate"]["median"] for row in shown]
        error = np.abs([[row["rate"][end] - row["rate"]["median"] for row in shown] for end in ("low", "high")])
        colours = [OURS if row["name"].startswith("dssl") else PEER for row in shown]
        drawn = axis.barh([row["name"] for row in shown], values, color=colours, xerr=error, ecolor="#444", capsize=2)
        texts = [f"  {value:,.{digits}f}  ({row['ratio']:.1f}x)" for value, row in zip(values, shown, strict=True)]
        axis.bar_label(drawn, texts, fontsize=8)
        axis.set_title(name, loc="left", fontsize=10)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The power b of y = a x^b that fits best on log-log axes."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def growth(panels: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Log-log panels: ``x`` (a label), ``y`` (a label) and ``curves`` {name: (xs, ys)}; the legend has the exponents."""
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.2 * columns, 4.0 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    palette = (OURS, MARK, "#3b6ea5", PEER, "#7a4fa0")
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        for colour, (name, (xs, ys)) in zip(palette, panel["curves"].items(), strict=False):
            power = f", exponent {exponent(xs, ys):.2f}" if len(xs) > 1 else ""
            axis.loglog(xs, ys, "o-", color=colour, label=f"{name}{power}", markersize=4)
        ys = [value for _, values in panel["curves"].values() for value in values]
        # at least a decade, so that what is nearly flat looks flat
        middle, half = np.sqrt(min(ys) * max(ys)), max(np.sqrt(10), 1.3 * np.sqrt(max(ys) / min(ys)))
        axis.set_ylim(middle / half, middle * half)
        if half < 30:
            marks = [
                m * 10.0**power
                for power in range(-6, 8)
                for m in (1, 2, 5)
                if 1 / half < m * 10.0**power / middle < half
            ]
            axis.set_yticks(marks, [f"{mark:,g}" for mark in marks])
        ticks = sorted({value for xs, _ in panel["curves"].values() for value in xs})
        axis.set_xticks(ticks, [f"{value:,}" for value in ticks], fontsize=7, rotation=30)
        axis.minorticks_off()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(panel["x"], fontsize=8)
        axis.set_ylabel(panel["y"], fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path, *, x: str, y: str) -> None:
    """Plain curves; ours are green."""
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    styles = iter(("-", "--", ":", "-."))
    for name, (xs, ys) in lines.items():
        ours = name.startswith("dssl")
        axis.plot(xs, ys, next(styles, "-"), marker="o", markersize=3, color=OURS if ours else MARK, label=name)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
