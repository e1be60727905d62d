"""``dssl views``: see the views, and measure what the policies do to your images."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dssl.commands.arguments import check_counts, command_line, recipe_of, show_progress
from dssl.commands.options import Usage
from dssl.errors import DsslError
from dssl.files import write_atomically, write_text


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show originals, standard views and heavy views on one page, with the measured strength of each policy."""

    USAGE: ClassVar[Usage] = Usage(
        positional={"data": "IMAGES"},
        examples=(
            "dssl views photos",
            'dssl views photos --heavy "ra(2,9)" "jigsaw(4)"',
            "dssl views microscope --channels 5 --image-size 64",
        ),
    )

    data: str
    """Images: a folder, a list of files, tar or Parquet shards, cifar10:FOLDER, shapes, or shapes:2000."""
    heavy: tuple[str, ...] = ("ra(2,5)", "jigsaw(4)", "ra(8,16)", "ua")
    """Heavy policies, one row each: "ra(2,5)" "0.9*ra(2,5) | 0.1*jigsaw(4)"."""
    out: Path = Path("views.html")
    """The page to write; the contact sheet has the same name with .png."""
    standard: str | None = None
    """The standard policy; by default as in dssl train for these images."""
    image_size: int | None = None
    """Width and height of a view, in pixels; by default as in dssl train for these images."""
    channels: int = 3
    """1 for gray views of gray images; any other number for TIFF, PNG and NPY files with that many channels."""
    range: str | None = None
    """For images that are not photographs: the values that become black and white, such as 0,4095, or percentiles to measure,
    such as 1%,99%, which is the default if channels is neither 1 nor 3."""
    split: Literal["train", "test"] = "train"
    """The split to show."""
    show: int = 8
    """Images on the page."""
    sample: int = 1000
    """Measure at most this many images."""
    table: str | None = None
    """Show the operations of this table one by one over their magnitudes; by default the tables that the policies use."""
    seed: int = 0
    """Selects the images and their views."""

    def __post_init__(self) -> None:
        check_counts(self, "show", "sample", "image_size", "channels")


def run(arguments: Arguments) -> int:
    _check(arguments)
    begun = time.perf_counter()
    from dssl.augment import DEFAULT_POLICIES, parse, show, without_colour
    from dssl.augment.primitives import named_table
    from dssl.data import open_source
    from dssl.recipes import recipe
    from dssl.report import views

    # a page must say what "heavy" means
    policies = [DEFAULT_POLICIES["heavy"] if text == "heavy" else text for text in arguments.heavy]
    channels = arguments.channels
    if arguments.heavy == Arguments.heavy and channels not in (1, 3):
        policies = [show(without_colour(parse(text))) for text in policies]
    names = views.tables_of(policies)
    if arguments.table is not None:
        named_table(arguments.table)  # an unknown name is an error before anything is measured
        names = (arguments.table,)
    source = open_source(arguments.data, split=arguments.split, channels=channels, value_range=arguments.range)
    usual = recipe(recipe_of(arguments.data), channels=channels)
    survey = views.survey(
        source, policies=policies, standard=arguments.standard or usual.standard, channels=channels,
        size=arguments.image_size or usual.image_size, seed=arguments.seed, examples=arguments.show,
        sample=arguments.sample, progress=show_progress,
    )  # fmt: skip
    tables = [views.operation_table(name, survey.probes, seed=arguments.seed) for name in names]
    write_text(arguments.out, views.html(survey, tables, command=command_line("views", arguments)))
    sheet = arguments.out.with_suffix(".png")
    write_atomically(sheet, [views.sheet(survey)])
    print(f"{views.summary(survey)}\n\n{arguments.out}\n{sheet}\n{time.perf_counter() - begun:.1f} s")
    return 0


def _check(arguments: Arguments) -> None:
    from dssl.data.folder import holds

    if not arguments.heavy:
        raise DsslError('--heavy is empty: expected at least one, such as "ra(2,5)"')
    if arguments.out.suffix != ".html":
        expected = "expected a name ending in .html; the contact sheet is written next to it"
        raise DsslError(f"--out is {arguments.out}: {expected}")
    if holds(arguments.data, arguments.out):
        reason = "the contact sheet would become part of them; choose a file outside them"
        raise DsslError(f"--out is {arguments.out}, inside the images of {arguments.data}: {reason}")
    if arguments.show > arguments.sample:
        reason = "the images shown are among those measured"
        raise DsslError(f"--show {arguments.show} is more than --sample {arguments.sample}: {reason}")
