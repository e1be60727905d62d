"""The page of ``dssl views``: what policies do to a sample of your images, measured on the views themselves and shown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dssl import rng
from dssl.augment import KINDS, SEVERITIES, Policy, ViewMaker, parse, show
from dssl.augment.policy import parts
from dssl.augment.primitives import AtMagnitude, Corruption, RandAugment, TrivialAugment, UniformAugment, named_table
from dssl.data import Source, UnreadableImage
from dssl.data.decode import resize
from dssl.data.scale import Range
from dssl.errors import DsslError
from dssl.graph import View
from dssl.report import page
from dssl.report.page import COLORS, SERIES, Colour, Plot, percent
from dssl.report.pictures import PICTURE_SIDE, Picture, SheetRow, contact_sheet, picture, png, shrunk
from dssl.text import columns
from dssl.types import Image

Pixels: TypeAlias = NDArray[np.uint8]
"""N x H x W x C."""

FLAT_BELOW = 3.0
"""An image whose ``contrast_of_pixels`` is below this many of 255 levels is called nearly flat, or blank.

No CIFAR-10 image is below 8, and the shares of heavy views below 2 and below 4 are nearly the same: see docs/howto/views.md.
"""

_BLOCK = 64
"""Images whose views are held at one time, so that memory does not grow with the sample."""

_PROBES = 32


CORRUPTIONS = "corruptions"
"""The table of all kinds of corruption, whose magnitudes are the five severities."""

SHOWN_MAGNITUDES = (0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)

FLAT_WARN, FLAT_BAD = 0.05, 0.2
"""From these shares of nearly flat images on, the verdict on a policy is a warning, and is red."""

FAR_WARN = 0.6
"""From this share of views on that are as far from their image as other images are, the verdict on a policy is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One image, its standard view and its heavy views, one for each policy."""

    name: str
    original: Image
    """At most twice as large as it is shown: a decoded photo takes 36 MB."""
    standard: Image
    heavy: tuple[Image, ...]


@dataclass(frozen=True, slots=True)
class PolicyStrength:
    """What one policy did to the sample."""

    policy: str
    change: NDArray[np.float64]
    flat: float
    far: float
    """The share of views that differ more from their standard view than the standard view of another image does."""

    @property
    def median(self) -> float:
        """Of the change."""
        return float(np.median(self.change))


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that the page shows, apart from the operations."""

    name: str
    total: int
    measured: int
    size: int
    channels: int
    value_range: Range | None
    """Of images that are not photographs: the values that became 0 and 255."""
    seed: int
    standard: str
    standard_flat: float
    examples: tuple[Example, ...]
    probes: tuple[Image, ...]
    """The first originals at the views' size, on which single operations are tried."""
    policies: tuple[PolicyStrength, ...]
    unreadable: tuple[str, ...]


def survey(
    source: Source,
    *,
    policies: Sequence[str],
    standard: str,
    size: int,
    channels: int,
    seed: int,
    examples: int,
    sample: int,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Make every policy's view of ``sample`` images, keep the first ``examples``, and measure them all.

    The images of the source have ``channels`` channels. The seed draws them without replacement; unreadable ones are skipped
    and named.
    """
    heavy = tuple(f"h{number}" for number in range(1, len(policies) + 1))
    views = [View(name="s1", policy="standard")]
    views += [View(name=name, policy=policy, source="s1") for name, policy in zip(heavy, policies, strict=True)]
    maker = ViewMaker(views, size=size, seed=seed, channels=channels, policies={"standard": standard})
    order = rng.permutation(rng.key(seed, "survey"), len(source))[:sample]
    unreadable: list[str] = []
    shown: list[Example] = []
    probes: list[Image] = []
    # of every view the change, and whether it is nearly flat and far, block by block
    measures: dict[str, list[tuple[NDArray[Any], ...]]] = {view.name: [] for view in views}
    for start in range(0, len(order), _BLOCK):
        if progress is not None:
            progress(start + _BLOCK, len(order))
        block = order[start : start + _BLOCK]
        plan, out = maker.plan(block, epoch=0), maker.allocate(len(block))
        thumbnails: list[tuple[str, Image]] = []
        count = 0
        for row, index in enumerate(block.tolist()):
            try:
                image = source.image(index)
            except UnreadableImage as problem:
                unreadable.append(str(problem))
                continue
            maker.apply_many(plan, row, [image], out, count)
            count += 1
            # nothing else of a decoded image is kept
            if len(probes) < _PROBES:
                probes.append(resize(image, (size, size), Pillow.Resampling.BILINEAR))
            if len(shown) + len(thumbnails) < examples:
                thumbnails.append((source.label_of(index), shrunk(image, side=2 * PICTURE_SIDE)))
        if not count:
            continue
        views_of = {name: batch[:count] for name, batch in out.items()}
        standard_views = views_of["s1"]
        # two images at random; an image alone has no other to compare with
        apart = change(standard_views, np.roll(standard_views, 1, axis=0)) if count > 1 else np.inf
        for name, images in views_of.items():
            moved = change(images, standard_views)
            measures[name].append((moved, nearly_flat(images), moved > apart))
        for row, (title, original) in enumerate(thumbnails):
            heavy_views = tuple(views_of[name][row] for name in heavy)
            shown.append(Example(name=title, original=original, standard=standard_views[row], heavy=heavy_views))
    if not shown:
        raise DsslError(f"none of the {len(order)} images chosen from {source.name} can be read: {unreadable[0]}")
    strengths = []
    summaries = {
        name: [np.concatenate(column) for column in zip(*rows, strict=True)] for name, rows in measures.items()
    }
    for view in views[1:]:
        moved, flat, far = summaries[view.name]
        strengths.append(PolicyStrength(view.policy, moved, flat=float(flat.mean()), far=float(far.mean())))
    return Survey(
        name=source.name, total=len(source), measured=len(order) - len(unreadable), size=size, channels=channels,
        value_range=source.value_range, seed=seed, standard=standard, examples=tuple(shown),
        standard_flat=float(summaries["s1"][1].mean()), probes=tuple(probes), policies=tuple(strengths),
        unreadable=tuple(unreadable),
    )  # fmt: skip


def contrast_of_pixels(images: Pixels) -> NDArray[np.float64]:
    """For each image the standard deviation of its pixels around the mean of their channel, pooled over the channels.

    Around each channel's own mean, because a picture of a single red is as blank as one of a single gray.
    """
    rows = images.reshape(len(images), -1, images.shape[-1])
    planes = np.ascontiguousarray(rows.transpose(0, 2, 1)).astype(np.uint16)
    # whole numbers until the end: exact, and ten times as fast as the variance of floats at 224 px
    pixels, total = planes.shape[2], planes.sum(axis=2, dtype=np.int64)
    squares = (planes**2).sum(axis=2, dtype=np.int64)
    variance = (pixels * squares - total**2) / pixels**2
    return np.asarray(np.sqrt(variance.mean(axis=1)))


def nearly_flat(images: Pixels) -> NDArray[np.bool_]:
    """Which images carry almost nothing to learn from."""
    return contrast_of_pixels(images) < FLAT_BELOW


def change(first: Pixels, second: Pixels) -> NDArray[np.float64]:
    """For each pair of images the mean absolute difference of their pixels, 0 to 255.

    Pixel by pixel: a shift of an otherwise equal image counts as far, and the crop of a standard view is itself a shift.
    """
    difference = np.abs(first.astype(np.int16) - second.astype(np.int16))
    return np.asarray(difference.reshape(len(first), -1).mean(axis=1))


@dataclass(frozen=True, slots=True)
class OperationStrip:
    """One operation: at each magnitude the mean change over the probes, and its effect on one of them."""

    name: str
    changes: tuple[float, ...]
    images: tuple[Image, ...]
    blank_from: float | None
    """The first magnitude at which at least half of the probes come out nearly flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTable:
    """The strips of all operations of one table."""

    name: str
    magnitudes: tuple[float, ...]
    operations: tuple[OperationStrip, ...]


def operation_table(name: str, probes: Sequence[Image], *, seed: int) -> OperationTable:
    """Apply every operation of a table to the probes, square and of one size, and show it on the one with most contrast."""
    batch = np.stack(probes)
    clearest = int(contrast_of_pixels(batch).argmax())
    magnitudes, operations = _operations(name, channels=batch.shape[3])
    strips = []
    for operation, policies in operations.items():
        views = [View(name=f"m{number}", policy=f"resize > {show(policy)}") for number, policy in enumerate(policies)]
        maker = ViewMaker(views, size=batch.shape[1], seed=seed, channels=batch.shape[3])
        out = maker.allocate(len(batch))
        plan = maker.plan(np.arange(len(batch), dtype=np.int64), epoch=0)
        maker.apply_many(plan, 0, batch, out, 0)
        results = [out[view.name] for view in views]
        blank = [m for m, images in zip(magnitudes, results, strict=True) if nearly_flat(images).mean() >= 0.5]
        changes = tuple(float(change(images, batch).mean()) for images in results)
        strips.append(
            OperationStrip(operation, changes, tuple(images[clearest] for images in results), min(blank, default=None))
        )
    return OperationTable(name=name, magnitudes=magnitudes, operations=tuple(strips))


def _operations(name: str, *, channels: int) -> tuple[tuple[float, ...], dict[str, list[Policy]]]:
    """The magnitudes that are shown, or severities, and each operation of a table at all of them."""
    if name == CORRUPTIONS:
        kinds = [kind.name for kind in KINDS.values() if channels in (1, 3) or not kind.needs_colour]
        return SEVERITIES, {kind: [Corruption(kind, severity) for severity in SEVERITIES] for kind in kinds}
    rows = named_table(name)
    return SHOWN_MAGNITUDES, {
        row.operation: [AtMagnitude(row.operation, m, name) for m in SHOWN_MAGNITUDES] for row in rows
    }


def tables_of(policies: Sequence[str]) -> tuple[str, ...]:
    """The tables from which the policies draw at a chosen magnitude, or else all their tables; corruptions if there are any."""
    every = [part for text in policies for part in parts(parse(text))]
    chosen = [part.table for part in every if isinstance(part, RandAugment | AtMagnitude)]
    drawn = [part.table for part in every if isinstance(part, UniformAugment | TrivialAugment)]
    corruptions = [CORRUPTIONS for part in every if isinstance(part, Corruption)]
    return tuple(dict.fromkeys([*(chosen or drawn), *corruptions]))


def judge(policy: PolicyStrength) -> tuple[Colour, str]:
    """The verdict on a policy as a colour and a label."""
    if policy.flat >= FLAT_WARN:
        return ("bad", "destroys images") if policy.flat >= FLAT_BAD else ("warn", "some blank")
    if policy.far >= FAR_WARN:
        return "warn", "as far as other images"
    return "good", "few blank" if policy.flat else "none blank"


def html(survey: Survey, tables: Sequence[OperationTable], *, command: str) -> str:
    """The whole page; ``command`` makes it again."""
    context = {
        "survey": survey,
        "values": _values(survey),
        "policies": [(policy, *judge(policy)) for policy in survey.policies],
        "gallery": gallery(survey),
        "strength": strength_plot(survey.policies),
        "tables": tables,
        "strip_pictures": _strip,
        "flat_below": FLAT_BELOW,
        "far_warn": FAR_WARN,
        "command": command,
    }
    return page.render("views.html", title=f"Views of {survey.name}", context=context)


def sheet(survey: Survey) -> bytes:
    """The contact sheet as PNG: the paper's appendix figure for your images."""
    examples = survey.examples
    rows = [
        SheetRow("original", "", [example.original for example in examples]),
        SheetRow("standard view", survey.standard, [example.standard for example in examples]),
    ]
    for number, policy in enumerate(survey.policies):
        images = [example.heavy[number] for example in examples]
        rows.append(SheetRow(policy.policy, f"{percent(policy.flat)} blank", images, alarm=policy.flat >= FLAT_BAD))
    return png(contact_sheet(rows, title=f"{survey.name}, {survey.size} px"))


def summary(survey: Survey) -> str:
    """The page's numbers for a terminal."""
    rows = [("policy", "nearly flat", "far", "change", "")]
    for policy in survey.policies:
        shares = percent(policy.flat), percent(policy.far)
        rows.append((policy.policy, *shares, f"{policy.median:.1f}", judge(policy)[1]))
    lines = columns(rows, align="<>>>")
    if survey.unreadable:
        lines += ["", f"{len(survey.unreadable)} images could not be read, the first: {survey.unreadable[0]}"]
    return "\n".join(lines)


def strength_plot(policies: Sequence[PolicyStrength]) -> Plot:
    """The distribution of the change against the standard view, a bar for each policy on one scale."""
    from matplotlib.figure import Figure

    description = "Distribution of the change that each policy makes to the standard view"
    with page.styled():
        figure = Figure(figsize=(14.5, 0.75 + 0.6 * len(policies)), layout="constrained")
        axes = figure.add_subplot()
        for row, policy in enumerate(policies):
            lowest, low, median, high, highest = np.quantile(policy.change, (0.05, 0.25, 0.5, 0.75, 0.95))
            axes.plot([lowest, highest], [row, row], color=SERIES[0], linewidth=2)
            axes.plot([low, high], [row, row], color=SERIES[0], linewidth=12, solid_capstyle="butt")
            axes.plot(median, row, "o", color=COLORS["surface"], markeredgecolor=SERIES[0])
        axes.set_yticks(range(len(policies)), [page.label(policy.policy) for policy in policies])
        axes.set_ylim(len(policies) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0, pad=8, labelsize=13, labelcolor=COLORS["ink"])
        axes.set_xlim(left=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x", linewidth=0.8)
        axes.set_xlabel("mean absolute difference from the standard view, levels of 255")
        return page.plot(figure, name="strength", description=description)


def _values(survey: Survey) -> list[tuple[str, str]]:
    """What the pictures show of images that are not photographs."""
    if survey.value_range is None:
        return []
    shown = {1: "", 2: "channel 1 of 2 in gray"}.get(
        survey.channels, f"channels 1 to 3 of {survey.channels} as red, green and blue"
    )
    bounds = [f"{low:.6g} to {high:.6g}" for low, high in survey.value_range.bounds]
    return [("values from black to white", "; ".join(bounds)), *([("pictures show", shown)] if shown else [])]


def gallery(survey: Survey) -> list[tuple[str, str, list[Picture]]]:
    """Title, note and pictures of each row: originals, standard views, and a row for each policy."""
    examples = survey.examples
    # the end of a long name distinguishes files better than its beginning
    captions = [image.name if len(image.name) <= 32 else f"…{image.name[-31:]}" for image in examples]
    originals = [
        _picture(image.original, image.name, caption=caption) for image, caption in zip(examples, captions, strict=True)
    ]
    standard = [_picture(image.standard, f"standard view of {image.name}") for image in examples]
    rows = [("original", "the whole image", originals), ("standard view", survey.standard, standard)]
    for number, policy in enumerate(survey.policies):
        pictures = [_picture(image.heavy[number], f"{policy.policy} of {image.name}") for image in examples]
        rows.append((policy.policy, "from the standard view", pictures))
    return rows


def _strip(strip: OperationStrip, magnitudes: Sequence[float]) -> list[Picture]:
    """One operation over its magnitudes, with the mean change below each picture."""
    return [
        _picture(image, f"{strip.name}, m = {m:g}", caption=f"{by:.1f}", side=80)
        for m, by, image in zip(magnitudes, strip.changes, strip.images, strict=True)
    ]


def _picture(image: Image, description: str, *, caption: str = "", side: int = PICTURE_SIDE) -> Picture:
    """A view as a page holds it, in a red frame where it came out nearly flat."""
    flag = "nearly flat" if nearly_flat(image[None])[0] else ""
    return picture(image, description=description, caption=caption, flag=flag, side=side)
