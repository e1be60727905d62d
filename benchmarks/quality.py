"""Time to quality: kNN accuracy against the wall clock, ours against the paper's way, from the same seeds.

    python -m benchmarks.quality --data cifar10:FOLDER [--epochs 8] [--seeds 0] [--limit 10000]

The settings are those of the recipe ``shapes`` (small encoder, batch 64) on 10,000 images: the schedule is laid over as
many epochs as are asked for. Both have the same precision, start from the same weights and see the same images; each epoch of
the one is followed by the same epoch of the other, so that the machine is the same for both. Measuring accuracy is not counted.
"""

import dataclasses
import time
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks import charts, record
from benchmarks.train_ours import Ours
from benchmarks.train_paper import PaperViews, PaperWay, Workers
from dssl import rng
from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.data import Source
from dssl.evaluation.knn import knn_accuracy
from dssl.models import build_encoder
from dssl.optim import learning_rate, peak_rate, set_learning_rate
from dssl.precision import choose_precision
from dssl.recipes import recipe
from dssl.training.prepare import open_data, open_test_data
from dssl.weights.encoder import Encoder

K, TEMPERATURE = 200, 0.1


def accuracy(encoder: torch.nn.Module, bank: Source, queries: Source) -> float:
    """The same protocol for both, in fp32."""
    values = [
        Encoder(network=encoder, name="small", image_size=32, normalization=CIFAR10).features(source).values
        for source in (bank, queries)
    ]
    assert bank.labels is not None
    assert queries.labels is not None
    labels = [torch.from_numpy(source.labels) for source in (bank, queries)]
    return 100 * knn_accuracy(
        values[0], labels[0], values[1], labels[1], k=K, temperature=TEMPERATURE, classes=int(labels[0].max()) + 1
    )


class Run(Protocol):
    """One side of the race."""

    name: str
    encoder: torch.nn.Module

    def epoch(self, number: int, steps: int, total: int) -> None: ...
    def close(self) -> None: ...


class OurRun:
    name = "dssl"

    def __init__(self, config: RunConfig, source: Source, *, threads: int, bf16: bool) -> None:
        self.config = config
        self.job = Ours(config, source, threads=threads, bf16=bf16)
        self.encoder = self.job.method.encoder

    def epoch(self, number: int, steps: int, total: int) -> None:
        for step in range(number * steps, (number + 1) * steps):
            set_rate(self.job.optimizer, self.config, step, steps, total)
            self.job.step(scheduled=True)

    def close(self) -> None:
        self.job.close()


class PaperRun:
    name = "paper's way"

    def __init__(self, config: RunConfig, images: np.ndarray, *, method: str, bf16: bool) -> None:
        self.config, self.images = config, images
        self.job = PaperWay(config, method, images, bf16=bf16)
        self.job.close()  # its endless loader; every epoch has one of its own, as in a script
        self.encoder = self.job.method.encoder

    def epoch(self, number: int, steps: int, total: int) -> None:
        order = rng.permutation(rng.key(self.config.seed, "order", number), len(self.images))
        views = PaperViews(self.images, self.config.graph, order=order.tolist())
        loader = Workers(views, self.config.batch_size)
        for step in range(number * steps, (number + 1) * steps):
            set_rate(self.job.optimizer, self.config, step, steps, total)
            self.job.train_on(next(loader))
        loader.close()

    def close(self) -> None:
        pass


def set_rate(optimizer: torch.optim.Optimizer, config: RunConfig, step: int, steps: int, total: int) -> None:
    peak = peak_rate(config.optimizer.rate, config.batch_size)
    warmup = round(config.optimizer.warmup_epochs * steps)
    set_learning_rate(optimizer, learning_rate(step, peak=peak, total=total, warmup=warmup), fixed=peak)


def race(config: RunConfig, method: str, *, threads: int, bf16: bool) -> dict[str, list[dict[str, float]]]:
    source, test = open_data(config), open_test_data(config)
    assert test is not None
    images = np.stack([source.image(index) for index in range(len(source))])
    runs: list[Run] = [
        OurRun(config, source, threads=threads, bf16=bf16),
        PaperRun(config, images, method=method, bf16=bf16),
    ]
    steps = len(source) // config.batch_size
    curves: dict[str, list[dict[str, float]]] = {run.name: [] for run in runs}
    spent = dict.fromkeys(curves, 0.0)
    for number in range(config.epochs):
        for run in runs:
            start = time.perf_counter()
            run.epoch(number, steps, steps * config.epochs)
            spent[run.name] += time.perf_counter() - start
            record.check_threads(threads)
            found = accuracy(run.encoder, source, test)
            curves[run.name].append({"epoch": number + 1, "seconds": spent[run.name], "knn": found})
            print(
                f"seed {config.seed}, epoch {number + 1}, {run.name:12} {spent[run.name]:7.1f} s, kNN {found:.2f} %",
                flush=True,
            )
    for run in runs:
        run.close()
    return curves


def to_reach(curve: list[dict[str, float]], level: float) -> float | None:
    """Seconds until an accuracy was first reached, between two measurements in proportion."""
    before = {"seconds": 0.0, "knn": 0.0}
    for point in curve:
        if point["knn"] >= level:
            share = (level - before["knn"]) / max(point["knn"] - before["knn"], 1e-9)
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return None


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument(
        "--data", default="shapes", help="cifar10:FOLDER, or another source with labels and a test split"
    )
    parser.add_argument("--method", default="simsiam")
    parser.add_argument("--graph", default="dssl")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=record.CORES)
    options = parser.parse_args()
    clock = record.Clock()
    record.set_threads(options.threads)
    base = recipe("shapes", method=options.method)
    encoder = build_encoder(base.encoder, image_size=base.image_size)
    precision, _ = choose_precision(encoder, image_size=base.image_size, channels=3, device=torch.device("cpu"))
    bf16 = precision == "bf16"
    warmup = min(base.optimizer.warmup_epochs, options.epochs / 4)
    results: list[dict[str, Any]] = []
    for seed in options.seeds:
        config = dataclasses.replace(
            base, data=options.data, graph=options.graph, heavy="ra(2,5)", seed=seed, epochs=options.epochs,
            limit=options.limit, optimizer=dataclasses.replace(base.optimizer, warmup_epochs=warmup),
        )  # fmt: skip
        curves = race(config, options.method, threads=options.threads, bf16=bf16)
        level = min(max(point["knn"] for point in curve) for curve in curves.values())
        times = {name: to_reach(curve, level) for name, curve in curves.items()}
        ours, theirs = times["dssl"], times["paper's way"]
        assert ours is not None
        assert theirs is not None
        results.append(
            {"seed": seed, "curves": curves, "level": level, "seconds_to_level": times, "ratio": theirs / ours}
        )
        print(f"seed {seed}: {level:.1f} % in {ours:.0f} s, the paper's way in {theirs:.0f} s ({theirs / ours:.1f}x)")
    content = {
        "data": options.data.partition(":")[0], "method": options.method, "graph": options.graph, "epochs": options.epochs,
        "images": options.limit, "precision": "bf16" if bf16 else "fp32",
        "paper_precision": "bf16" if bf16 else "fp32", "k": K, "temperature": TEMPERATURE,
        "threads": options.threads, "results": results,
    }  # fmt: skip
    record.write("quality", clock, content, folder=options.out)
    lines = {
        f"{name}, seed {result['seed']}": ([point["seconds"] for point in curve], [point["knn"] for point in curve])
        for result in results for name, curve in result["curves"].items()
    }  # fmt: skip
    charts.curves(lines, options.out / "quality.png", x="seconds of training", y="kNN accuracy, %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
