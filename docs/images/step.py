"""Draw step.png, where a regulariser and a predictor for each kind of view take part: ``python docs/images/step.py``."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

STANDARD, HEAVY, INK, SHARED = "#2f6db3", "#c2571a", "#222222", "#5b6b7f"
ROWS = {"s": 0.0, "h": -1.5}


def box(axes: Axes, x: float, y: float, text: str, color: str, *, height: float = 0.62) -> None:
    frame = FancyBboxPatch(
        (x - 0.75, y - height / 2), 1.5, height, boxstyle="round,pad=0.06", facecolor="white", edgecolor=color, lw=1.8
    )
    axes.add_patch(frame)
    axes.text(x, y, text, ha="center", va="center", fontsize=11, color=color)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=color, linewidth=1.6))


def draw(path: Path) -> None:
    figure = Figure(figsize=(10.4, 2.64), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1.0, 12.6), ylim=(-2.3, 1.15))
    axes.axis("off")
    for x, name in ((2.4, "encoder"), (4.9, "projector")):
        box(axes, x, -0.75, name, SHARED, height=2.1)
    for row, color, view, predictor in (
        ("s", STANDARD, "standard\nview s1", "predictor"),
        ("h", HEAVY, "heavy\nview h1", "heavy\npredictor"),
    ):
        y = ROWS[row]
        axes.text(-0.1, y, view, ha="center", va="center", fontsize=11, color=color)
        box(axes, 7.4, y, predictor, color)
        for start, end in ((0.6, 1.5), (3.3, 4.0), (5.8, 6.5), (8.3, 9.2)):
            arrow(axes, (start, y), (end, y), color)
        what = f"edges of {row}1, and\nits regulariser or guard"
        axes.text(9.35, y, what, va="center", fontsize=11, color=color)
    axes.text(7.4, 0.72, "one for each kind of view", ha="center", fontsize=10, color=INK, style="italic")
    axes.text(10.75, 0.72, "a loss for each view", ha="center", fontsize=10, color=INK, style="italic")
    axes.text(3.65, 0.72, "shared by all views", ha="center", fontsize=10, color=INK, style="italic")
    figure.savefig(path, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
