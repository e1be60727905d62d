"""``dssl demo``: three runs at equal compute, on built-in images and two CPU cores.

Its settings are in ``settings``. SimSiam first forgets what an untrained network can do and then learns: it needs steps more
than it needs pixels, hence 16 px.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dssl.commands.arguments import command_line
from dssl.commands.options import Usage

if TYPE_CHECKING:
    from dssl.config import RunConfig
    from dssl.data import Source

IMAGES, EPOCHS = 5_000, 16
HEAVY = "ra(2,5)"
TILT = 15
"""Degrees by which the second set of test images is turned."""
RUNS: dict[str, str] = {"two standard pairs": "standard2", "two heavy pairs": "heavy2", "DSSL": "dssl"}
"""From the name of a run to its view graph; each makes four views of an image."""
MEASURED = (
    "All three runs make four views of an image in as many steps: equal compute.",
    "Measured with seeds 0, 1 and 2: two heavy pairs, which attract each other, collapsed every time. "
    "With direction the same heavy views are safe: DSSL was healthy every time.",
    "On these clean images direction does not pay: two standard pairs reached 85.6, 88.0 and 86.8%, "
    "DSSL 82.5, 80.7 and 84.0%. Tilted by 15 degrees: 56.2, 61.7 and 58.9% against 65.2, 59.8 and 62.9%.",
)
"""What came out with three seeds (docs/results/demo.json), as the page and the terminal say it."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train SimSiam three times at equal compute on built-in images: two standard pairs, two heavy pairs, DSSL.

    The same command resumes an interrupted run and shows the finished ones.
    """

    USAGE: ClassVar[Usage] = Usage(
        positional={},
        examples=(
            "dssl demo",
            "dssl demo --seed 1 --out runs/demo-1",
            "dssl report runs/demo",
        ),
    )

    out: Path = Path("runs/demo")
    """The folder for the three runs and the report."""
    seed: int = 0
    """Determines the first weights, the order of the images and their views."""


def settings(graph: str, *, seed: int = 0) -> "RunConfig":
    """The configuration of one of the three runs; they differ in the graph alone."""
    from dssl.config import HealthConfig
    from dssl.methods import SimSiamConfig
    from dssl.recipes import recipe

    usual = recipe("shapes", method="simsiam")
    return dataclasses.replace(
        usual, data=f"figures:{IMAGES}", encoder="whitened", image_size=16, graph=graph, heavy=HEAVY,
        method=SimSiamConfig(hidden=512, output=128, bottleneck=128),
        optimizer=dataclasses.replace(usual.optimizer, rate=0.8, fixed_predictor_rate=True),
        epochs=EPOCHS, seed=seed,
        health=HealthConfig(compare_with_start=False),  # the table has a row for the untrained encoder
        precision="fp32",  # its outcome was measured in fp32, and bf16 gains little on images this small
    )  # fmt: skip


def run(arguments: Arguments) -> int:
    start = time.perf_counter()
    import torch

    from dssl.files import write_text
    from dssl.log import show_messages
    from dssl.report import run_report
    from dssl.report.pictures import draw_gallery
    from dssl.report.run_report import embedding_maps, read_run
    from dssl.text import columns
    from dssl.training.pretrain import train

    show_messages()
    # for so small a network a second thread gains little on idle cores and loses much on busy ones
    torch.set_num_threads(1)
    runs = []
    for number, (name, graph) in enumerate(RUNS.items(), 1):
        print(f"\n{number} of {len(RUNS)}: SimSiam, {name}", file=sys.stderr, flush=True)
        ended = train(settings(graph, seed=arguments.seed), arguments.out / graph, gallery=draw_gallery)
        if ended.signal is not None:
            return ended.exit_code
        runs.append(read_run(arguments.out / graph, name=name))
    print("\nmeasuring clean and tilted images", file=sys.stderr, flush=True)
    verdicts = {one.name: one.verdict.status for one in runs}
    head = ("kNN accuracy, %", "clean", f"tilted by {TILT} degrees", "verdict")
    rows = [
        (name, f"{clean:.1f}", f"{tilted:.1f}", verdicts.get(name, ""))
        for name, clean, tilted in accuracies(arguments.out, seed=arguments.seed)
    ]
    maps, classes, notes = embedding_maps(runs, images=600)
    table = columns([head, *rows], align="<>><")
    numbers = "; ".join(f"{name} {clean} / {tilted}" for name, clean, tilted, _ in rows)
    said = (*MEASURED, f"This run, kNN accuracy in % on clean / tilted images: {numbers}.")
    path = arguments.out / "report.html"
    page = run_report.html(
        runs, command=command_line("demo", arguments), maps=maps, classes=classes, notes=notes, sentences=said,
        title="SimSiam on figures at equal compute: two standard pairs, two heavy pairs, DSSL",
    )  # fmt: skip
    write_text(path, page)
    print("", run_report.summary(runs), "", *table, "", *MEASURED, "", sep="\n")
    print(f"report: {path}\n{time.perf_counter() - start:.0f} s")
    return 0


def accuracies(folder: Path, *, seed: int) -> Iterator[tuple[str, float, float]]:
    """The name of each encoder, with its kNN accuracy in percent on clean and on tilted test images (k = 200).

    Raw pixels and the untrained encoder first, then the runs in the folder. The neighbours are clean training images.
    """
    import torch

    from dssl.data import open_source
    from dssl.evaluation.knn import knn_accuracy
    from dssl.training.knn import NEIGHBOURS, TEMPERATURE
    from dssl.training.prepare import untrained_encoder
    from dssl.weights.load import open_weights

    config = settings("standard2", seed=seed)
    train, test = open_source(config.data), open_source(config.data.partition(":")[0], split="test")
    assert train.labels is not None and test.labels is not None and train.classes is not None  # noqa: PT018
    encoders = {
        "raw pixels": untrained_encoder(config).raw_pixels(),
        "untrained encoder": untrained_encoder(config),
        **{name: open_weights(folder / graph) for name, graph in RUNS.items()},
    }
    labels, test_labels = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    measured = partial(knn_accuracy, k=NEIGHBOURS, temperature=TEMPERATURE, classes=len(train.classes))
    turned = tilted(test)
    for name, encoder in encoders.items():
        bank, clean, other = (encoder.features(images).values for images in (train, test, turned))
        accuracy = [100 * measured(bank, labels, features, test_labels) for features in (clean, other)]
        yield name, accuracy[0], accuracy[1]


def tilted(source: "Source") -> "Source":
    """The images of a source, each turned by ``TILT`` degrees; what comes in at the corners is gray."""
    import numpy as np
    from PIL import Image

    from dssl.data.source import InMemory

    assert source.labels is not None and source.classes is not None  # noqa: PT018
    images = (Image.fromarray(source.image(index)) for index in range(len(source)))
    turned = [np.asarray(image.rotate(TILT, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128))) for image in images]
    return InMemory(
        np.stack(turned), labels=source.labels, classes=source.classes, name=f"{source.name}, tilted",
        caption="tilted", fingerprint=f"{source.fingerprint}/tilted {TILT}",
    )  # fmt: skip
