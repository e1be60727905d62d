"""The page of ``dssl evaluate --corruptions``: accuracy under corruption, curves over severity, and what the images look like."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dssl.augment import KINDS, SEVERITIES
from dssl.data.loader import centre_crop
from dssl.evaluation.protocols import Benchmark
from dssl.evaluation.robustness import FAMILIARITIES, GROUPS, CorruptedImages, Difference, Robustness
from dssl.report import page
from dssl.report.comparison import COLOURS, called
from dssl.report.page import COLORS, SERIES, Plot
from dssl.report.pictures import Picture, picture
from dssl.text import columns
from dssl.version import VERSION

Others = Mapping[str, Robustness]
"""The encoders to compare with, by what they are called."""

_EXAMPLES = ("gaussian-noise", "motion", "fog", "pixelate", "jpeg", "rotation")
_HEADS = ("clean", "corrupted", *GROUPS, *FAMILIARITIES)
"""The sets of conditions that stand above the kinds in a table."""


def plain(measured: Robustness, others: Others) -> dict[str, Any]:
    """As JSON holds it."""
    return {
        "dssl_version": VERSION,
        **measured.plain(),
        "against": [
            {
                "against": name,
                **other.plain(),
                "differences": {
                    protocol: {
                        key: {**dataclasses.asdict(row), "difference": row.difference, "verdict": row.verdict}
                        for key, row in measured.against(other, protocol).items()
                    }
                    for protocol in measured.right
                },
            }
            for name, other in others.items()
        ],
    }


def summary(measured: Robustness, others: Others) -> str:
    """The numbers for a terminal."""
    measures = _measures(measured)
    rows = [("", *_heads(measured), "kinds")]
    rows += [(name, *measures[name], _about(measured, name)) for name in (*_sets(measured), *measured.kinds)]
    lines = columns(rows, align="<>>>>>>")
    for word, other in others.items():
        tables = {protocol: measured.against(other, protocol) for protocol in measured.right}
        rows = [("", *(text for protocol in tables for text in ("other", "this", protocol, "95% interval", "")))]
        for name in _sets(measured):
            rows.append((name, *(cell for table in tables.values() for cell in _difference(table[name]))))
        lines += ["", f"against {called(word)}", *columns(rows, align="<>>>><>>>><")]
    return "\n".join(lines)


def html(
    measured: Robustness, others: Others, benchmark: Benchmark, corrupted: CorruptedImages, *, command: str
) -> str:
    """The whole page."""
    measures = _measures(measured)
    context = {
        "benchmark": benchmark,
        "measured": measured,
        "severities": SEVERITIES,
        "heads": _heads(measured),
        "rows": [(name, _about(measured, name), measures[name]) for name in _sets(measured)],
        "others": others,
        "called": called,
        "difference": _difference,
        "names": (*_sets(measured), *measured.kinds),
        "colours": COLOURS,
        "curves": _curves(measured, others),
        "groups": {kind: KINDS[kind].group for kind in measured.kinds},
        "by_severity": _by_severity,
        "examples": _examples(measured, benchmark, corrupted),
        "command": command,
    }
    return page.render("robustness.html", title=f"Under corruption: {benchmark.test.name}", context=context)


def _sets(measured: Robustness) -> list[str]:
    """The sets of conditions that there are."""
    return [name for name in _HEADS if name in measured.sets()]


def _heads(measured: Robustness) -> list[str]:
    return [word for protocol in measured.right for word in (f"{protocol}, %", "95% interval", "retention")]


def _about(measured: Robustness, name: str) -> str:
    """The group of a kind and whether it was seen; for a set of kinds, how many."""
    if name in measured.familiarity:
        return f"{KINDS[name].group}, {measured.familiarity[name]}"
    if name == "clean":
        return "–"
    count = len(measured.sets()[name]) // len(SEVERITIES)
    return f"{count}, outside the mean" if name == "geometry" else str(count)


def _measures(measured: Robustness) -> dict[str, list[str]]:
    """Accuracy, interval and retention over every set of conditions under each protocol."""
    texts: dict[str, list[str]] = {}
    for protocol in measured.right:
        for name, measure in measured.measures(protocol).items():
            retention = "–" if measure.retention is None else f"{100 * measure.retention:.0f}%"
            interval = "{:.1f} to {:.1f}".format(*measure.interval)
            texts.setdefault(name, []).extend((f"{measure.accuracy:.1f}", interval, retention))
    return texts


def _by_severity(measured: Robustness, protocol: str, kind: str) -> list[str]:
    """The mean accuracy under a kind, and that at each severity."""
    right = measured.right[protocol]
    each = [100 * right[measured.row(kind, severity)].mean() for severity in SEVERITIES]
    return [f"{value:.1f}" for value in (np.mean(each), *each)]


def _difference(row: Difference) -> tuple[str, str, str, str, str]:
    interval = "{:+.1f} to {:+.1f}".format(*row.interval)
    return f"{row.before:.1f}", f"{row.after:.1f}", f"{row.difference:+.1f}", interval, row.verdict


def _curves(measured: Robustness, others: Others) -> Plot:
    """Accuracy over severity for each group, clean images at severity 0; the first other encoder is dashed."""
    from matplotlib.figure import Figure

    encoders = [(measured, "-"), *((other, "--") for other in list(others.values())[:1])]
    groups = {name: [kind for kind in measured.kinds if KINDS[kind].group == name] for name in GROUPS}
    with page.styled():
        figure = Figure(figsize=(14.5, 5.4), layout="constrained")
        panels = figure.subplots(1, len(measured.right), sharey=True, squeeze=False)[0]
        for axes, protocol in zip(panels, measured.right, strict=True):
            axes.set_title(f"{protocol}, %", loc="left", fontsize=14, color=COLORS["ink"], pad=12)
            for number, (name, kinds) in enumerate(groups.items()):
                for encoder, style in encoders:
                    right = encoder.right[protocol]
                    rows = [[0], *([measured.row(kind, now) for kind in kinds] for now in SEVERITIES)]
                    points = [100 * right[row].mean() for row in rows]
                    label = name if style == "-" else None
                    axes.plot((0, *SEVERITIES), points, style, color=SERIES[number], linewidth=2, label=label)
            axes.axhline(100 / measured.classes, color=COLORS["muted"], linewidth=1, linestyle=(0, (2, 3)))
            axes.set_ylim(0, None)
            axes.set_xlabel("severity (0: clean)")
            axes.set_xticks((0, *SEVERITIES))
            axes.grid(axis="y", linewidth=0.8)
            axes.set_axisbelow(True)
        panels[0].legend(fontsize=13, ncols=len(groups) // 2)
        return page.plot(figure, name="severity", description="Accuracy over severity by group of corruptions")


def _examples(
    measured: Robustness, benchmark: Benchmark, corrupted: CorruptedImages
) -> list[tuple[str, list[Picture]]]:
    """Two test images under a few kinds at severities 1, 3 and 5."""
    indices = measured.images[[0, len(measured.images) // 2]]
    size = benchmark.encoder.image_size
    clean = np.stack([centre_crop(benchmark.test.image(int(index)), size=size) for index in indices])
    rows = []
    for kind in (kind for kind in _EXAMPLES if kind in measured.kinds):
        images = {severity: corrupted.of(clean, indices, kind, severity) for severity in (1, 3, 5)}
        pictures = []
        for place, index in enumerate(indices):
            variants = {"clean": clean[place]} | {f"severity {now}": images[now][place] for now in images}
            about = benchmark.test.label_of(int(index))
            pictures += [
                picture(image, description=f"{about}, {kind}, {caption}", caption=caption)
                for caption, image in variants.items()
            ]
        rows.append((kind, pictures))
    return rows
