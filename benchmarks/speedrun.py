"""The CPU speedrun: how well can two cores learn CIFAR-10 without labels, and in how many minutes? docs/results/speedrun.md

python -m benchmarks.speedrun --data FOLDER --epochs 10 --seed 0 [--held-out]

Makes encoders of the 50,000 training images without their labels, and notes the wall clock from the start of the process until
they are final. Only then a linear probe learns from all labels and is measured on the test images. With ``--held-out`` it learns
from 45,000 labels and is measured on the other 5,000 images: settings are chosen like that. Every measurement is a line of
docs/results/speedrun.jsonl, of which the page is made.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.encoder_search import HELD_OUT
from benchmarks.record import CORES, processor
from dssl import rng
from dssl.augment import CIFAR10
from dssl.cli import keep_freed_memory
from dssl.config import RunConfig
from dssl.data import Source, open_source
from dssl.evaluation.probe import fit
from dssl.models.for_cpus import WhitenedEncoder
from dssl.text import markdown
from dssl.training.prepare import images_to_whiten
from dssl.training.pretrain import train
from dssl.weights.encoder import Encoder
from dssl.weights.load import open_weights
from dssl_reproduce.scales import SCALES

PAGE = Path(__file__).parent.parent / "docs" / "results" / "speedrun.md"
ROWS = PAGE.with_suffix(".jsonl")
CELLS = 4
"""Rows and columns of the map that the encoder ends with at 32 px: nothing is pooled."""
Rows = dict[str, tuple[int, int, bool]]
"""What is measured: by name, how many networks, rows and columns of their pooled map, and whether with the patches."""
OF_ONE_NETWORK: Rows = {"pooled by quadrants": (1, 2, False), "its last map": (1, CELLS, False)}
ROWS_OF_A_RUN: Rows = {
    "random patches, nothing trained": (0, 0, True),
    **{f"one network, {name}": row for name, row in OF_ONE_NETWORK.items()},
    # with the last maps in place of quadrants, the probe of 11,392 dimensions took 20 minutes and 17 GB
    "a network per core, pooled by quadrants, and random patches": (CORES, 2, True),
    "a network per core, their last maps": (CORES, CELLS, False),
}
_ABOUT = """<!-- written by `python -m benchmarks.speedrun`: do not edit -->

How well can two CPU cores learn CIFAR-10 without labels, and in how many minutes?

- **Data**: the 50,000 training images without labels.
- **Clock**: wall clock from the start of the process until the encoder is final.
  The machine should be idle; the [log](../log.md) says when it was not.
  Computing features and solving the probe come after it.
- **Score**: a linear probe on standardized features and all 50,000 labels, measured on the 10,000 test images.
  It is a logistic regression whose strength is chosen on a part of the training images.
  The test images are read once for each row and seed.
- **Settings** are chosen on held-out training images ([rates](tuning.md)).
  Every row that was measured is listed: none was chosen by its score.
- **Networks**: `whitened-quadrants`, SimCLR with the graph `fastsiam`, one network on each core at the same time.
  Rows with one network use one core only.
- **Peers** (`python -m benchmarks.speedrun_peers`) train their own SimCLR on the same encoder at the same precision.
  They get as many minutes of one core as our first seed took.
  An epoch of theirs has two views of an image, and one of ours four.
- **Dimensions** are those that the probe sees.
  More of them are not free for whoever uses the encoder.
"""


class RandomPatches(nn.Module):
    """Responses to whitened random patches beyond a threshold, pooled by quadrants (Coates and Ng, 2011): nothing is trained."""

    filters: Tensor
    offset: Tensor

    def __init__(self, images: Tensor, *, count: int = 400, size: int = 6, threshold: float = 0.25) -> None:
        super().__init__()
        self.size, self.threshold = size, threshold
        patches = F.unfold(images, size).transpose(1, 2).flatten(0, 1)
        patches = patches[torch.randint(len(patches), (200_000,))]
        patches = patches - patches.mean(dim=1, keepdim=True)
        patches = patches / (patches.square().mean(dim=1, keepdim=True) + self.floor).sqrt()
        mean = patches.mean(dim=0)
        variances, axes = torch.linalg.eigh((patches - mean).T.cov().double())
        whitening = ((axes / (variances + 0.1).sqrt()) @ axes.T).float()
        rows = F.normalize((patches[:count] - mean) @ whitening, dim=1) @ whitening
        self.register_buffer("offset", (rows @ mean).view(1, -1, 1, 1))
        # without its mean, a filter ignores the mean of the patch that it meets
        rows = rows - rows.mean(dim=1, keepdim=True)
        self.register_buffer("filters", rows.view(count, 3, size, size).contiguous(memory_format=torch.channels_last))

    floor = 2.5e-3
    """Added to the variance of a patch, so that the noise of flat ones is not amplified."""

    def forward(self, images: Tensor) -> Tensor:
        mean = F.avg_pool2d(images.mean(dim=1, keepdim=True), self.size, stride=1)
        square = F.avg_pool2d(images.square().mean(dim=1, keepdim=True), self.size, stride=1)
        scale = (square - mean.square() + self.floor).rsqrt()
        response = F.conv2d(images, self.filters) * scale - self.offset
        halves = [F.relu(sign * response - self.threshold) for sign in (1, -1)]
        return torch.cat([F.adaptive_avg_pool2d(half, 2).flatten(1) for half in halves], dim=1)


def seconds_since_start() -> float:
    """Of this process, imports included (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def config_of(data: str, *, epochs: int, seed: int) -> RunConfig:
    """SimCLR with four means at the scale ``hour``, for so many epochs."""
    config = SCALES["hour"].settings("cifar10", "simclr")
    return dataclasses.replace(
        config, data=data, graph="fastsiam", epochs=epochs, seed=seed, threads=1, torch_threads=1, knn_every=0,
        optimizer=dataclasses.replace(config.optimizer, warmup_epochs=0.05 * epochs),
        health=dataclasses.replace(config.health, compare_with_start=False),
    )  # fmt: skip


def train_networks(data: str, folder: Path, *, epochs: int, seed: int) -> list[Path]:
    """One network per core, each with a seed of its own; their runs."""
    places = [folder / str(number) for number in range(CORES)]
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=_train, args=(config_of(data, epochs=epochs, seed=CORES * seed + number), place))
        for number, place in enumerate(places)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a training ended with exit code {process.exitcode}"
    return places


def _train(config: RunConfig, place: Path) -> None:
    keep_freed_memory()
    train(config, place)


def standardized(encoder: Encoder, train: Source, test: Source) -> tuple[Tensor, Tensor]:
    """Features of both, each dimension with mean 0 and variance 1 over the training images."""
    values, others = (encoder.features(source).values for source in (train, test))
    mean, deviation = values.mean(dim=0), values.std(dim=0) + 1e-5
    return (values - mean) / deviation, (others - mean) / deviation


def measure(
    networks: Sequence[Encoder], patches: Encoder | None, data: str, *, rows: Rows, held_out: bool, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dimensions and accuracy of one row after the other."""
    train, test = open_source(data), open_source(data, split="train" if held_out else "test")
    kept = np.arange(len(train))
    asked = np.arange(len(test))
    if held_out:
        order = rng.permutation(rng.key(7, "search"), len(train))
        kept, asked = np.sort(order[:-HELD_OUT]), np.sort(order[-HELD_OUT:])
    assert train.labels is not None
    assert test.labels is not None
    labels, truth = torch.from_numpy(train.labels[kept]), torch.from_numpy(test.labels[asked])
    features: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for name, (count, cells, with_patches) in rows.items():
        parts = []
        for number, encoder in enumerate(networks[:count]):
            if (number, cells) not in features:
                assert isinstance(encoder.network, WhitenedEncoder)
                encoder.network.pooled = cells
                features[number, cells] = standardized(encoder, train, test)
            parts.append(features[number, cells])
        if with_patches:
            assert patches is not None
            if (-1, 0) not in features:
                features[-1, 0] = standardized(patches, train, test)
            parts.append(features[-1, 0])
        values, others = (torch.cat(blocks, dim=1) for blocks in zip(*parts, strict=True))
        probe, _ = fit(values[kept], labels, classes=10, seed=seed, device=torch.device("cpu"))
        right = probe.predict(others[asked]) == truth
        yield name, {"dimensions": values.shape[1], "accuracy": round(100 * float(right.double().mean()), 2)}


def about(seed: int) -> dict[str, Any]:
    """When, where and of what a row was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "date": time.strftime("%Y-%m-%d"), "commit": commit.stdout.strip(), "seed": seed, "cores": CORES,
        "processor": processor(), "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def note(row: str, result: dict[str, Any], *, epochs: float, minutes: float, about: dict[str, Any]) -> None:
    """One more line, and the page with it."""
    line = {"row": row, "epochs": epochs, "minutes": round(minutes, 2)} | result | about
    with ROWS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    write_page()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=10, help="of each network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", default=list(ROWS_OF_A_RUN), choices=ROWS_OF_A_RUN, help="by default all")
    parser.add_argument("--held-out", action="store_true", help="measure on 5,000 training images, and keep nothing")
    options = parser.parse_args()
    keep_freed_memory()
    data, facts = f"cifar10:{options.data}", about(options.seed)
    torch.manual_seed(rng.key(options.seed, "speedrun") % 2**63)
    config = config_of(data, epochs=options.epochs, seed=options.seed)
    filters = RandomPatches(images_to_whiten(config, open_source(data), CIFAR10))
    minutes = {0: seconds_since_start() / 60}
    with tempfile.TemporaryDirectory() as folder:
        runs = train_networks(data, Path(folder), epochs=options.epochs, seed=options.seed)
        minutes[CORES] = minutes[1] = seconds_since_start() / 60
        print(f"the encoders are final after {minutes[CORES]:.1f} minutes", flush=True)
        networks = [open_weights(run) for run in runs]
        patches = Encoder(
            network=filters, name="patches", image_size=32, normalization=CIFAR10, batch_size=32,
            autocast=torch.bfloat16 if "bf16" in facts["processor"] else None,
        )  # fmt: skip
        rows = {name: ROWS_OF_A_RUN[name] for name in options.rows}
        for name, result in measure(networks, patches, data, rows=rows, held_out=options.held_out, seed=options.seed):
            print(f"{name}: {result}", flush=True)
            if not options.held_out:
                count = rows[name][0]
                note(name, result, epochs=options.epochs if count else 0, minutes=minutes[count], about=facts)


def write_page() -> None:
    """The page, from the lines."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    machines = {
        machine: chr(ord("A") + number)
        for number, machine in enumerate(dict.fromkeys(f"{row['cores']} cores of {row['processor']}" for row in rows))
    }
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in rows:
        machine = machines[f"{row['cores']} cores of {row['processor']}"]
        groups.setdefault((row["row"], row["epochs"], machine), []).append(row)
    lines = []
    for (name, epochs, machine), runs in sorted(groups.items(), key=lambda item: item[1][0]["minutes"]):
        scores = [run["accuracy"] for run in runs]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        clock = max(run["minutes"] for run in runs)
        lines.append([
            name, f"{epochs:g}" if epochs else "–", f"{clock:.1f}", machine, f"{runs[0]['dimensions']:,}",
            f"{statistics.fmean(scores):.1f}{spread}", str(len(runs)), runs[-1]["date"], runs[-1]["commit"],
        ])  # fmt: skip
    head = ["encoder", "epochs", "minutes", "machine", "dimensions", "linear accuracy, %", "seeds", "date", "commit"]
    named = [f"- **{letter}**: {machine}" for machine, letter in machines.items()]
    text = ["# The CPU speedrun", "", _ABOUT, *markdown(head, lines), "", "Machines:", "", *named, ""]
    PAGE.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
