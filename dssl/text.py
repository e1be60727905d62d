"""Numbers, durations and tables as text: aligned columns for a terminal, and Markdown."""

from collections.abc import Sequence


def number(value: float) -> str:
    """The shortest text of exactly this number: ``2``, ``0.5``."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def columns(rows: Sequence[Sequence[str]], *, align: str = "") -> list[str]:
    """The lines of a table, its columns two spaces apart; ``align`` has "<" or ">" for each column, "<" if it is short."""
    cells = [[text.replace("\N{NO-BREAK SPACE}", " ") for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = align.ljust(len(widths), "<")
    return [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in cells
    ]


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "") -> list[str]:
    """The lines of a Markdown table, aligned as in ``columns``; no vertical bar or line break in a cell ends the cell."""
    rule = ["---:" if side == ">" else "---" for side in align.ljust(len(heading), "<")]
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in (heading, *rows)]
    return [f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:])]


def duration(seconds: float) -> str:
    """``40 seconds``, ``7 minutes``, ``2.5 hours``."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
