"""``dssl report``: one page about one or more runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dssl.commands.arguments import command_line
from dssl.commands.options import Usage
from dssl.errors import DsslError
from dssl.files import write_text


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Make one HTML page about runs: curves, verdicts, what differs between them, views, speed and a map of the embeddings.

    The page is one file that works offline. Runs may still be in progress.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"runs": "RUN ..."},
        examples=(
            "dssl report runs/photos",
            "dssl report runs/a runs/b --out compared.html",
            "dssl report runs --out runs.html",
        ),
    )

    runs: tuple[Path, ...]
    """Folders of runs (the --out of dssl train), or folders that hold runs, such as results/cpu/runs."""
    out: Path = Path("report.html")
    """The page to write."""
    images: int = 600
    """Test images on the map of the embeddings; 0 for no map."""


def run(arguments: Arguments) -> int:
    if not arguments.runs:
        raise DsslError("no runs given: expected the folder of a run, or one that contains runs")
    if arguments.out.suffix != ".html":
        raise DsslError(f"--out is {arguments.out}: expected a name that ends in .html")
    if arguments.images < 0:
        raise DsslError(f"--images is {arguments.images}: expected 0 or more")
    from dssl.report import run_report

    runs = run_report.find_runs(arguments.runs)
    count = arguments.images
    maps, classes, notes = run_report.embedding_maps(runs, images=count) if count else ([], (), [])
    command = command_line("report", arguments)
    page = run_report.html(runs, command=command, maps=maps, classes=classes, notes=notes)
    write_text(arguments.out, page)
    print(run_report.summary(runs), *(f"note: {note}" for note in notes), f"\n{arguments.out}", sep="\n")
    return 0
