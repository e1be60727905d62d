"""``dssl report``: one page about one or more runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dssl.commands.arguments import command_line
from dssl.errors import DsslError
from dssl.files import write_text


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Make one HTML page about runs: curves, verdicts, what differs between them, views, speed and a map of the embeddings.

    The page is one file that works offline. Runs may still be running; the page shows their progress.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RUN ...]")]
    """Folders of runs (the --out of dssl train), or folders that hold runs, such as results/cpu/runs."""
    out: Path = Path("report.html")
    """The page to write."""
    tables: Path | None = None
    """A folder of dssl reproduce, such as results/cpu: its tables are shown on the page."""
    images: int = 600
    """Test images on the map of the embeddings; 0 for no map."""


def run(arguments: Arguments) -> int:
    if not arguments.runs:
        raise DsslError("no runs given: expected the folder of a run, or one that holds runs")
    if arguments.out.suffix != ".html":
        raise DsslError(f"--out is {arguments.out}: expected a name that ends in .html")
    if arguments.images < 0:
        raise DsslError(f"--images is {arguments.images}: expected 0 or more")
    from dssl.report import run_report
    from dssl.report.map import embedding_maps
    from dssl.report.run_data import find_runs

    runs = find_runs(arguments.runs)
    tables = [] if arguments.tables is None else _tables(arguments.tables)
    maps, classes, notes = embedding_maps(runs, images=arguments.images) if arguments.images else ([], (), [])
    command = command_line("report", arguments)
    page = run_report.html(runs, command=command, tables=tables, maps=maps, classes=classes, notes=notes)
    write_text(arguments.out, page)
    print(run_report.summary(runs))
    for note in notes:
        print(f"note: {note}")
    print(f"\n{arguments.out}")
    return 0


def _tables(folder: Path) -> list[dict[str, object]]:
    """The tables of a folder, rebuilt from its cells."""
    from dssl.reproduce import outcome, table
    from dssl.reproduce.scales import named_scale
    from dssl.reproduce.targets import every_target

    outcomes = {path.stem: outcome.read(path) for path in sorted((folder / "cells").glob("*.json"))}
    found = []
    for name, target in every_target().items():
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                plain = json.loads(path.read_text(encoding="utf-8"))
                scale, seeds = named_scale(plain["scale"]), tuple(plain["seeds"])
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise DsslError(
                    f"{path} is not a table of dssl reproduce ({error}): delete it and run dssl reproduce again"
                ) from None
            found.append(table.for_page(table.build(target, scale, seeds=seeds, outcomes=outcomes)))
    if not found:
        raise DsslError(f"{folder} holds no table of dssl reproduce (such as table2.json beside a folder cells)")
    return found
