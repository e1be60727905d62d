"""A training step end to end: ours against the way the paper's script does it, and against pure compute, in one run.

    python -m benchmarks.train [--encoder resnet18-cifar] [--batch 128] [--steps 6] [--rounds 3]

"The paper's way" is fp32, Pillow transforms in two worker processes, one pass a view with default memory layout, and for BYOL all
eight passes of the published code; "bf16" gives it our precision, so that engineering and precision are told apart. "Compute" is
our step on views that are already there. All take turns in one process with the same thread count; medians over the rounds.
The matrix rate of the machine is that of one large bf16 product; the encoder's share of it counts multiplications of its
convolutions in forward and backward.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.views import pillow_chain
from dssl.augment import CIFAR10
from dssl.data import open_source
from dssl.data.loader import Batches
from dssl.methods import METHODS
from dssl.models import build_encoder, feature_dim
from dssl.objective import Objective
from dssl.presets import named_graph
from dssl.recipes import recipe
from dssl.train.optim import build_optimizer
from dssl.train.prepare import view_maker

RESULTS = Path(__file__).parent / "results"
NAMES = ("s1", "s2", "h1", "h2")


class PaperViews(Dataset[tuple[Tensor, ...]]):
    """Four Pillow views of an image: two standard, two with RandAugment on top."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images
        self.chain = pillow_chain(32)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = Image.fromarray(self.images[index % len(self.images)])
        return tuple(self.chain(image) for _ in NAMES)


def build(name: str, encoder_name: str) -> nn.Module:
    torch.manual_seed(0)
    encoder = build_encoder(encoder_name, image_size=32)
    return METHODS[name](encoder, feature_dim=feature_dim(encoder, image_size=32))


def paper_loss(method: nn.Module, v: list[Tensor], name: str) -> Tensor:
    """Algorithm 1 as the published scripts write it; BYOL's target network sees all four views."""

    def distance(z: Tensor, y: Tensor) -> Tensor:
        return -(F.normalize(z, dim=1) * F.normalize(y.detach(), dim=1)).sum(1).mean()

    y = [method.projector(method.encoder(images)) for images in v]
    if name == "simclr":
        z = F.normalize(torch.cat(y[:2]), dim=1)
        logits = z @ z.T / 0.5
        logits.fill_diagonal_(-torch.inf)
        count = len(v[0])
        pairs = torch.cat([torch.arange(count) + count, torch.arange(count)])
        return F.cross_entropy(logits, pairs) + (distance(y[2], y[0]) + distance(y[3], y[1])) / 2
    z = [method.predictor(row) for row in y]
    if name == "byol":
        with torch.no_grad():
            y = [method.target_projector(method.target_encoder(images)) for images in v]
    return (distance(z[0], y[1]) + distance(z[1], y[0]) + distance(z[2], y[0]) + distance(z[3], y[1])) / 2


class PaperWay:
    def __init__(self, name: str, encoder: str, images: np.ndarray, batch: int, *, bf16: bool) -> None:
        self.name, self.bf16 = name, bf16
        self.method = build(name, encoder)
        self.optimizer = torch.optim.SGD(
            [p for p in self.method.parameters() if p.requires_grad], lr=0.03, momentum=0.9, weight_decay=5e-4
        )
        self.loader: Iterator[list[Tensor]] = iter(DataLoader(PaperViews(images), batch_size=batch, num_workers=2))

    def step(self) -> None:
        views = next(self.loader)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            loss = paper_loss(self.method, views, self.name)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.name == "byol":
            with torch.no_grad():
                for online, target in (
                    (self.method.encoder, self.method.target_encoder),
                    (self.method.projector, self.method.target_projector),
                ):
                    for new, old in zip(online.parameters(), target.parameters(), strict=True):
                        old.mul_(0.996).add_(new, alpha=0.004)
        loss.item()


class Ours:
    """The real loader and the real step, without logging; ``compute`` reuses one batch."""

    def __init__(self, name: str, encoder: str, batch: int, *, compute: bool) -> None:
        config = recipe("cifar10", method=name, data="shapes", encoder=encoder, heavy="ra(2,9)", batch_size=batch)
        self.method = build(name, encoder).to(memory_format=torch.channels_last)
        self.objective = Objective(self.method, named_graph("dssl"))
        self.optimizer = build_optimizer(self.method, config.optimizer)
        maker = view_maker(config, named_graph("dssl"), CIFAR10)
        self.batches = Batches(open_source("shapes"), maker, batch_size=batch, seed=0, steps=10**6, threads=2)
        self.number = 0
        self.kept = {
            key: value.clone(memory_format=torch.channels_last) for key, value in self.batches.at(0).views.items()
        }
        self.compute = compute
        if compute:
            self.batches.close()

    def step(self) -> None:
        views = self.kept if self.compute else self.batches.at(self.number).views
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.objective(views)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        self.optimizer.step()
        self.method.after_step(self.number, 10**6)
        self.number += 1
        loss.total.detach().item()


def matrix_rate() -> float:
    """Multiply-adds a second of a large bf16 product, doubled: floating-point operations."""
    size = 2048
    a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
    best = min(_seconds(lambda: torch.mm(a, b)) for _ in range(8))
    return 2 * size**3 / best


def encoder_operations(name: str) -> float:
    """Floating-point operations of a forward and backward pass of one image (backward costs twice the forward)."""
    total = 0.0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += 2 * output[0].numel() * module.weight[0].numel()

    encoder = build_encoder(name, image_size=32)
    for module in encoder.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        encoder(torch.zeros(2, 3, 32, 32))
    return 3 * total


def encoder_rate(name: str, batch: int) -> float:
    """Images a second of the bare encoder, forward and backward in bf16."""
    encoder = build_encoder(name, image_size=32).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = encoder(images).float().square().mean()
        value.backward()

    step()
    return batch / min(_seconds(step) for _ in range(4))


def _seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(name: str, encoder: str, batch: int, *, steps: int, rounds: int, images: np.ndarray) -> dict[str, float]:
    jobs = {
        "paper's way": PaperWay(name, encoder, images, batch, bf16=False),
        "paper's way, bf16": PaperWay(name, encoder, images, batch, bf16=True),
        "dssl": Ours(name, encoder, batch, compute=False),
        "dssl, compute only": Ours(name, encoder, batch, compute=True),
    }
    times: dict[str, list[float]] = {key: [] for key in jobs}
    for job in jobs.values():
        job.step()
    for _ in range(rounds):
        for key, job in jobs.items():
            job.step()  # the loaders of the others were idle meanwhile: let this one fill up
            for _ in range(steps):
                times[key].append(_seconds(job.step))
            assert torch.get_num_threads() == THREADS
    return {key: batch / statistics.median(values) for key, values in times.items()}


THREADS = os.cpu_count() or 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="+", default=["resnet18-cifar", "small"])
    parser.add_argument("--methods", nargs="+", default=["simsiam", "byol", "simclr"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    source = open_source("shapes:2000")
    images = np.stack([source.image(index) for index in range(len(source))])
    results: list[dict[str, object]] = []
    for encoder in options.encoders:
        peak, bare = matrix_rate(), encoder_rate(encoder, options.batch)
        share = bare * encoder_operations(encoder) / peak
        print(
            f"{encoder}: bare encoder {bare:,.0f} images/s, {share:.0%} of the matrix rate ({peak / 1e9:,.0f} GFLOP/s in bf16)"
        )
        for name in options.methods:
            rates = compare(name, encoder, options.batch, steps=options.steps, rounds=options.rounds, images=images)
            base = rates["paper's way"]
            print(f"{encoder}, {name}, batch {options.batch}")
            for key, rate in rates.items():
                print(f"  {key:<20} {rate:8.1f} images/s  {rate / base:5.2f}x")
            print(f"  end to end {rates['dssl'] / rates['dssl, compute only']:.1%} of compute", flush=True)
            results.append({"encoder": encoder, "method": name, "batch": options.batch, "images_per_second": rates,
                            "encoder_share_of_matrix_rate": share})  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    about = {"threads": THREADS, "torch": torch.__version__, "machine": platform.processor() or platform.machine(),
             "load": os.getloadavg()[0]}  # fmt: skip
    (RESULTS / "train.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
