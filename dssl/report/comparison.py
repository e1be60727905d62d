"""The page of ``dssl evaluate --against``: differences with intervals, classes that won and lost, images that changed sides."""

from collections.abc import Sequence

from dssl.evaluation.comparison import WORDS, Against, Row
from dssl.evaluation.protocols import Benchmark
from dssl.report import page
from dssl.report.page import Colour
from dssl.report.pictures import Picture, picture
from dssl.text import columns

SHOWN = 12
"""Images that changed sides, of each kind."""
COLOURS: dict[str, Colour] = {"better": "good", "worse": "bad", "no difference shown": "neutral"}


def summary(comparisons: Sequence[Against]) -> str:
    """The numbers for a terminal."""
    lines = []
    for against in comparisons:
        rows = [("protocol", "other", "this", "difference", "95% interval", "p", "draws", "")]
        for row in against.rows:
            rows.append((row.name, *_numbers(row), str(row.comparison.draws), row.comparison.verdict))
        this, other = run_as(against)
        about = [f"against {called(against.name)}", f"other: {other}; this: {this}"]
        lines += ["", *about, *columns(rows, align="<>>>>>>")]
    return "\n".join(lines[1:])


def html(comparisons: Sequence[Against], benchmark: Benchmark, *, command: str) -> str:
    """The whole page."""
    context = {
        "benchmark": benchmark,
        "comparisons": comparisons,
        "called": called,
        "run_as": run_as,
        "numbers": _numbers,
        "colours": COLOURS,
        "changed": lambda row: _changed(row, benchmark),
        "command": command,
    }
    return page.render("comparison.html", title=f"Comparison on {benchmark.test.name}", context=context)


def called(name: str) -> str:
    """A name for an encoder to compare with, and what it means if it is a word."""
    return f"{name}: {WORDS[name]}" if name in WORDS else name


def run_as(against: Against) -> list[str]:
    """This encoder and the other, each with the size of the images that it sees."""
    protocols = (against.rows[0].protocol, against.rows[0].other_protocol)
    return ["{encoder}, {image_size} px".format(**protocol["checkpoint"]) for protocol in protocols]


def _numbers(row: Row) -> tuple[str, str, str, str, str]:
    """Accuracy of the other and of this encoder, their difference, its interval and its p-value."""
    about = row.comparison
    p_value = "–" if about.p_value is None else "< 0.001" if about.p_value < 0.001 else f"{about.p_value:.3f}"
    interval = "{:+.2f} to {:+.2f}".format(*about.interval)
    return f"{about.before:.2f}", f"{about.after:.2f}", f"{about.difference:+.2f}", interval, p_value


def _changed(row: Row, benchmark: Benchmark) -> list[tuple[str, list[Picture]]]:
    """The images whose answers changed most, won and lost, with both answers of the first draw that changed."""
    sides = []
    for side, right, images in (
        ("won", row.after, row.comparison.won_rows),
        ("lost", row.before, row.comparison.lost_rows),
    ):
        pictures = []
        for index in images[:SHOWN]:
            label = int(benchmark.test_labels[index])
            changed = (right[:, index] == label) & (row.before[:, index] != row.after[:, index])
            draw = int(changed.argmax())
            before, after = (benchmark.classes[int(answers[draw, index])] for answers in (row.before, row.after))
            flag = f"is {benchmark.classes[label]}" if side == "lost" else ""
            image, name = benchmark.test.image(index), benchmark.test.label_of(index)
            pictures.append(picture(image, description=name, caption=f"{before} → {after}", flag=flag))
        if pictures:
            sides.append((side, pictures))
    return sides
