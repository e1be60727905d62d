"""Figures of runs: curves side by side, and maps of what the encoders make of the test images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dssl.report import figures
from dssl.report.figures import COLORS, SERIES, Plot
from dssl.report.run_data import Curve, RunData
from dssl.train.health import COLLAPSED, PARTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS: tuple[tuple[Curve, str], ...] = (
    ("knn", "kNN accuracy, %"),
    ("loss", "loss"),
    ("spread", "spread of the worst view"),
    ("rank", "effective rank of the worst view, %"),
)
_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMap:
    """Test images of one run in the plane of the two main axes of their features."""

    run: str
    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    variance: float
    """The share of the features' variance that the plane shows."""


def series(number: int) -> tuple[str, str]:
    """Colour and line style of a run by its place on the page; both together tell 24 runs apart."""
    return SERIES[number % len(SERIES)], _STYLES[number // len(SERIES) % len(_STYLES)]


def curves(runs: Sequence[RunData]) -> Plot:
    """kNN accuracy, loss, spread and effective rank by epoch, a line for each run."""
    from matplotlib.figure import Figure

    with figures.styled():
        figure = Figure(figsize=(14.5, 8.6 + 0.28 * ((len(runs) + 2) // 3)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.14, w_pad=0.14)  # type: ignore[union-attr, call-arg]
        grid = figure.subplots(2, 2, sharex=True)
        for axes, (name, title) in zip(grid.flat, _PANELS, strict=True):
            _panel(axes, name, title, runs)
        for axes in grid[1]:
            axes.set_xlabel("epoch")
        looks = [series(number) for number in range(len(runs))]
        handles = [grid[0, 0].plot([], [], color=color, linestyle=style, linewidth=2.2)[0] for color, style in looks]
        labels = [figures.label(_short(run.name)) for run in runs]
        figure.legend(handles, labels, loc="outside upper left", ncols=min(3, len(runs)), fontsize=13, handlelength=2.2)
        description = "kNN accuracy, loss, spread and effective rank of each run by epoch"
        svg = figures.to_svg(figure, name="curves", description=description)
    caption = (
        "Each line is a run. Spread is 1 when the embeddings fill the sphere and 0 when they are one point; the effective rank "
        "is the share of dimensions that they use. Of a run's views the worst counts. Below the dashed lines a view is partly "
        f"({PARTIAL:g}) and wholly ({COLLAPSED:g}) collapsed."
    )
    return Plot(svg=svg, description=description, caption=caption)


def maps(found: Sequence[EmbeddingMap], *, classes: Sequence[str], images: int) -> Plot:
    """The maps side by side on one scale, so that a collapsed embedding is seen to be small."""
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    reach = max(1e-6, max(float(np.quantile(np.abs(one.points), 0.995)) for one in found)) * 1.06
    shown = list(classes[: len(SERIES)])
    with figures.styled():
        figure = Figure(figsize=(14.5, 0.5 + 14.2 / 3 * rows), layout="constrained")
        grid = figure.subplots(rows, 3, squeeze=False)
        for axes in grid.flat:
            axes.axis("off")
        for one, axes in zip(found, grid.flat, strict=False):
            axes.axis("on")
            # classes beyond the palette are drawn first, in gray
            for label in sorted(set(one.labels.tolist()), key=lambda label: label < len(SERIES)):
                members = one.points[one.labels == label]
                color, alpha = (SERIES[label], 0.9) if label < len(SERIES) else (COLORS["muted"], 0.3)
                axes.plot(
                    members[:, 0], members[:, 1], "o", color=color, alpha=alpha, markersize=4.6, markeredgewidth=0
                )
            axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
            axes.set_title(figures.label(_short(one.run)), fontsize=13, color=COLORS["ink"], loc="left", pad=10)
            axes.set_xlabel(f"the plane shows {one.variance:.0%} of the variance", fontsize=12)
            for side in ("top", "right"):
                axes.spines[side].set_visible(True)
        dots = [grid[0, 0].plot([], [], "o", color=SERIES[number])[0] for number in range(len(shown))]
        names = [figures.label(name) for name in shown]
        if len(classes) > len(shown):
            dots.append(grid[0, 0].plot([], [], "o", color=COLORS["muted"], alpha=0.3)[0])
            names.append(f"{len(classes) - len(shown)} other classes")
        figure.legend(dots, names, loc="outside upper left", ncols=min(7, len(dots)), fontsize=12, handletextpad=0.1)
        description = "Test images of each run in the plane of the two main axes of their features"
        svg = figures.to_svg(figure, name="maps", description=description)
    caption = (
        f"{images} test images: the encoder's features, normalised and centred, along their two main axes (PCA). "
        "All maps have one scale. Colour is the class, which the training never saw."
    )
    return Plot(svg=svg, description=description, caption=caption)


def _panel(axes: "Axes", name: Curve, title: str, runs: Sequence[RunData]) -> None:
    axes.set_title(title, loc="left", fontsize=14, color=COLORS["ink"], pad=12)
    empty = True
    for number, run in enumerate(runs):
        points = run.curve(name) if name == "knn" else run.thinned(name, 400)
        if not points:
            continue
        empty = False
        epochs, values = np.array(points).T
        color, style = series(number)
        (line,) = axes.plot(
            epochs, 100 * values if name == "rank" else values, color=color, linestyle=style, linewidth=2
        )
        if name == "knn":
            line.set(marker="o", markersize=4.5)
    if name == "spread":
        axes.set_ylim(0, 1.1)
        for level in (PARTIAL, COLLAPSED):
            axes.axhline(level, color=COLORS["bad"], linewidth=1, linestyle=(0, (5, 4)), zorder=1)
    if name == "rank":
        axes.set_ylim(0, None)
    if empty:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=COLORS["muted"])
        axes.set_yticks([])
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=True)


def _short(name: str, *, longest: int = 44) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"
