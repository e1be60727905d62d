"""The page of ``dssl views``: what the policies do to one's own images, for people to look at."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from dssl.report import figures, page
from dssl.report.figures import COLORS, SERIES, Plot
from dssl.report.operations import OperationStrip, OperationTable
from dssl.report.page import Colour, percent, rate
from dssl.report.pictures import Picture, picture, png
from dssl.report.sheet import SheetRow, contact_sheet
from dssl.report.strength import FLAT_BELOW, nearly_flat
from dssl.report.survey import PolicyStrength, Survey
from dssl.report.trend import Trend
from dssl.types import Image

FLAT_BAD = 0.2
"""From this share of nearly flat images on, a policy's verdict is red."""

FLAT_WARN = 0.05
"""From this share on it is a warning."""

FARTHER_WARN = 0.5
"""A policy that is farther from the original than the standard view on fewer images than this is not heavier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    picture: Picture
    caption: str = ""
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    title: str
    note: str
    is_policy: bool
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    text: str
    verdict: Colour
    label: str
    statement: str
    flat: float
    farther: float
    quartiles: tuple[float, ...]
    speed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strip:
    name: str
    trend: Trend
    blank_from: float | None
    sparkline: Markup
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StripTable:
    name: str
    magnitudes: tuple[float, ...]
    statement: str
    operations: tuple[_Strip, ...]


def judge(policy: PolicyStrength, *, size: int) -> tuple[Colour, str, str]:
    """The verdict on a policy, in a word and in a sentence."""
    if policy.flat >= FLAT_WARN:
        sentence = f"{policy.policy} leaves {percent(policy.flat)} of your {size} px images blank."
        return ("bad", "destroys images", sentence) if policy.flat >= FLAT_BAD else ("warn", "some blank", sentence)
    if policy.farther < FARTHER_WARN:
        sentence = f"Only {percent(policy.farther)} of its views are farther from the original than the standard view."
        return "warn", "not heavier", sentence
    low, high = np.quantile(policy.change, (0.05, 0.95))
    sentence = f"Nine views in ten change the standard view by {low:.0f} to {high:.0f} of 255 levels."
    return "good", "few blank" if policy.flat else "none blank", sentence


def html(survey: Survey, tables: Sequence[OperationTable], *, command: str) -> str:
    """The whole page; ``command`` is what makes it again."""
    gallery = _gallery(survey)
    return page.render(
        "views.html",
        title=f"Views of {survey.name}",
        context={
            "name": survey.name,
            "total": survey.total,
            "measured": survey.measured,
            "size": survey.size,
            "settings": _settings(survey),
            "unreadable": survey.unreadable,
            "policies": [_card(policy, survey.size) for policy in survey.policies],
            "gallery": gallery,
            "flagged": any(cell.flag for row in gallery for cell in row.cells),
            "strength": strength_plot(survey.policies),
            "standard_flat": survey.standard_flat,
            "tables": [_strips(table) for table in tables],
            "definitions": _definitions(survey),
            "command": command,
        },
    )


def sheet(survey: Survey) -> bytes:
    """The contact sheet as PNG: the paper's appendix figure for one's own images."""
    examples = survey.examples
    rows = [
        SheetRow(title="original", note="", images=[example.original for example in examples]),
        SheetRow(title="standard view", note=survey.standard, images=[example.standard for example in examples]),
    ]
    for number, policy in enumerate(survey.policies):
        verdict, _, _ = judge(policy, size=survey.size)
        note = f"{percent(policy.flat)} blank"
        images = [example.heavy[number] for example in examples]
        rows.append(SheetRow(title=policy.policy, note=note, images=images, alarm=verdict == "bad"))
    return png(contact_sheet(rows, title=f"{survey.name}, {survey.size} px"))


def summary(survey: Survey) -> str:
    """The page's numbers for a terminal."""
    wide = max(len("policy"), *(len(policy.policy) for policy in survey.policies))
    lines = [f"{'policy':<{wide}}  nearly flat  farther  change  views/s"]
    for policy in survey.policies:
        speed = "-" if policy.speed is None else rate(policy.speed)
        lines.append(
            f"{policy.policy:<{wide}}  {percent(policy.flat):>11}  {percent(policy.farther):>7}  "
            f"{np.median(policy.change):>6.1f}  {speed:>7}"
        )
    lines += [""] + [judge(policy, size=survey.size)[2] for policy in survey.policies if policy.flat >= FLAT_WARN]
    if survey.unreadable:
        lines.append(f"{len(survey.unreadable)} images could not be read, the first: {survey.unreadable[0]}")
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ").rstrip()


def strength_plot(policies: Sequence[PolicyStrength]) -> Plot:
    """The distribution of the change against the standard view, a ridge for each policy on one scale."""
    from matplotlib.figure import Figure

    top = max(1.0, max(float(policy.change.max()) for policy in policies))
    edges = np.linspace(0, top, 41)
    with figures.styled():
        figure = Figure(figsize=(14.5, 0.75 + 0.8 * len(policies)), layout="constrained")
        axes = figure.add_subplot()
        for number, policy in enumerate(policies):
            color = SERIES[number % len(SERIES)]
            density, _ = np.histogram(policy.change, bins=edges)
            ridge = 0.82 * density / max(1, density.max())
            base = len(policies) - 1 - number
            axes.stairs(base + ridge, edges, baseline=base, fill=True, color=color, alpha=0.28, linewidth=0)
            axes.stairs(base + ridge, edges, baseline=base, color=color, linewidth=1.4)
            quartiles = np.quantile(policy.change, (0.25, 0.5, 0.75))
            axes.plot(quartiles[[0, 2]], [base - 0.06] * 2, color=color, linewidth=3.5, solid_capstyle="butt")
            axes.plot(
                quartiles[1], base - 0.06, marker="o", markersize=6.5, color=color, markeredgecolor=COLORS["surface"]
            )
        axes.set_yticks(range(len(policies)), [figures.label(policy.policy) for policy in reversed(policies)])
        axes.tick_params(axis="y", length=0, pad=8, labelsize=13, labelcolor=COLORS["ink"])
        axes.set_ylim(-0.28, len(policies) - 0.1)
        axes.set_xlim(0, top)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("mean absolute difference to the standard view, levels of 255")
        description = "Distribution of the change that each policy makes to the standard view"
        svg = figures.to_svg(figure, name="strength", description=description)
    caption = (
        "How far each heavy view is from the standard view it was made from. A ridge is a histogram over the images, "
        "each to its own height; the bar below it spans the middle half of them and the dot is the median."
    )
    return Plot(svg=svg, description=description, caption=caption)


def _settings(survey: Survey) -> list[tuple[str, str]]:
    return [
        ("standard policy", survey.standard),
        ("size", f"{survey.size} x {survey.size} x {survey.channels}"),
        ("seed", str(survey.seed)),
        ("distances", "pixels" if survey.encoder is None else f"features of {survey.encoder}"),
    ]


def _card(policy: PolicyStrength, size: int) -> _Card:
    verdict, label, statement = judge(policy, size=size)
    low, middle, high = (float(value) for value in np.quantile(policy.change, (0.25, 0.5, 0.75)))
    return _Card(
        text=policy.policy,
        verdict=verdict,
        label=label,
        statement=statement,
        flat=policy.flat,
        farther=policy.farther,
        quartiles=(low, middle, high),
        speed=policy.speed,
    )


def _gallery(survey: Survey) -> list[_Row]:
    examples = survey.examples

    def cell(image: Image, description: str, caption: str = "") -> _Cell:
        return _Cell(picture=picture(image, description=description), caption=caption, flag=_flag(image))

    originals = tuple(cell(example.original, example.name, _end(example.name)) for example in examples)
    standard = tuple(cell(example.standard, f"standard view of {example.name}") for example in examples)
    rows = [
        _Row(title="original", note="the whole image", is_policy=False, cells=originals),
        _Row(title="standard view", note=survey.standard, is_policy=False, cells=standard),
    ]
    for number, policy in enumerate(survey.policies):
        cells = tuple(cell(example.heavy[number], f"{policy.policy} of {example.name}") for example in examples)
        rows.append(_Row(title=policy.policy, note="from the standard view", is_policy=True, cells=cells))
    return rows


def _flag(image: Image) -> str:
    return "nearly flat" if nearly_flat(image[None])[0] else ""


def _end(name: str, *, longest: int = 32) -> str:
    """The end of a long name, which tells files apart better than its beginning."""
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _strips(table: OperationTable) -> _StripTable:
    top = max(max(strip.changes) for strip in table.operations)
    weaker = [strip.name for strip in table.operations if strip.trend.weakens]
    count = len(table.operations)
    if weaker:
        statement = f"{len(weaker)} of {count} operations get weaker somewhere as m grows: {', '.join(weaker)}."
    else:
        statement = f"None of the {count} operations gets weaker as m grows."
    if blank := [strip.name for strip in table.operations if strip.blank_from is not None]:
        statement += f" At some m most images come out blank: {', '.join(blank)}."
    return _StripTable(
        name=table.name,
        magnitudes=table.magnitudes,
        statement=statement,
        operations=tuple(_strip(strip, table.magnitudes, top) for strip in table.operations),
    )


def _strip(strip: OperationStrip, magnitudes: Sequence[float], top: float) -> _Strip:
    color = "bad" if strip.trend.weakens else "series-1"
    cells = tuple(
        _Cell(
            picture=picture(image, description=f"{strip.name}, m = {magnitude:g}", side=80),
            caption=f"{change:.1f}",
            flag=_flag(image),
        )
        for magnitude, change, image in zip(magnitudes, strip.changes, strip.images, strict=True)
    )
    sparkline = figures.sparkline(strip.changes, top=top, color=color)
    return _Strip(name=strip.name, trend=strip.trend, blank_from=strip.blank_from, sparkline=sparkline, cells=cells)


def _farther(survey: Survey) -> str:
    squeezed = f"The original is squeezed to {survey.size} x {survey.size} px and compared with both views "
    if survey.encoder is not None:
        return (
            f"{squeezed}by the angle between their features under {survey.encoder}. It says what that encoder tells apart: "
            "one that was pretrained with such views has learnt to overlook them."
        )
    return (
        f"{squeezed}place by place. A standard view is a crop, often mirrored, so in pixels it is far from the original "
        "although it shows the same thing: read the share as a comparison between policies, not as a distance in meaning. "
        "With --weights an encoder's features are compared instead."
    )


def _definitions(survey: Survey) -> list[tuple[str, str]]:
    threads = f"{survey.threads} thread{'' if survey.threads == 1 else 's'}"
    return [
        (
            "Change",
            "The mean absolute difference, over all pixels and channels, between the heavy view and the standard view "
            "that it was made from: 0 is the same image, 255 is black against white.",
        ),
        (
            "Nearly flat",
            "The standard deviation of the pixels around the mean of their channel, pooled over the channels, is below "
            f"{FLAT_BELOW:g} of 255 levels. {percent(survey.standard_flat)} of the standard views are so before any "
            "heavy policy.",
        ),
        (
            "Shares",
            f"They are of {survey.measured} images with one view each, so chance alone moves a share by up to "
            f"{98 / survey.measured**0.5:.1f} points (95 of 100 times).",
        ),
        ("Farther from the original", _farther(survey)),
        (
            "Views per second",
            f"Standard and heavy views together, {survey.size} px, on {threads} of the machine that made this page; "
            "drawing the parameters is included, reading and decoding files is not.",
        ),
        (
            "Grows, or gets weaker",
            f"Each operation alone is applied to {len(survey.probes)} originals at {survey.size} px. The number below a "
            "picture is its mean change over them, and all lines share one scale. An operation is marked where a larger "
            "m changes less, by more than one level and by more than 5 % of its largest change, and called blank from the "
            "first m at which half of the results are nearly flat.",
        ),
    ]
