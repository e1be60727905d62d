"""Draw layers.png, the layers of the program: ``python docs/images/layers.py``. A test compares its names with the real ones."""

from pathlib import Path

LAYERS = (
    ("version errors types rng text files plugins", "No torch. One way to replace a file, one way to draw a number."),
    ("graph", "Views and edges, their text form, the paper's graphs."),
    ("augment data", "Policies and kernels on uint8; sources, decoding, the loader."),
    ("distributed", "The processes of a run, and what they exchange."),
    ("models methods objective", "Encoder, method and graph become a loss."),
    ("config config_io recipes", "Settings: read strictly, built once."),
    ("precision optim weights", "Arithmetic, optimisers, checkpoints, weights from elsewhere."),
    ("run state trackers log loop", "The run's folder, and the one training loop."),
    ("evaluation training", "What is trained and measured on that loop."),
    ("report", "Pages and pictures."),
    ("commands cli api integrations testing", "Commands, the same as functions, and a kit for other loops."),
)


def draw(path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrow, FancyBboxPatch

    figure = Figure(figsize=(8.6, 6.6), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 86), ylim=(66, 0))
    axes.axis("off")
    for number, (packages, about) in enumerate(LAYERS):
        top = 1.6 + 5.75 * number
        color = ("#eaf1fa", "#d8e5f4")[number % 2]
        axes.add_patch(FancyBboxPatch((8, top), 76, 4.6, boxstyle="round,pad=0.3", facecolor=color, edgecolor="none"))
        axes.text(9, top + 1.4, "   ".join(packages.split()), va="center", fontsize=12, weight="bold", color="#14304f")
        axes.text(9, top + 3.6, about, va="center", fontsize=10.5, color="#3d4a5c")
    head = {"head_width": 1.6, "head_length": 2, "length_includes_head": True}
    axes.add_patch(FancyArrow(5, 64.5, 0, -62.5, width=0.25, color="#5b6b7f", **head))
    axes.text(2.7, 33, "imports point up", rotation=90, va="center", ha="center", fontsize=11, color="#3d4a5c")
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
