"""The page of ``dssl report``: runs side by side, with curves, verdicts, what differs between them, views and maps."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from dssl import config_io
from dssl.report import page, run_figures
from dssl.report.figures import COLORS
from dssl.report.page import Colour
from dssl.report.pictures import Picture, png
from dssl.report.run_data import RunData
from dssl.report.run_figures import EmbeddingMap

_COLOURS: dict[str, Colour] = {
    "healthy": "good",
    "too early": "neutral",
    "partial collapse": "warn",
    "collapsed": "bad",
    "diverged": "bad",
}
_WORDS = {
    "healthy": "The embeddings of every view keep their spread and their rank.",
    "too early": "Too few steps for a verdict: early embeddings wander.",
    "partial collapse": "The embeddings of at least one view lost most of their spread or their rank.",
    "collapsed": "The embeddings of at least one view shrank to nearly a point.",
    "diverged": "The loss is no longer a number.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    name: str
    verdict: str
    colour: Colour
    statement: str
    remedies: tuple[str, ...]
    graph: str
    swatch: Markup
    knn: float | None
    spread: float | None
    rank: float | None
    progress: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sheet:
    runs: str
    picture: Picture


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
    """The whole page; ``command`` is what makes it again, ``sentences`` stand at its head."""
    title = title or (f"Report of {len(runs)} runs" if len(runs) != 1 else f"Report of {runs[0].name}")
    data = sorted({f"{run.config.data}, {run.images:,} images" for run in runs})
    return page.render(
        "run_report.html",
        title=title,
        context={
            "facts_": [("data", "; ".join(data)), ("encoder", ", ".join(sorted({run.config.encoder for run in runs})))],
            "sentences": [sentence.replace(" %", "\N{NO-BREAK SPACE}%") for sentence in sentences],
            "cards": [_card(run, number) for number, run in enumerate(runs)],
            "notes": notes,
            "curves": run_figures.curves(runs),
            "rows": [_row(run) for run in runs],
            "tables": tables,
            "differences": differences(runs),
            "names": [run.name for run in runs],
            "sheets": _sheets(runs),
            "maps": run_figures.maps(maps, classes=classes, images=len(maps[0].labels)) if maps else None,
            "definitions": _DEFINITIONS,
            "command": command,
        },
    )


def summary(runs: Sequence[RunData]) -> str:
    """The table of the runs for a terminal."""
    wide = max(len("run"), *(len(run.name) for run in runs))
    lines = [f"{'run':<{wide}}  {'kNN':>6}  {'spread':>6}  {'rank':>6}  verdict"]
    for run in runs:
        spread = "–" if run.spread is None else f"{run.spread:.2f}"
        rank = "–" if run.rank is None else f"{100 * run.rank:.0f} %"
        lines.append(f"{run.name:<{wide}}  {_knn(run):>6}  {spread:>6}  {rank:>6}  {run.opinion.verdict}{_partly(run)}")
    return "\n".join(lines)


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """Settings in which the runs differ, with the value of each run; harmless ones are left out."""
    flat = [config_io.flat(config_io.to_dict(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    found = []
    for key in keys:
        values = ["–" if one.get(key) is None else str(one[key]) for one in flat]
        if len(set(values)) > 1 and not config_io.is_harmless(key, runs[0].config):
            found.append((key, values))
    return found


def _card(run: RunData, number: int) -> _Card:
    opinion = run.opinion
    color, style = run_figures.series(number)
    name = next(name for name, value in COLORS.items() if value == color)
    dashes = {
        "-": "",
        "--": ' stroke-dasharray="7 4"',
        ":": ' stroke-dasharray="2 3"',
        "-.": ' stroke-dasharray="7 3 2 3"',
    }
    swatch = Markup(
        f'<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="28" y2="4" stroke-width="3" class="stroke-{name}"{dashes[style]}/></svg>'
    )
    reason = opinion.reason.replace("->", "→")  # which a line break cannot tear apart
    statement = f"{reason[:1].upper()}{reason[1:]}." if reason else _words(run)
    return _Card(
        name=run.name,
        verdict=opinion.verdict,
        colour=_COLOURS[opinion.verdict],
        statement=statement,
        remedies=opinion.remedies,
        graph=f"{run.method}, {run.config.graph}",
        swatch=swatch,
        knn=run.knn,
        spread=run.spread,
        rank=run.rank,
        progress="finished" if run.finished else f"{run.steps:,} of {run.total:,} steps",
    )


def _words(run: RunData) -> str:
    if not run.looks:
        return "Nothing has been written down yet."
    return _WORDS[run.opinion.verdict]


def _row(run: RunData) -> dict[str, object]:
    return {
        "name": run.name,
        "what": f"{run.method}, {run.config.graph}",
        "epochs": f"{run.steps / max(1, run.total) * run.config.epochs:.4g} of {run.config.epochs}",
        "knn": _knn(run),
        "loss": f"{run.curve('loss')[-1][1]:.3f}" if run.curve("loss") else "–",
        "verdict": run.opinion.verdict,
        "colour": _COLOURS[run.opinion.verdict],
        "images": run.images_per_second,
        "views": run.views_per_second,
        "waits": run.data_share,
        "minutes": f"{run.seconds / 60:.1f}",
        "precision": run.precision,
    }


def _knn(run: RunData) -> str:
    return "–" if run.knn is None else f"{run.knn:.1f} %"


def _partly(run: RunData) -> str:
    return "" if run.finished else f" ({run.steps:,} of {run.total:,} steps)"


def _sheets(runs: Sequence[RunData]) -> list[_Sheet]:
    """The pictures of views that the runs left; one that several runs share is shown once."""
    by_bytes: dict[bytes, list[str]] = {}
    for run in runs:
        path = run.path / "views.png"
        if path.is_file():
            by_bytes.setdefault(path.read_bytes(), []).append(run.name)
    found = []
    for content, names in by_bytes.items():
        try:
            with Pillow.open(io.BytesIO(content), formats=["PNG"]) as image:
                image.load()
                if image.width > 1600:  # views of large images: the page shows them at about half of this
                    image.thumbnail((1600, 1600 * image.height), Pillow.Resampling.LANCZOS)
                width, height = image.size
                content = png(image.convert("RGB"))
        except (UnidentifiedImageError, OSError):
            continue
        named = ", ".join(names)
        encoded = base64.b64encode(content).decode("ascii")
        found.append(
            _Sheet(
                runs=named,
                picture=Picture(
                    source=f"data:image/png;base64,{encoded}",
                    width=width,
                    height=height,
                    description=f"Originals and views of {named}",
                    enlarge=False,
                ),
            )
        )
    return found


_DEFINITIONS = (
    (
        "Spread",
        "The standard deviation of the normalised projections (or predictions, where it is lower) times the root of their "
        "dimension: 1 when they fill the sphere, 0 when all are one point. The number is the median of the last looks, of the "
        "view that fares worst.",
    ),
    (
        "Effective rank",
        "The exponential of the entropy of the singular values of a batch of projections, as a share of the largest possible.",
    ),
    (
        "Verdict",
        "What the watch over the run concludes from spread and rank. It speaks of the embeddings and not of how useful they are.",
    ),
    (
        "kNN accuracy",
        "Each test image takes the class of its 200 nearest training images by cosine similarity, weighted by "
        "exp(similarity / 0.1), at the last epoch that was measured. At most 20,000 training and 10,000 test images take part.",
    ),
    (
        "Waits for data",
        "The share of the training time in which a step waited for its images: near zero when the encoder is the bottleneck.",
    ),
)
