"""The page of ``dssl report``: runs as their folders describe them, side by side, even while they are running."""

import io
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from dssl import config_io, rng
from dssl.config import RunConfig
from dssl.data import Quarantine, Subset
from dssl.errors import DsslError
from dssl.files import printable
from dssl.graph import named_graph
from dssl.report import page
from dssl.report.evaluation import written_numbers
from dssl.report.page import COLORS, SERIES, Colour, Plot
from dssl.report.pictures import Picture, centred, embedded, pca
from dssl.run import EVALUATION_PAGE, RunFolder
from dssl.state import Verdict
from dssl.text import columns
from dssl.training.health import COLLAPSED, PARTIAL, WINDOW, lower_spread
from dssl.training.prepare import open_test_data
from dssl.weights.load import open_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger("dssl")
Curve = Literal["loss", "knn", "spread", "rank"]
_Curve = list[tuple[float, float]]

_COLOURS: dict[str, Colour] = {
    "healthy": "good", "too early": "neutral", "partial collapse": "warn", "collapsed": "bad", "diverged": "bad",
    "below where it started": "bad",
}  # fmt: skip
_DASHED: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (5, 4)), "zorder": 1}


@dataclass(frozen=True)
class RunData:
    """One run."""

    name: str
    """What distinguishes it from the others on the page."""
    path: Path
    config: RunConfig
    images: int
    """How many images it trains on."""
    precision: str
    checks: tuple[dict[str, Any], ...]
    """Records of metrics.jsonl with the state of the embeddings, by step."""
    knns: tuple[dict[str, Any], ...]
    starts: tuple[dict[str, Any], ...] = ()
    """Records of how the run compares with its first weights; empty where that was not measured."""
    ended: Mapping[str, Any] = field(default_factory=dict)
    """What a robust run said at its end: its progress and, if it did not help, why; empty for others and before the end."""

    @property
    def evaluated(self) -> list[tuple[str, str, str]]:
        """What `dssl evaluate` measured of it, if it did: what, the number, its interval."""
        return written_numbers(self.path / "evaluation")

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.checks[-1]["step"]) if self.checks else 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.images // self.config.batch_size * self.config.epochs

    @property
    def progress(self) -> str:
        """How the encoder compares with the run's start, in words; empty where that was not measured."""
        measured = [self.ended, *(record["start"] for record in reversed(self.starts))]
        return next((found["progress"] for found in measured if "progress" in found), "")

    @property
    def finished(self) -> bool:
        return self.total > 0 and self.steps >= self.total

    def curve(self, name: Curve) -> _Curve:
        """(epoch, value) where the value is finite; the lowest of the views, because one collapsed view is enough."""
        records = self.knns if name == "knn" else self.checks
        points = [(float(record["epoch"]), self._value(record, name)) for record in records]
        return [(epoch, value) for epoch, value in points if math.isfinite(value)]

    def since_start(self, name: str) -> _Curve:
        """(epoch, value) beside the weights that the run started from: drift, feature_rank, or kNN and probe where measured."""
        records = [(float(record["epoch"]), record["start"]) for record in self.starts]
        points = [(epoch, now[name] if name in now else now["held_out"].get(name)) for epoch, now in records]
        return [(epoch, value) for epoch, value in points if value is not None]

    def thinned(self, name: Curve, count: int) -> _Curve:
        """At most ``count`` points of a curve, the last one included."""
        points = self.curve(name)
        every = max(1, math.ceil(len(points) / count))
        return points[::-1][::every][::-1]

    @property
    def knn(self) -> float | None:
        """The last kNN accuracy in percent."""
        return next((value for _, value in reversed(self.curve("knn"))), None)

    @property
    def spread(self) -> float | None:
        """Spread of the worst view, the median of the last checks, as the verdict sees it."""
        return self._recent("spread")

    @property
    def rank(self) -> float | None:
        """Effective rank of the worst view as a share of the largest possible, the median of the last checks."""
        return self._recent("rank")

    @property
    def images_per_second(self) -> float | None:
        """The median over the run without the first check, which includes compilation."""
        rates = [float(check["images_per_second"]) for check in self.checks[1:] or self.checks]
        return median(rates) if rates else None

    @property
    def data_share(self) -> float | None:
        """The share of the time in which steps waited for images."""
        shares = [float(check["data_share"]) for check in self.checks[1:] or self.checks]
        return fmean(shares) if shares else None

    @property
    def seconds(self) -> float:
        """Training time over all sessions, from the logged rates."""
        steps = pairwise([0, *(int(check["step"]) for check in self.checks)])
        rates = (max(float(check["images_per_second"]), 1e-9) for check in self.checks)
        return sum((to - since) * self.config.batch_size / rate for (since, to), rate in zip(steps, rates, strict=True))

    @property
    def verdict(self) -> Verdict:
        """The run's verdict; its reason was logged when its status became what it is."""
        if not self.checks:
            return Verdict("too early", 0)
        last = self.checks[-1]
        status, step = last["verdict"], int(last["step"])
        fine = status in ("healthy", "too early", "below where it started")
        if fine and self.starts and (below := {**self.starts[-1]["start"], **self.ended}.get("below")):
            reason, remedies = below["reason"], tuple(below["remedies"])
            return Verdict("below where it started", int(self.starts[-1]["step"]), reason=reason, remedies=remedies)
        if fine and self.starts and int(self.starts[-1]["step"]) >= step:
            # a check at the end of an epoch comes before the comparison with the start: the run is no longer below it
            status = "healthy" if status == "below where it started" else status
        if status in ("healthy", "too early"):
            return Verdict(status, step)
        logged = [check for check in self.checks if check["verdict"] == status and "reason" in check]
        changed: dict[str, Any] = {"step": step, "reason": "the reason is not recorded", "remedies": ()}
        changed |= logged[-1] if logged else {}
        return Verdict(status, int(changed["step"]), reason=changed["reason"], remedies=tuple(changed["remedies"]))

    def _recent(self, name: Literal["spread", "rank"]) -> float | None:
        by_view: dict[str, list[float]] = {}
        for check in self.checks[-WINDOW:]:
            for view, value in self._by_view(check, name).items():
                by_view.setdefault(view, []).append(value)
        return min(filter(math.isfinite, map(median, by_view.values())), default=None)

    def _value(self, record: Mapping[str, Any], name: Curve) -> float:
        if name in ("spread", "rank"):
            return min(filter(math.isfinite, self._by_view(record, name).values()), default=math.nan)
        return float(record[name])

    def _by_view(self, record: Mapping[str, Any], name: str) -> dict[str, float]:
        """By view; the lower of the spreads of projection and prediction where the health check judges both."""
        judged_from = self.config.method.predictions_checked_from
        if name == "spread" and judged_from is not None and int(record["step"]) > judged_from:
            return lower_spread(named_graph(self.config.graph), record["spread"], record["source"])
        return {view: float(value) for view, value in record[name].items()}


def read_run(path: Path, *, name: str | None = None) -> RunData:
    """A run from its folder; a last line that was cut short by a kill is skipped."""
    folder = RunFolder(path)
    if not folder.has_run:
        raise DsslError(f"{path} contains no run (no {folder.config_file.name}): expected the --out of dssl train")
    about = folder.read_config()
    if about.get("task") is not None:
        raise DsslError(f"{path} is a run of dssl evaluate-coco: its page is {path / EVALUATION_PAGE}")
    try:
        plain, images, precision = about["config"], int(about["images"]), str(about["precision"])
    except (KeyError, TypeError, ValueError) as error:
        raise DsslError(f"{folder.config_file} is not the configuration of a dssl run ({error})") from None
    try:
        config = config_io.from_dict(plain, where=str(folder.config_file))
    except DsslError as error:
        files = "".join(f" --plugin {plugin['path']}" for plugin in about.get("plugins", []))
        raise DsslError(f"{error}; the run was started with{files}" if files else str(error)) from None
    metrics = folder.metrics()
    records = [record for record in metrics if "epoch" in record]
    checks, knns, starts = (
        tuple(record for record in records if keys <= record.keys())
        for keys in ({"loss", "spread"}, {"knn"}, {"start"})
    )
    last = starts[-1]["step"] if starts else 0  # a finished run that was given more epochs has not ended
    ends = [record["ended"] for record in metrics if "ended" in record and record["step"] >= last]
    return RunData(name or path.name, path, config, images, precision, checks, knns, starts, ends[-1] if ends else {})


def find_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs of the folders: each is a run, or holds runs; they are called by their path below the folder that holds all."""
    runs: dict[Path, RunData] = {}
    for folder in folders:
        if not folder.is_dir():
            raise DsslError(f"{folder} is not a folder: expected the folder of a run, or one that contains runs")
        file = RunFolder(folder).config_file.name
        # a glob, because it skips folders that may not be read
        places = [folder] if RunFolder(folder).has_run else sorted(path.parent for path in folder.glob(f"*/{file}"))
        inside = {}
        for path in places:
            try:
                inside[path.resolve()] = read_run(path)
            except DsslError as error:
                if path == folder:
                    raise
                logger.warning(f"{path} is left out: {error}")
        if not inside:
            raise DsslError(
                f"{folder} contains no run (no {file} in it or one level below): expected the --out of dssl train"
            )
        runs |= {path: run for path, run in inside.items() if path not in runs}
    shared = os.path.commonpath([path.parent for path in runs])
    return [replace(run, name=path.relative_to(shared).as_posix()) for path, run in runs.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMap:
    """Test images of one run in the plane of the two main axes of their features."""

    run: str
    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    variance: float
    """The share of the features' variance that the plane shows."""


def embedding_maps(runs: Sequence[RunData], *, images: int) -> tuple[list[EmbeddingMap], tuple[str, ...], list[str]]:
    """The maps of the runs that can be mapped, the classes, and the reasons why the others cannot.

    All maps on a page show the same images, so runs on other data than the first are left out.
    """
    maps: list[EmbeddingMap] = []
    problems: list[str] = []
    classes: tuple[str, ...] = ()
    first: str | None = None
    for run in runs:
        try:
            encoder = open_weights(run.path)
            source = open_test_data(run.config, value_range=encoder.value_range)
            if source is None or source.labels is None or source.classes is None:
                raise DsslError(f"{run.config.data} has no labelled test images")
            if first is not None and source.fingerprint != first:
                raise DsslError("its test images differ from those of the first run")
            chosen = rng.sample(rng.key(0, "report", "map"), len(source), images)
            mapped = Subset(source, chosen)
            features = encoder.features(mapped, quarantine=Quarantine(mapped, max_share=1.0))
        except (DsslError, OSError) as error:
            problems.append(f"{run.name}: no map: {error}")
            continue
        first, classes = source.fingerprint, source.classes
        points = pca(features.values)
        total = float(centred(features.values).square().sum())
        share = float(np.square(points).sum()) / total if total > 0 else 0.0
        labels = source.labels[chosen][features.rows]
        maps.append(EmbeddingMap(run=run.name, points=points, labels=labels, variance=share))
    return maps, classes, problems


def html(
    runs: Sequence[RunData],
    *,
    command: str,
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
        "runs": runs,
        "colours": _COLOURS,
        "notes": notes,
        "curves": curves_plot(runs),
        "levels": (PARTIAL, COLLAPSED),
        "starts": start_plot(runs) if any(run.starts for run in runs) else None,
        "differences": differences(runs),
        "sheets": _sheets(runs),
        "maps": maps_plot(maps, classes=classes) if maps else None,
        "mapped": len(maps[0].labels) if maps else 0,
        "command": command,
    }
    title = title or (f"Report of {len(runs)} runs" if len(runs) != 1 else f"Report of {runs[0].name}")
    return page.render("run_report.html", title=title, context=context)


def summary(runs: Sequence[RunData]) -> str:
    """The table of the runs for a terminal."""
    rows = [("run", "kNN", "spread", "rank", "verdict")]
    for run in runs:
        knn = "–" if run.knn is None else f"{run.knn:.1f}%"
        spread = "–" if run.spread is None else f"{run.spread:.2f}"
        rank = "–" if run.rank is None else f"{100 * run.rank:.0f}%"
        partly = "" if run.finished else f" ({run.steps:,} of {run.total:,} steps)"
        rows.append((printable(run.name), knn, spread, rank, run.verdict.status + partly))
    lines = columns(rows, align="<>>>")
    for run in runs:
        if evaluated := run.evaluated:
            lines += ["", f"{printable(run.name)}, by dssl evaluate", *columns(evaluated, align="<>>")]
    return "\n".join(lines)


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the value of each run; those that change no result are left out."""
    flat = [config_io.flat(config_io.to_dict(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values if not config_io.is_harmless(key, runs[0].config))
    rows = [(key, ["–" if values.get(key) is None else str(values[key]) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def series(number: int) -> tuple[str, str]:
    """Colour and line style of a run by its position on the page; together they distinguish 24 runs."""
    return SERIES[number % len(SERIES)], ("-", "--", ":", "-.")[number // len(SERIES) % 4]


def curves_plot(runs: Sequence[RunData]) -> Plot:
    """kNN accuracy, loss, spread and effective rank by epoch, a line for each run."""
    panels = {
        "kNN accuracy, %": [run.curve("knn") for run in runs],
        "loss": [run.thinned("loss", 400) for run in runs],
        "spread of the worst view": [run.thinned("spread", 400) for run in runs],
        "effective rank of the worst view, %": [
            [(epoch, 100 * value) for epoch, value in run.thinned("rank", 400)] for run in runs
        ],
    }
    description = "kNN accuracy, loss, spread and effective rank of each run by epoch"
    with page.styled():
        figure = _panels(panels, legend=[run.name for run in runs])
        knn, _, spread, rank = figure.axes
        for number, run in enumerate(runs):
            _mark_start(knn, number, run.curve("knn") if run.starts else [])
        spread.set_ylim(0, 1.1)
        rank.set_ylim(bottom=0)
        for level in (PARTIAL, COLLAPSED):
            spread.axhline(level, color=COLORS["bad"], **_DASHED)
        return page.plot(figure, name="curves", description=description)


def start_plot(runs: Sequence[RunData]) -> Plot:
    """Where runs that started from weights stand beside these, by epoch; the start is the dashed line."""
    titles = {
        "kNN": "kNN accuracy on held-out training images, %",
        "probe": "linear probe on held-out training images, %",
        "drift": "drift of the features from the start",
        "feature_rank": "effective rank of the features",
    }
    panels = {title: [run.since_start(name) for run in runs] for name, title in titles.items()}
    description = "kNN, probe, drift and effective rank of the features of each run by epoch, beside those of its start"
    with page.styled():
        figure = _panels(panels)
        for axes, lines in zip(figure.axes, panels.values(), strict=True):
            for number, points in enumerate(lines):
                _mark_start(axes, number, points)
        return page.plot(figure, name="starts", description=description)


def maps_plot(maps: Sequence[EmbeddingMap], *, classes: Sequence[str]) -> Plot:
    """The maps side by side on one scale, so that a collapsed embedding looks small."""
    from matplotlib.figure import Figure

    rows = -(-len(maps) // 3)
    dots: dict[str, Any] = {"markersize": 4.6, "markeredgewidth": 0}
    reach = max(1e-6, max(float(np.quantile(np.abs(mapped.points), 0.995)) for mapped in maps)) * 1.06
    with page.styled():
        figure = Figure(figsize=(14.5, 0.5 + 14.2 / 3 * rows), layout="constrained")
        grid = figure.subplots(rows, 3, squeeze=False)
        for axes in grid.flat:
            axes.axis("off")
        for mapped, axes in zip(maps, grid.flat, strict=False):
            axes.axis("on")
            if len(classes) > len(SERIES):  # drawn first, in gray
                x, y = mapped.points[mapped.labels >= len(SERIES), :2].T
                rest = f"{len(classes) - len(SERIES)} other classes"
                axes.plot(x, y, "o", color=COLORS["muted"], alpha=0.3, label=rest, **dots)
            for number, name in enumerate(classes[: len(SERIES)]):
                x, y = mapped.points[mapped.labels == number, :2].T
                axes.plot(x, y, "o", color=SERIES[number], alpha=0.9, label=page.label(name), **dots)
            axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
            axes.set_title(page.label(_short(mapped.run)), fontsize=13, color=COLORS["ink"], loc="left", pad=10)
            axes.set_xlabel(f"the plane shows {mapped.variance:.0%} of the variance", fontsize=12)
            for side in ("top", "right"):
                axes.spines[side].set_visible(True)
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(
            handles, names, loc="outside upper left", ncols=min(7, len(names)), fontsize=12, handletextpad=0.1
        )
        description = "Test images of each run in the plane of the two main axes of their features"
        return page.plot(figure, name="maps", description=description)


def _mark_start(axes: "Axes", number: int, points: _Curve) -> None:
    """A dashed line at the value of a run before its first epoch."""
    if points and points[0][0] == 0:
        axes.axhline(points[0][1], color=series(number)[0], **_DASHED)


def _panels(panels: Mapping[str, Sequence[_Curve]], *, legend: Sequence[str] = ()) -> "Figure":
    """Four quantities over the epochs, each with the lines of all runs in order; a run without points has none."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    roomy = ConstrainedLayoutEngine(h_pad=0.14, w_pad=0.14)
    figure = Figure(figsize=(14.5, 8.6 + 0.28 * ((len(legend) + 2) // 3)), layout=roomy)
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=14, color=COLORS["ink"], pad=12)
        for number, points in enumerate(lines):
            color, style = series(number)
            marker = "o" if len(points) <= 50 else None
            x, y = np.array(points).reshape(-1, 2).T
            axes.plot(x, y, color=color, linestyle=style, marker=marker, linewidth=2, markersize=4.5)
        if not any(lines):
            middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
            axes.text(0.5, 0.5, "not measured", color=COLORS["muted"], **middle)
            axes.set_yticks([])
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)
    for axes in grid[1]:
        axes.set_xlabel("epoch")
    if legend:
        labels, ncols = [page.label(_short(run)) for run in legend], min(3, len(legend))
        handles = grid[0, 0].lines[: len(legend)]
        figure.legend(handles, labels, loc="outside upper left", ncols=ncols, fontsize=13, handlelength=2.2)
    return figure


def _sheets(runs: Sequence[RunData]) -> list[Picture]:
    """The pictures of views in the runs' folders; a picture that several runs share is shown once."""
    by_bytes: dict[bytes, list[str]] = {}
    for run in runs:
        path = RunFolder(run.path).views_file
        if path.is_file():
            by_bytes.setdefault(path.read_bytes(), []).append(run.name)
    sheets = []
    for content, names in by_bytes.items():
        named = ", ".join(names)
        with suppress(UnidentifiedImageError, OSError), Pillow.open(io.BytesIO(content), formats=["PNG"]) as image:
            image.load()
            if image.width > 1600:  # views of large images: the page shows them at about half of this
                image.thumbnail((1600, 1600 * image.height), Pillow.Resampling.LANCZOS)
            sheets.append(embedded(image.convert("RGB"), description=f"Originals and views of {named}", caption=named))
    return sheets


def _short(name: str) -> str:
    return name if len(name) <= 44 else f"{name[:43]}…"
