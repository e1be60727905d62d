"""The page of ``dssl report``: runs side by side, with curves, verdicts, what differs between them, views and maps."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from dssl import config_io
from dssl.files import printable
from dssl.report import figures, page
from dssl.report.figures import COLORS, SERIES, Plot
from dssl.report.map import EmbeddingMap
from dssl.report.page import Colour
from dssl.report.pictures import Picture, embedded
from dssl.report.run_data import Curve, RunData
from dssl.run import RunFolder
from dssl.text import columns
from dssl.training.health import COLLAPSED, PARTIAL

if TYPE_CHECKING:
    from matplotlib.layout_engine import LayoutEngine

_VERDICTS: dict[str, tuple[Colour, str]] = {
    "healthy": ("good", "The embeddings of every view keep their spread and their rank."),
    "too early": ("neutral", "Too few steps for a verdict: embeddings vary a lot at first."),
    "partial collapse": ("warn", "The embeddings of at least one view lost most of their spread or their rank."),
    "collapsed": ("bad", "The embeddings of at least one view shrank to nearly a point."),
    "diverged": ("bad", "The loss is no longer a number."),
    "below where it started": ("bad", "The encoder is worse than the weights that it started from."),
}
_PANELS: tuple[tuple[Curve, str], ...] = (
    ("knn", "kNN accuracy, %"),
    ("loss", "loss"),
    ("spread", "spread of the worst view"),
    ("rank", "effective rank of the worst view, %"),
)
_START_PANELS: tuple[tuple[str, str], ...] = (
    ("kNN", "kNN accuracy on held-out training images, %"),
    ("probe", "linear probe on held-out training images, %"),
    ("drift", "drift of the features from the start"),
    ("feature_rank", "effective rank of the features"),
)
_STYLES = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}
"""Matplotlib's line styles, and the dashes of the same look in SVG."""


def html(
    runs: Sequence[RunData],
    *,
    command: str,
    tables: Sequence[Mapping[str, object]] = (),
    maps: Sequence[EmbeddingMap] = (),
    classes: Sequence[str] = (),
    notes: Sequence[str] = (),
    sentences: Sequence[str] = (),
    title: str | None = None,
) -> str:
    """The whole page; ``command`` makes it again, ``sentences`` are its introduction."""
    data = sorted({f"{run.config.data}, {run.images:,} images" for run in runs})
    context = {
        "facts": [("data", "; ".join(data)), ("encoder", ", ".join(sorted({run.config.encoder for run in runs})))],
        "sentences": [sentence.replace(" %", "\N{NO-BREAK SPACE}%") for sentence in sentences],
        "cards": [(run, _swatch(number), _statement(run)) for number, run in enumerate(runs)],
        "colours": {verdict: colour for verdict, (colour, _) in _VERDICTS.items()},
        "notes": notes,
        "curves": curves_plot(runs),
        "starts": start_plot(runs) if any(run.starts for run in runs) else None,
        "tables": tables,
        "differences": differences(runs),
        "sheets": _sheets(runs),
        "maps": maps_plot(maps, classes=classes) if maps else None,
        "command": command,
    }
    title = title or (f"Report of {len(runs)} runs" if len(runs) != 1 else f"Report of {runs[0].name}")
    return page.render("run_report.html", title=title, context=context)


def summary(runs: Sequence[RunData]) -> str:
    """The table of the runs for a terminal."""
    rows = [("run", "kNN", "spread", "rank", "verdict")]
    for run in runs:
        knn = "–" if run.knn is None else f"{run.knn:.1f} %"
        spread = "–" if run.spread is None else f"{run.spread:.2f}"
        rank = "–" if run.rank is None else f"{100 * run.rank:.0f} %"
        partly = "" if run.finished else f" ({run.steps:,} of {run.total:,} steps)"
        rows.append((printable(run.name), knn, spread, rank, run.verdict.status + partly))
    return "\n".join(columns(rows, align="<>>>"))


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the value of each run; those that change no result are left out."""
    flat = [config_io.flat(config_io.to_dict(run.config)) for run in runs]
    found = []
    for key in dict.fromkeys(key for values in flat for key in values):
        values = ["–" if one.get(key) is None else str(one[key]) for one in flat]
        if len(set(values)) > 1 and not config_io.is_harmless(key, runs[0].config):
            found.append((key, values))
    return found


def series(number: int) -> tuple[str, str]:
    """Colour and line style of a run by its position on the page; together they distinguish 24 runs."""
    return SERIES[number % len(SERIES)], list(_STYLES)[number // len(SERIES) % len(_STYLES)]


def _roomy() -> "LayoutEngine":
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.14)


def curves_plot(runs: Sequence[RunData]) -> Plot:
    """kNN accuracy, loss, spread and effective rank by epoch, a line for each run."""
    description = "kNN accuracy, loss, spread and effective rank of each run by epoch"
    caption = (
        "Each line is a run. Spread is 1 when the embeddings fill the sphere and 0 when they are one point; the effective "
        "rank is the share of dimensions that they use. The worst view of a run counts. Below the dashed lines a view has "
        f"partially ({PARTIAL:g}) and fully ({COLLAPSED:g}) collapsed."
    )
    if any(run.starts and run.curve("knn") for run in runs):
        caption += " In the curve of kNN a dashed line is the start of its run."
    points = {name: [_points(run, name) for run in runs] for name, _ in _PANELS}
    started = [bool(run.starts and knn and knn[0][0] == 0) for run, knn in zip(runs, points["knn"], strict=True)]
    panels = [
        Panel(
            title, points[name], dotted=name == "knn", start=started if name == "knn" else (), **_LIMITS.get(name, {})
        )
        for name, title in _PANELS
    ]
    return _lines(panels, [run.name for run in runs], name="curves", description=description, caption=caption)


def start_plot(runs: Sequence[RunData]) -> Plot:
    """Where runs that started from weights stand beside these, by epoch; the start is the dashed line."""
    description = "kNN, probe, drift and effective rank of the features of each run by epoch, beside those of its start"
    caption = (
        "The encoder beside the weights that it started from (dashed): kNN and a linear probe on training images that are held "
        "out, and the drift, 1 - mean cosine between the features of an image then and now. The last point of a finished run is "
        "the result."
    )
    panels = [
        Panel(title, [run.since_start(name) for run in runs], dotted=True, start=[True] * len(runs))
        for name, title in _START_PANELS
    ]
    return _lines(panels, [], name="starts", description=description, caption=caption)


def maps_plot(found: Sequence[EmbeddingMap], *, classes: Sequence[str]) -> Plot:
    """The maps side by side on one scale, so that a collapsed embedding looks small."""
    from matplotlib.figure import Figure

    rows = -(-len(found) // 3)
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
                x, y = one.points[one.labels == label, :2].T
                color, alpha = (SERIES[label], 0.9) if label < len(SERIES) else (COLORS["muted"], 0.3)
                axes.plot(x, y, "o", color=color, alpha=alpha, markersize=4.6, markeredgewidth=0)
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
        f"{len(found[0].labels)} test images: the encoder's features, normalised and centred, along their two main axes "
        "(PCA). All maps have the same scale. Colour is the class, which training never saw."
    )
    return Plot(svg=svg, description=description, caption=caption)


def _points(run: RunData, name: Curve) -> Sequence[tuple[float, float]]:
    if name == "rank":
        return [(epoch, 100 * value) for epoch, value in run.thinned(name, 400)]
    return run.curve(name) if name == "knn" else run.thinned(name, 400)


@dataclass(frozen=True, slots=True)
class Panel:
    """The lines of one quantity, in the order of the runs; a run without points has none."""

    title: str
    lines: Sequence[Sequence[tuple[float, float]]]
    dotted: bool = False
    start: Sequence[bool] = ()
    """Whose first value is drawn on as a dashed line."""
    limits: tuple[float | None, float | None] = (None, None)
    levels: Sequence[float] = ()


_LIMITS: dict[str, dict[str, Any]] = {
    "spread": {"limits": (0, 1.1), "levels": (PARTIAL, COLLAPSED)},
    "rank": {"limits": (0, None)},
}


def _lines(panels: Sequence[Panel], legend: Sequence[str], *, name: str, description: str, caption: str) -> Plot:
    """Four panels over the epochs."""
    from matplotlib.figure import Figure

    dashed = {"linewidth": 1, "linestyle": (0, (5, 4)), "zorder": 1}
    with figures.styled():
        figure = Figure(figsize=(14.5, 8.6 + 0.28 * ((len(legend) + 2) // 3)), layout=_roomy())
        grid = figure.subplots(2, 2, sharex=True)
        for axes, panel in zip(grid.flat, panels, strict=True):
            axes.set_title(panel.title, loc="left", fontsize=14, color=COLORS["ink"], pad=12)
            for number, points in enumerate(panel.lines):
                if not points:
                    continue
                color, style = series(number)
                marker = {"marker": "o", "markersize": 4.5} if panel.dotted else {}
                axes.plot(*np.array(points).T, color=color, linestyle=style, linewidth=2, **marker)
                if panel.start and panel.start[number]:
                    axes.axhline(points[0][1], color=color, **dashed)
            axes.set_ylim(*panel.limits)
            for level in panel.levels:
                axes.axhline(level, color=COLORS["bad"], **dashed)
            if not any(panel.lines):
                middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
                axes.text(0.5, 0.5, "not measured", color=COLORS["muted"], **middle)
                axes.set_yticks([])
            axes.grid(axis="y", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(labelbottom=True)
        for axes in grid[1]:
            axes.set_xlabel("epoch")
        if legend:
            looks = [series(number) for number in range(len(legend))]
            handles = [
                grid[0, 0].plot([], [], color=color, linestyle=style, linewidth=2.2)[0] for color, style in looks
            ]
            labels = [figures.label(_short(run)) for run in legend]
            figure.legend(
                handles, labels, loc="outside upper left", ncols=min(3, len(labels)), fontsize=13, handlelength=2.2
            )
        svg = figures.to_svg(figure, name=name, description=description)
    return Plot(svg=svg, description=description, caption=caption)


def _swatch(number: int) -> Markup:
    """The line of a run as it is in the curves."""
    color, style = series(number)
    name = next(name for name, value in COLORS.items() if value == color)
    dashes = f' stroke-dasharray="{_STYLES[style]}"' if _STYLES[style] else ""
    return Markup(
        f'<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="28" y2="4" stroke-width="3" class="stroke-{name}"{dashes}/></svg>'
    )


def _statement(run: RunData) -> str:
    if not run.checks:
        return "Nothing has been logged yet."
    reason = run.verdict.reason.replace("->", "→")  # a line break cannot split this one
    text = f"{reason[:1].upper()}{reason[1:]}." if reason else _VERDICTS[run.verdict.status][1]
    if run.verdict.status == "below where it started" or len(drift := run.since_start("drift")) < 2:
        return text  # which has these numbers, or there are none
    changes = [
        f"{name} {points[0][1]:.1f} → {points[-1][1]:.1f} % on held-out training images"
        for name in ("kNN", "probe")
        if (points := run.since_start(name))
    ]
    return f"{text} Since the start: {', '.join([*changes, f'drift {drift[-1][1]:.2f}'])}."


def _sheets(runs: Sequence[RunData]) -> list[Picture]:
    """The pictures of views in the runs' folders; a picture that several runs share is shown once."""
    by_bytes: dict[bytes, list[str]] = {}
    for run in runs:
        path = RunFolder(run.path).views_file
        if path.is_file():
            by_bytes.setdefault(path.read_bytes(), []).append(run.name)
    found = []
    for content, names in by_bytes.items():
        named = ", ".join(names)
        try:
            with Pillow.open(io.BytesIO(content), formats=["PNG"]) as image:
                image.load()
                if image.width > 1600:  # views of large images: the page shows them at about half of this
                    image.thumbnail((1600, 1600 * image.height), Pillow.Resampling.LANCZOS)
                shown = embedded(image.convert("RGB"), description=f"Originals and views of {named}", caption=named)
        except (UnidentifiedImageError, OSError):
            continue
        found.append(shown)
    return found


def _short(name: str) -> str:
    return name if len(name) <= 44 else f"{name[:43]}…"
