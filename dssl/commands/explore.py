"""``dssl explore``: what an encoder shows of images without labels."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dssl.commands.arguments import (
    EncoderArguments,
    check_counts,
    command_line,
    default_folder,
    images_of,
    open_on_device,
    show_progress,
)
from dssl.commands.options import Usage
from dssl.errors import DsslError, within

if TYPE_CHECKING:
    from dssl.data import Source
    from dssl.evaluation.explore import Exploration
    from dssl.report.explore import Query
    from dssl.weights.encoder import Features, FeatureStore

_QUERIES = 10


@dataclass(frozen=True, kw_only=True)
class Arguments(EncoderArguments):
    """Look at images without labels: what to label first, a map, neighbours, near-duplicates and outliers.

    It writes a page that opens from disk and a CSV file for each question. It keeps the features: a second call is fast.
    WEIGHTS may also be the .npz that dssl embed wrote for the same images.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={"weights": "WEIGHTS", "data": "[IMAGES]"},
        examples=(
            "dssl explore runs/photos",
            "dssl explore runs/photos photos --label 100",
            "dssl explore photos.npz photos --query photos/1.jpg",
        ),
    )

    data: str | None = None
    """Images: a folder, a list of files, tar or Parquet shards, cifar10:FOLDER, shapes; by default the run's images."""
    query: tuple[str, ...] = ()
    """Show the nearest neighbours of these: image files, or names as in the CSV files; by default of some medoids."""
    label: int | None = None
    """How many images to propose for labelling, one per cluster; by default 50, or a tenth of fewer than 500 images."""
    duplicates: float | None = None
    """The cosine above which two images are near-duplicates; by default it is measured."""
    split: Literal["train", "test"] = "train"
    """The split to look at."""
    out: Path | None = None
    """The folder for explore.html, the CSV files and the features; by default explore in the run's folder."""
    seed: int = 0
    """Seed of the clusters and the map."""

    def __post_init__(self) -> None:
        check_counts(self, "label", "image_size", "threads")
        within("duplicates", self.duplicates, "[-1, 1]")


def run(arguments: Arguments) -> int:
    begun = time.perf_counter()
    from dssl.evaluation.explore import explore
    from dssl.report import explore as page

    out = arguments.out or default_folder(arguments.weights) / "explore"
    source, features, store = _features(arguments, out)
    count = len(features.rows)
    label = arguments.label or min(50, max(1, count // 10))
    if label > count:
        raise DsslError(f"--label is {label}: {source.name} has {count:,} readable images; expected at most {count:,}")
    found = explore(
        features.values, clusters=label, seed=arguments.seed, threshold=arguments.duplicates, progress=show_progress
    )
    queries = _queries(arguments, found, source, features, store)
    report = page.Report(source=source, features=features, exploration=found, queries=queries, seed=arguments.seed)
    files = page.write(report, out, command=command_line("explore", arguments))
    print(f"{page.summary(report)}\n")
    print(*files, sep="\n")
    print(f"{count:,} images of the {arguments.split} split, {features.unreadable:,} unreadable", end="; ")
    print(f"{0 if store is None else store.computed:,} features computed; {time.perf_counter() - begun:.1f} s")
    return 0


def _features(arguments: Arguments, out: Path) -> "tuple[Source, Features, FeatureStore | None]":
    """The images, their features, and what gives those of further images (nothing, for a file of embeddings)."""
    from dssl.data import open_source
    from dssl.evaluation.embed import read_embeddings
    from dssl.weights.encoder import FeatureStore

    if arguments.weights.suffix == ".npz":
        if arguments.data is None:
            raise DsslError(
                f"{arguments.weights}: no images given: expected the images that it contains the embeddings of"
            )
        source = open_source(arguments.data, split=arguments.split)
        return source, read_embeddings(arguments.weights, source), None
    encoder = open_on_device(arguments)
    data = images_of(arguments.data, encoder)
    source = open_source(data, split=arguments.split, channels=encoder.channels, value_range=encoder.value_range)
    store = FeatureStore(encoder, folder=out / "features")
    return source, store.of(source, allow_unreadable=True), store


def _queries(
    arguments: Arguments, found: "Exploration", source: "Source", features: "Features", store: "FeatureStore | None"
) -> "list[Query]":
    """The images that were asked for, or some medoids, each with its nearest neighbours."""
    from dssl.data.folder import GivenFiles
    from dssl.data.source import expanded
    from dssl.evaluation.explore import NEAREST
    from dssl.evaluation.knn import neighbours
    from dssl.report.explore import Query

    def of_row(row: int) -> Query:
        nearest = zip(found.nearest[row].tolist(), found.similarity[row].tolist(), strict=True)
        return Query(source, int(features.rows[row]), list(nearest))

    if not arguments.query:
        return [of_row(row) for row in found.medoids[:_QUERIES].tolist()]
    rows = {source.label_of(index): row for row, index in enumerate(features.rows.tolist())}
    queries = [of_row(rows[name]) for name in arguments.query if name in rows]
    if paths := [expanded(name) for name in arguments.query if name not in rows]:
        if store is None:
            raise DsslError(f"--query {paths[0]}: not a name in {arguments.weights}; other images need the encoder")
        if missing := [path for path in paths if not Path(path).exists()]:
            raise DsslError(
                f"--query is {missing[0]}, which does not exist: expected an image file, or a name in clusters.csv"
            )
        absolute = [os.fsencode(Path(path).absolute()) for path in paths]
        files = GivenFiles(absolute, channels=store.encoder.channels, value_range=store.encoder.value_range)
        values = store.of(files, allow_unreadable=False).values
        similarity, nearest = (part.tolist() for part in neighbours(features.values, values, k=NEAREST))
        for index in range(len(paths)):
            queries.append(Query(files, index, list(zip(nearest[index], similarity[index], strict=True))))
    return queries
