"""``dssl evaluate``: what an encoder has learned, each number with its full protocol."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dssl.commands.arguments import (
    EncoderArguments,
    check_counts,
    command_line,
    default_folder,
    images_of,
    open_on_device,
)
from dssl.commands.options import Usage
from dssl.errors import DsslError
from dssl.files import write_text
from dssl.version import VERSION

if TYPE_CHECKING:
    from dssl.data import Source
    from dssl.data.source import Split
    from dssl.evaluation.protocols import Benchmark
    from dssl.weights.encoder import Encoder


TEST_SHARE = 0.2
"""Of each class, where there is no test split."""


@dataclass(frozen=True, kw_only=True)
class Arguments(EncoderArguments):
    """Measure an encoder on labelled images: kNN, linear probe, the paper's linear protocols, part of the labels, fine-tuning.

    Protocols: knn, probe, probe-1 and probe-10 (1% and 10% of the labels) need one pass over the images; together they are
    "quick", the default. linear-sgd, linear-lars, finetune-1, finetune-10, finetune and supervised train on augmented images;
    with the others they are "all".
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS", "data": "[IMAGES]"},
        examples=(
            "dssl evaluate runs/photos",
            "dssl evaluate runs/photos photos --against start",
            "dssl evaluate resnet50.pth photos --encoder resnet50 --corruptions",
        ),
    )

    data: str | None = None
    """Labelled images: a folder that contains train and val or only class folders, cifar10:FOLDER or shapes; by default the run's
    images."""
    test: str | None = None
    """Test images, if IMAGES has no test split; by default a fifth of each class is held out."""
    protocols: tuple[str, ...] = ("quick",)
    """What to measure, such as: knn probe linear-sgd."""
    out: Path | None = None
    """The folder for evaluation.json, evaluation.html and the features; by default evaluation in the run's folder."""
    seed: int = 0
    """Seed of splits and training; it does not affect the encoder."""
    against: tuple[str, ...] | None = None
    """Compare image by image with these instead: imagenet, start, untrained, supervised, a run, a file of weights, or
    FILE@ENCODER if the file does not name its encoder. Each runs at its own image size unless --image-size is given."""
    corruptions: bool = False
    """Measure linear probe and kNN on corrupted test images instead: 15 kinds at 5 severities, and geometry; with --against, also
    the differences."""
    corrupted: str | None = None
    """The same with the corrupted images of cifar10c:FOLDER, the official CIFAR-10-C files, for the kinds that it has."""
    corruption_images: int = 2_000
    """Test images for --corruptions, at most; which ones does not depend on the encoder or the seed."""
    epochs: int | None = None
    """Override the epochs of the trained protocols, for quick trials; recorded with the result."""
    references: bool = True
    """Also show what the same images give without learning: the largest class, raw pixels and the untrained encoder."""
    page: bool = True
    """Write the page with the map of the embedding and the nearest neighbours."""

    def __post_init__(self) -> None:
        check_counts(self, "image_size", "epochs", "threads", "corruption_images")


def run(arguments: Arguments) -> int:
    from dssl.evaluation.protocols import chosen_protocols

    protocols = chosen_protocols(arguments.protocols)
    if arguments.against == ():
        raise DsslError(
            "--against is empty: expected imagenet, start, untrained, supervised, a run or a file of weights"
        )
    begun = time.perf_counter()
    from dssl.evaluation.protocols import Benchmark
    from dssl.weights.encoder import FeatureStore

    encoder = open_on_device(arguments)
    data = images_of(arguments.data, encoder)
    out = folder_of(arguments)
    store = FeatureStore(encoder, folder=out / "features")
    train, test = _opened(arguments, data, encoder)
    if made := _made_split(arguments, train, test):
        print(made)
    benchmark = Benchmark.of(store, train, test, seed=arguments.seed, epochs=arguments.epochs, folder=out)
    if arguments.corruptions or arguments.corrupted is not None:
        _corrupt(arguments, benchmark, data=data, out=out)
    elif arguments.against is not None:
        _compare(arguments, benchmark, protocols, data=data, out=out)
    else:
        _evaluate(arguments, benchmark, protocols, out=out)
    print(f"{time.perf_counter() - begun:.1f} s")
    return 0


def folder_of(arguments: Arguments) -> Path:
    """Where results and features are kept."""
    return arguments.out or default_folder(arguments.weights) / "evaluation"


def _evaluate(arguments: Arguments, benchmark: "Benchmark", protocols: tuple[str, ...], *, out: Path) -> None:
    from dssl.evaluation.protocols import evaluate, reference_rows, with_earlier
    from dssl.report import evaluation as page
    from dssl.run import EVALUATION_FILE

    policy = (benchmark.encoder.header.get("config") or {}).get("standard")
    evaluation = evaluate(benchmark, protocols, policy=policy, say=_say)
    if arguments.references:
        _say("reference rows")
        evaluation = dataclasses.replace(evaluation, reference_rows=reference_rows(benchmark, protocols))
    if made := _made_split(arguments, benchmark.train, benchmark.test):
        evaluation = dataclasses.replace(evaluation, notes=(*evaluation.notes, made))
    evaluation, aside = with_earlier(evaluation, benchmark, out / EVALUATION_FILE)
    content = json.dumps(evaluation.plain(), indent=2, default=str)
    _write(
        arguments, out / EVALUATION_FILE, content, page.summary(evaluation), partial(page.html, evaluation, benchmark)
    )
    _track(arguments, benchmark, {f"evaluation/{result.name}": result.accuracy for result in evaluation.results})
    if aside is not None:
        print(f"{aside}: the earlier results, which have other weights, images or another seed")
    print(f"{benchmark.store.computed:,} features computed")


def _compare(arguments: Arguments, benchmark: "Benchmark", protocols: tuple[str, ...], *, data: str, out: Path) -> None:
    from dssl.evaluation.comparison import evaluate_against
    from dssl.report import comparison as page

    others = _others(arguments, benchmark)
    comparisons = evaluate_against(benchmark, others, protocols, reopen=partial(_opened, arguments, data), say=_say)
    compared = [comparison.plain(benchmark.test) for comparison in comparisons]
    plain = {"dssl_version": VERSION, "checkpoint": benchmark.encoder.protocol(), "against": compared}
    content = json.dumps(plain, indent=2, default=str)
    html = partial(page.html, comparisons, benchmark)
    _write(arguments, out / "comparison.json", content, page.summary(comparisons), html)
    rows = {
        f"against {other.name}/{row.name}": row.comparison.difference for other in comparisons for row in other.rows
    }
    _track(arguments, benchmark, rows)


def _corrupt(arguments: Arguments, benchmark: "Benchmark", *, data: str, out: Path) -> None:
    from dssl.evaluation.comparison import as_read_by
    from dssl.evaluation.robustness import CorruptedImages, robustness
    from dssl.report import robustness as page

    others = _others(arguments, benchmark)
    corrupted = CorruptedImages.open(arguments.corrupted, benchmark)
    measured = robustness(benchmark, images=arguments.corruption_images, corrupted=corrupted)
    against = {}
    for word, other in others:
        if other is None:
            raise DsslError(
                f"--against {word}: --corruptions needs a trained encoder: expected a run, a file or another word"
            )
        _say(f"against {word}")
        theirs = as_read_by(other, benchmark, partial(_opened, arguments, data))
        against[word] = robustness(
            theirs, images=arguments.corruption_images, corrupted=corrupted, familiarity=measured.familiarity
        )
    content = json.dumps(page.plain(measured, against), default=str)
    html = partial(page.html, measured, against, benchmark, corrupted)
    _write(arguments, out / "robustness.json", content, page.summary(measured, against), html)
    sets = {name: rows for name, rows in measured.sets().items() if name in ("clean", "corrupted")}
    scores = {protocol: measured.scores(protocol, sets.values()).mean(axis=0).tolist() for protocol in measured.right}
    numbers = {f"{name}/{key}": value for key, row in scores.items() for name, value in zip(sets, row, strict=True)}
    _track(arguments, benchmark, numbers)


def _write(arguments: Arguments, path: Path, content: str, summary: str, html: Callable[..., str]) -> None:
    """Write the numbers and, unless turned off, the page next to them; print the summary and where they are."""
    write_text(path, content + "\n")
    print(f"{summary}\n\n{path}")
    if arguments.page:
        page = path.with_suffix(".html")
        write_text(page, html(command=command_line("evaluate", arguments)))
        print(page)


def _track(arguments: Arguments, benchmark: "Benchmark", numbers: dict[str, float]) -> None:
    """Give the numbers to the trackers of the run that was evaluated; one of its checkpoints by itself need not be its last."""
    from dssl.run import RunFolder
    from dssl.trackers import add_to_summary

    if arguments.weights.is_dir():
        step = int(benchmark.encoder.header.get("step", 0))
        add_to_summary(RunFolder(default_folder(arguments.weights)), numbers, step=step)


def _others(arguments: Arguments, benchmark: "Benchmark") -> "list[tuple[str, Encoder | None]]":
    """The encoders to compare with by the words for them; what was loaded is printed."""
    from dssl.evaluation.comparison import open_other

    others = []
    for word in arguments.against or ():
        other = open_other(word, benchmark.encoder, seed=arguments.seed, image_size=arguments.image_size)
        if other is not None:
            print(other.report)
        others.append((word, other))
    return others


def _say(protocol: str) -> None:
    print(f"{protocol} ...", file=sys.stderr, flush=True)


def _opened(arguments: Arguments, data: str, encoder: "Encoder") -> "tuple[Source, Source]":
    """Both splits, as the encoder reads them; a test split is made where labelled images have none."""
    from dssl.data import NoSplitError, open_source, split_off

    def opened(text: str, split: "Split") -> "Source":
        return open_source(text, split=split, channels=encoder.channels, value_range=encoder.value_range)

    train, test = opened(data, "train"), arguments.test
    if test is not None:
        try:
            return train, opened(test, "test")
        except NoSplitError:
            return train, opened(test, "train")
    try:
        return train, opened(data, "test")
    except NoSplitError:
        return split_off(train, share=TEST_SHARE, seed=arguments.seed)


def _made_split(arguments: Arguments, train: "Source", test: "Source") -> str | None:
    """A line about the test split that was made, if one was."""
    from dssl.data import Subset

    if not isinstance(train, Subset):
        return None
    kept = "the probe and kNN learn from the others; --test names a test set of your own"
    return (
        f"{train.source.name}: no test split, so {TEST_SHARE:.0%} of each class is set aside with seed {arguments.seed}: "
        f"{len(test):,} test images; {kept}"
    )
