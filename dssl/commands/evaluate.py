"""``dssl evaluate``: what an encoder has learned, each number with its full protocol."""

import dataclasses
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dssl.commands.arguments import (
    WeightsArguments,
    check_counts,
    command_line,
    default_folder,
    open_encoder,
    show_progress,
)
from dssl.errors import DsslError
from dssl.files import write_text
from dssl.version import VERSION

if TYPE_CHECKING:
    from dssl.data import Source
    from dssl.data.source import Split
    from dssl.evaluation.protocols import Benchmark
    from dssl.weights.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class Arguments(WeightsArguments):
    """Measure an encoder on labelled images: kNN, linear probe, the paper's linear protocols, part of the labels, fine-tuning.

    Protocols: knn, probe, probe-1 and probe-10 (1 % and 10 % of the labels) need one pass over the images; together they are
    "quick", the default. linear-sgd, linear-lars, finetune-1, finetune-10, finetune and supervised train on augmented images;
    with the others they are "all".
    """

    data: str | None = None
    """Labelled images: cifar10:FOLDER, shapes, a folder that contains train and val; by default those of the run."""
    test: str | None = None
    """Test images, if --data has no test split."""
    protocols: tuple[str, ...] = ("quick",)
    """What to measure, such as: knn probe linear-sgd."""
    out: Path | None = None
    """The folder for evaluation.json, evaluation.html and the features; by default evaluation in the run's folder."""
    seed: int = 0
    """Seed of splits and training; it does not affect the encoder."""
    against: tuple[str, ...] | None = None
    """Instead, compare image by image with these: imagenet, start, untrained, supervised, a run or a file of weights."""
    corruptions: bool = False
    """Instead, measure linear probe and kNN on corrupted test images: 15 kinds at 5 severities, and geometry; with --against
    also the differences."""
    corrupted: str | None = None
    """The same with the corrupted images of cifar10c:FOLDER, the official CIFAR-10-C files, for the kinds that it has."""
    corruption_images: int = 2_000
    """Test images for --corruptions, at most; which ones does not depend on the encoder or the seed."""
    epochs: int | None = None
    """Override the epochs of the trained protocols, for quick trials; recorded with the result."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the encoder."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    threads: int | None = None
    """Threads that decode images; by default one per core."""
    page: bool = True
    """Write the page with the map of the embedding and the nearest neighbours."""


def run(arguments: Arguments) -> int:
    from dssl.evaluation.protocols import chosen_protocols

    protocols = chosen_protocols(arguments.protocols)
    check_counts(arguments, ("image_size", "epochs", "threads", "corruption_images"))
    if arguments.against == ():
        raise DsslError(
            "--against is empty: expected imagenet, start, untrained, supervised, a run or a file of weights"
        )
    begun = time.perf_counter()
    from dssl.distributed import pick_device
    from dssl.evaluation.protocols import Benchmark, evaluate, with_earlier
    from dssl.evaluation.store import FeatureStore
    from dssl.precision import half_type
    from dssl.report import evaluation as page
    from dssl.run import EVALUATION_FILE, EVALUATION_PAGE

    encoder = open_encoder(arguments)
    encoder = dataclasses.replace(
        encoder,
        network=encoder.network.to(pick_device(arguments.device)),
        autocast=half_type(arguments.precision),
        threads=arguments.threads,
        progress=show_progress,
    )
    data = _data(arguments, encoder)
    out = arguments.out or default_folder(arguments.weights) / "evaluation"
    store = FeatureStore(encoder, folder=out / "features")
    train, test = _opened(data, arguments.test, encoder)
    benchmark = Benchmark.of(store, train, test, seed=arguments.seed, epochs=arguments.epochs, folder=out)
    if arguments.corruptions or arguments.corrupted is not None:
        return _corrupt(arguments, benchmark, data=data, begun=begun)
    if arguments.against is not None:
        return _compare(arguments, benchmark, protocols, data=data, begun=begun)
    policy = (encoder.header.get("config") or {}).get("standard")
    published = _reference_data(data, benchmark.classes)
    evaluation = evaluate(benchmark, protocols, data=published, policy=policy, say=_say)
    written = out / EVALUATION_FILE
    evaluation, aside = with_earlier(evaluation, benchmark, written)
    write_text(written, json.dumps(evaluation.plain(), indent=2, default=str) + "\n")
    print(page.summary(evaluation))
    print(f"\n{written}")
    if aside is not None:
        print(f"{aside}: what was there before, of other weights, images or seed")
    if arguments.page:
        write_text(out / EVALUATION_PAGE, page.html(evaluation, benchmark, command=command_line("evaluate", arguments)))
        print(out / EVALUATION_PAGE)
    print(f"{store.computed:,} features computed, {time.perf_counter() - begun:.1f} s")
    return 0


def _compare(
    arguments: Arguments, benchmark: "Benchmark", protocols: tuple[str, ...], *, data: str, begun: float
) -> int:
    from dssl.evaluation.comparison import evaluate_against
    from dssl.report import comparison as page

    others = _others(arguments, benchmark)
    comparisons = evaluate_against(
        benchmark, others, protocols, reopen=lambda other: _opened(data, arguments.test, other), say=_say
    )
    assert benchmark.folder is not None
    written = benchmark.folder / "comparison.json"
    compared = [comparison.plain(benchmark.test) for comparison in comparisons]
    plain = {"dssl_version": VERSION, "checkpoint": benchmark.encoder.protocol(), "against": compared}
    write_text(written, json.dumps(plain, indent=2, default=str) + "\n")
    print(page.summary(comparisons))
    print(f"\n{written}")
    if arguments.page:
        target = benchmark.folder / "comparison.html"
        write_text(target, page.html(comparisons, benchmark, command=command_line("evaluate", arguments)))
        print(target)
    print(f"{time.perf_counter() - begun:.1f} s")
    return 0


def _corrupt(arguments: Arguments, benchmark: "Benchmark", *, data: str, begun: float) -> int:
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
                f"--against {word}: there are no weights yet; under corruption expected a run, a file or another word"
            )
        _say(f"against {word}")
        theirs = as_read_by(other, benchmark, lambda encoder: _opened(data, arguments.test, encoder))
        against[word] = robustness(
            theirs, images=arguments.corruption_images, corrupted=corrupted, familiarity=measured.familiarity
        )
    assert benchmark.folder is not None
    written = benchmark.folder / "robustness.json"
    write_text(written, json.dumps(page.plain(measured, against), default=str) + "\n")
    print(page.summary(measured, against))
    print(f"\n{written}")
    if arguments.page:
        target = benchmark.folder / "robustness.html"
        content = page.html(measured, against, benchmark, corrupted, command=command_line("evaluate", arguments))
        write_text(target, content)
        print(target)
    print(f"{time.perf_counter() - begun:.1f} s")
    return 0


def _others(arguments: Arguments, benchmark: "Benchmark") -> "list[tuple[str, Encoder | None]]":
    """The encoders to compare with by the words for them; what was loaded is printed."""
    from dssl.evaluation.comparison import open_other

    others = []
    for word in arguments.against or ():
        other = open_other(word, benchmark.encoder, seed=arguments.seed)
        if other is not None:
            print(other.report)
        others.append((word, other))
    return others


def _say(protocol: str) -> None:
    if sys.stderr.isatty():
        print(protocol, file=sys.stderr)


def _data(arguments: Arguments, encoder: "Encoder") -> str:
    data: str | None = arguments.data or (encoder.header.get("config") or {}).get("data")
    if data is None:
        raise DsslError(
            "no images given: expected --data, such as cifar10:FOLDER or a folder that contains train and val"
        )
    return data


def _opened(data: str, test: str | None, encoder: "Encoder") -> "tuple[Source, Source]":
    """Both splits, as the encoder reads them."""
    from dssl.data import NoSplitError, open_source

    def opened(text: str, split: "Split") -> "Source":
        return open_source(text, split=split, channels=encoder.channels, value_range=encoder.value_range)

    train = opened(data, "train")
    if test is not None:
        try:
            return train, opened(test, "test")
        except NoSplitError:
            return train, opened(test, "train")
    try:
        return train, opened(data, "test")
    except NoSplitError as error:
        raise DsslError(f"{error}; or name them with --test") from None


def _reference_data(data: str, classes: tuple[str, ...]) -> str:
    """Which published results are about the same images."""
    if data.startswith("cifar10:"):
        return "cifar10"
    if len(classes) == 1000 and all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return "imagenet"
    return ""
