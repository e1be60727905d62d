"""The page of ``dssl views``: what the policies do to your images, for you to look at."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from dssl.report import figures, page
from dssl.report.figures import COLORS, SERIES, Plot
from dssl.report.operations import OperationTable
from dssl.report.page import Colour, percent, rate
from dssl.report.pictures import PICTURE_SIDE, Picture, SheetRow, contact_sheet, picture, png
from dssl.report.survey import FLAT_BELOW, PolicyStrength, Survey, nearly_flat
from dssl.text import columns
from dssl.types import Image

FLAT_WARN, FLAT_BAD = 0.05, 0.2
"""From these shares of nearly flat images on, the verdict on a policy is a warning, and is red."""

FARTHER_WARN = 0.5
"""A policy that is farther from the original than the standard view on fewer images than this is not heavier."""


def judge(policy: PolicyStrength, *, size: int) -> tuple[Colour, str, str]:
    """The verdict on a policy as a colour, a label and a sentence."""
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
    """The whole page; ``command`` makes it again."""
    gallery = _gallery(survey)
    unreadable = list(survey.unreadable[:5])
    if (more := len(survey.unreadable) - 5) > 0:
        unreadable.append(f"and {more} more")
    settings = [
        ("standard policy", survey.standard),
        ("size", f"{survey.size} x {survey.size} x {survey.channels}"),
        *_values(survey),
        ("seed", str(survey.seed)),
        ("distances", "pixels" if survey.encoder is None else f"features of {survey.encoder}"),
    ]
    context = {
        "survey": survey,
        "settings": settings,
        "unreadable": unreadable,
        "policies": [(policy, *judge(policy, size=survey.size)) for policy in survey.policies],
        "gallery": gallery,
        "flagged": any(cell.flag for _, _, cells in gallery for cell in cells),
        "strength": strength_plot(survey.policies),
        "tables": [(table, _strips(table)) for table in tables],
        "flat_below": FLAT_BELOW,
        "command": command,
    }
    return page.render("views.html", title=f"Views of {survey.name}", context=context)


def sheet(survey: Survey) -> bytes:
    """The contact sheet as PNG: the paper's appendix figure for your images."""
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
    rows = [("policy", "nearly flat", "farther", "change", "views/s")]
    for policy in survey.policies:
        speed = "-" if policy.speed is None else rate(policy.speed)
        median = f"{np.median(policy.change):.1f}"
        rows.append((policy.policy, percent(policy.flat), percent(policy.farther), median, speed))
    verdicts = [judge(policy, size=survey.size)[2] for policy in survey.policies if policy.flat >= FLAT_WARN]
    lines = [*columns(rows, align="<>>>>"), "", *(text.replace("\N{NO-BREAK SPACE}", " ") for text in verdicts)]
    if survey.unreadable:
        lines.append(f"{len(survey.unreadable)} images could not be read, the first: {survey.unreadable[0]}")
    return "\n".join(lines).rstrip()


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
            low, middle, high = policy.quartiles
            below = base - 0.06
            axes.plot([low, high], [below] * 2, color=color, linewidth=3.5, solid_capstyle="butt")
            axes.plot(middle, below, marker="o", markersize=6.5, color=color, markeredgecolor=COLORS["surface"])
        axes.set_yticks(range(len(policies)), [figures.label(policy.policy) for policy in reversed(policies)])
        axes.tick_params(axis="y", length=0, pad=8, labelsize=13, labelcolor=COLORS["ink"])
        axes.set_ylim(-0.28, len(policies) - 0.1)
        axes.set_xlim(0, top)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel("mean absolute difference from the standard view, levels of 255")
        description = "Distribution of the change that each policy makes to the standard view"
        svg = figures.to_svg(figure, name="strength", description=description)
    caption = (
        "How far each heavy view is from the standard view it was made from. A ridge is a histogram over the images, "
        "each scaled to the same height; the bar below it spans the middle half of them and the dot is the median."
    )
    return Plot(svg=svg, description=description, caption=caption)


def _values(survey: Survey) -> list[tuple[str, str]]:
    """What the pictures show of images that are not photographs."""
    if survey.value_range is None:
        return []
    shown = {1: "", 2: "channel 1 of 2 in gray"}.get(
        survey.channels, f"channels 1 to 3 of {survey.channels} as red, green and blue"
    )
    bounds = [f"{low:.6g} to {high:.6g}" for low, high in survey.value_range.bounds]
    return [("values from black to white", "; ".join(bounds)), *([("pictures show", shown)] if shown else [])]


def _gallery(survey: Survey) -> list[tuple[str, str, list[Picture]]]:
    """Title, note and pictures of each row."""
    examples = survey.examples
    originals = [view_picture(one.original, one.name, caption=_end(one.name)) for one in examples]
    standard = [view_picture(one.standard, f"standard view of {one.name}") for one in examples]
    rows = [("original", "the whole image", originals), ("standard view", survey.standard, standard)]
    for number, policy in enumerate(survey.policies):
        pictures = [view_picture(one.heavy[number], f"{policy.policy} of {one.name}") for one in examples]
        rows.append((policy.policy, "from the standard view", pictures))
    return rows


def _strips(table: OperationTable) -> list[tuple[Markup, list[Picture]]]:
    """The line and the pictures of each operation; all lines share one scale."""
    top = max(max(strip.changes) for strip in table.operations)
    strips = []
    for strip in table.operations:
        shown = zip(table.magnitudes, strip.changes, strip.images, strict=True)
        pictures = [
            view_picture(image, f"{strip.name}, m = {m:g}", caption=f"{change:.1f}", side=80)
            for m, change, image in shown
        ]
        strips.append((figures.sparkline(strip.changes, top=top), pictures))
    return strips


def view_picture(image: Image, description: str, *, caption: str = "", side: int = PICTURE_SIDE) -> Picture:
    """A view as a page holds it, in a red frame where it came out nearly flat."""
    flag = "nearly flat" if nearly_flat(image[None])[0] else ""
    return picture(image, description=description, caption=caption, flag=flag, side=side)


def _end(name: str) -> str:
    """The end of a long name, which distinguishes files better than its beginning."""
    return name if len(name) <= 32 else f"…{name[-31:]}"
