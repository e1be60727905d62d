"""What an encoder learns in a CPU-second: one short run of SimCLR or SimSiam per line, scored on held-out training images.

python -m benchmarks.encoder_search run NAME --data FOLDER [--groups 48.1.max/96.1.max/256.1.none ...] >> FILE.jsonl
python -m benchmarks.encoder_search table FILE.jsonl

An encoder is written as its frozen first layer (patch, stride, padding, filters) and its groups (width.convolutions.pooling).
45,000 of the training images are trained on, the other 5,000 judge; the test images are never read.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import rng
from dssl.augment import CIFAR10, ViewMaker
from dssl.config import OptimizerConfig
from dssl.data import Subset
from dssl.data.cifar10 import Cifar10
from dssl.data.loader import Batches
from dssl.evaluation.knn import knn_accuracy
from dssl.evaluation.probe import Problem
from dssl.graph import named_graph
from dssl.methods import SimCLRConfig, SimSiamConfig
from dssl.methods.simclr import SimCLR
from dssl.methods.simsiam import SimSiam
from dssl.objective import Objective
from dssl.optim import build_optimizer, learning_rate, set_learning_rate
from dssl.weights.encoder import Encoder

HELD_OUT, BANK = 5_000, 10_000
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
POOLINGS: dict[str, nn.Module] = {"max": nn.MaxPool2d(2), "avg": nn.AvgPool2d(2), "none": nn.Identity()}


class Candidate(nn.Module):
    """A frozen whitening layer and its negatives, then groups of convolutions, then pooling."""

    filters: Tensor

    def __init__(self, images: Tensor, options: argparse.Namespace) -> None:
        super().__init__()
        size, self.stride, self.padding, count = (int(number) for number in options.front.split(","))
        patches = F.unfold(images, size, stride=max(1, size // 2)).transpose(1, 2).reshape(-1, 3 * size**2).double()
        variances, axes = torch.linalg.eigh(patches.T.cov())
        rows = (axes / (variances + 5e-4).sqrt()).T.flip(0)[:count]
        self.register_buffer("filters", rows.reshape(count, 3, size, size).float())
        self.front = nn.Sequential(ACTIVATIONS[options.activation](), POOLINGS[options.front_pool])
        self.groups = nn.ModuleList()
        self.residual, self.final = options.residual, options.final
        before = 2 * count
        for text in options.groups.split("/"):
            width, depth, pooling = text.split(".")
            group = nn.ModuleList()
            for number in range(int(depth)):
                after = int(width)
                convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
                nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
                pool = POOLINGS[pooling] if number == 0 else nn.Identity()
                group.append(nn.Sequential(convolution, pool, nn.BatchNorm2d(after)))
                before = after
            self.groups.append(group)
        self.activation = ACTIVATIONS[options.activation]()

    def forward(self, images: Tensor) -> Tensor:
        white = F.conv2d(images, self.filters, stride=self.stride, padding=self.padding)
        x: Tensor = self.front(torch.cat([white, -white], dim=1))
        for group in self.groups:
            assert isinstance(group, nn.ModuleList)
            for number, layer in enumerate(group):
                x = self.activation(layer(x) + x if self.residual and number else layer(x))
        mean, largest = x.mean(dim=(2, 3)), x.amax(dim=(2, 3))
        if self.final == "quadrants":
            return F.adaptive_avg_pool2d(x, 2).flatten(1)
        return {"mean": mean, "max": largest, "both": torch.cat([mean, largest], dim=1)}[self.final]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("file", type=Path)
    one = commands.add_parser("run")
    one.add_argument("name")
    one.add_argument("--data", required=True)
    one.add_argument("--front", default="4,2,1,24")
    one.add_argument("--front-pool", default="none", choices=POOLINGS)
    one.add_argument("--groups", default="48.1.max/96.1.max/256.1.none")
    one.add_argument("--activation", default="relu", choices=ACTIVATIONS)
    one.add_argument("--residual", action="store_true")
    one.add_argument("--final", default="mean", choices=("mean", "max", "both", "quadrants"))
    one.add_argument("--method", default="simclr", choices=("simclr", "simsiam"))
    one.add_argument("--heads", default="256,128,64", help="SimSiam's hidden width, output and bottleneck")
    one.add_argument("--temperature", type=float, default=0.2)
    one.add_argument("--optimizer", default="sgd", choices=("sgd", "lars", "adamw"))
    one.add_argument("--peak", type=float, default=0.1)
    one.add_argument("--weight-decay", type=float, default=5e-4)
    one.add_argument("--batch", type=int, default=128)
    one.add_argument("--bf16", action="store_true")
    one.add_argument("--views", type=int, default=64_000)
    one.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command == "run":
        print(json.dumps(run(options)))
    else:
        print("\n".join(table([json.loads(line) for line in options.file.read_text().splitlines()])))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, score, and say how long it took, in CPU time: the machine may be busy with other work."""
    torch.set_num_threads(1)
    images = Cifar10(options.data)
    order = rng.permutation(rng.key(7, "search"), len(images))
    train, held_out = np.sort(order[:-HELD_OUT]), np.sort(order[-HELD_OUT:])
    torch.manual_seed(options.seed)
    first = np.stack([images.image(int(index)) for index in train[:4000]])
    mean, deviation = (torch.tensor(values) for values in (CIFAR10.mean, CIFAR10.std))
    encoder = Candidate(((torch.from_numpy(first) / 255 - mean) / deviation).permute(0, 3, 1, 2), options)
    dim = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
    hidden, output, bottleneck = (int(number) for number in options.heads.split(","))
    method: SimCLR | SimSiam = (
        SimCLR(encoder, feature_dim=dim, settings=SimCLRConfig(temperature=options.temperature))
        if options.method == "simclr"
        else SimSiam(
            encoder, feature_dim=dim, settings=SimSiamConfig(hidden=hidden, output=output, bottleneck=bottleneck)
        )
    )
    method.to(memory_format=torch.channels_last)
    graph = named_graph("standard")
    objective = Objective(method, graph)
    settings = OptimizerConfig(name=options.optimizer, weight_decay=options.weight_decay)
    optimizer = build_optimizer(method, settings)
    maker = ViewMaker(
        graph.made, size=32, seed=options.seed, policies={"standard": "standard-cifar"}, normalization=CIFAR10
    )
    steps = options.views // (2 * options.batch)
    used = 0.0
    source = Subset(images, train)
    with Batches(source, maker, batch_size=options.batch, seed=options.seed, steps=steps, threads=1) as batches:
        for step in range(steps):
            if step == 2:  # the kernels are compiled by now
                used = time.process_time()
            rate = learning_rate(step, peak=options.peak, total=steps, warmup=int(0.05 * steps))
            set_learning_rate(optimizer, rate, fixed=rate)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                loss = objective(batches.at(step).views).total
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step} of {steps}: loss {float(loss.detach()):.3f}", file=sys.stderr)
    used = time.process_time() - used if steps else 0.0
    scores = score(encoder, images, train[rng.permutation(rng.key(8, "bank"), len(train))[:BANK]], held_out)
    milliseconds = round(1000 * used / max(1, (steps - 2) * 2 * options.batch), 3)
    about = {"dim": dim, "ms_per_view": milliseconds, "settings": describe(options)}
    return {key: value for key, value in vars(options).items() if key not in ("command", "data")} | about | scores


def describe(options: argparse.Namespace) -> str:
    """The method and how it was trained, for the table."""
    head = f"temperature {options.temperature:g}" if options.method == "simclr" else f"heads {options.heads}"
    rate = f"{options.optimizer} {options.peak:g}, batch {options.batch}, decay {options.weight_decay:g}"
    network = f"{options.activation}, pooled {options.final}{', residual' if options.residual else ''}"
    pooled = "" if options.front_pool == "none" else f", first layer pooled {options.front_pool}"
    return f"{options.method}, {head}, {rate}; {network}{pooled}{', bf16' if options.bf16 else ''}"


def score(encoder: nn.Module, images: Cifar10, bank: Any, held_out: Any) -> dict[str, float]:
    """kNN and the best of four linear probes on the held-out images, in percent."""
    assert images.labels is not None
    features = [
        Encoder(network=encoder, name="candidate", image_size=32, normalization=CIFAR10)
        .features(images, indices=np.sort(rows))
        .values
        for rows in (bank, held_out)
    ]
    labels = [torch.from_numpy(images.labels[np.sort(rows)]) for rows in (bank, held_out)]
    knn = knn_accuracy(features[0], labels[0], features[1], labels[1], k=20, temperature=0.1, classes=10)
    problem = Problem(features[0], labels[0], classes=10)
    linear = max(
        float((problem.solve(strength, tolerance=2e-5, most=100).predict(features[1]) == labels[1]).double().mean())
        for strength in (1e-3, 1e-4, 1e-5, 1e-6)
    )
    return {"linear": round(100 * linear, 2), "knn": round(100 * knn, 2)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each run, in the order in which they were made."""
    lines = [
        "| run | first layer | groups | method and settings | views | linear | kNN | ms per view |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['front']} | {row['groups']} | {row['settings']} | {row['views']:,} | {row['linear']:.1f} | "
            f"{row['knn']:.1f} | {row['ms_per_view'] or '-'} |"
        )
    return lines


if __name__ == "__main__":
    main()
