"""A training step end to end: ours against the paper's way, lightly, stable-pretraining, and against pure compute, in one run.

    python -m benchmarks.train [--encoders small] [--methods byol] [--graphs dssl] [--batches 256] [--steps 1] [--rounds 5]

Everybody trains the same encoder with heads of the same shape, the same batch, the same SGD, four views of every image and two
worker processes or threads, with as many torch threads as there are cores. "The paper's way" is fp32, Pillow transforms in
worker processes, one pass a view with the default memory layout, and for BYOL all eight passes of the published code. "bf16" and
"fp32" rows tell precision and engineering apart. "Compute" is our step on views that are already there. All take turns in one
process; the worker processes of those who wait are stopped, and go on where they were.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from benchmarks import charts, record
from benchmarks.train_lightly import Lightly
from benchmarks.train_ours import Ours, settings
from benchmarks.train_paper import WORKERS, PaperWay
from benchmarks.train_stable import StablePretraining
from dssl.data import open_source
from dssl.graph import named_graph
from dssl.methods import METHODS
from dssl.models import build_encoder

BASELINE = "paper's way, fp32"
PEERS = ("lightly", "stable-pretraining")


class Contender(Protocol):
    def step(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


def matrix_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of one large product: what the machine can do at best."""
    left, right = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    left @ right
    return 2 * 2048**3 / min(record.seconds(lambda: left @ right) for _ in range(6))


def encoder_operations(name: str) -> float:
    """Operations of one image in one forward: two for each multiplication of a convolution or a linear layer."""
    encoder, counted = build_encoder(name, image_size=32), 0.0

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal counted
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        positions = output[0].numel() / weight.shape[0]
        counted += 2 * weight.numel() * positions

    for module in encoder.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        encoder.eval()(torch.zeros(1, 3, 32, 32))
    return counted


def encoder_rate(name: str, batch: int, *, bf16: bool) -> float:
    """Images a second of the bare encoder, forward and backward."""
    encoder = build_encoder(name, image_size=32).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            value = encoder(images).float().square().mean()
        value.backward()

    step()
    return batch / min(record.seconds(step) for _ in range(3))


def contenders(
    method: str, graph: str, encoder: str, batch: int, images: np.ndarray, threads: int
) -> tuple[dict[str, Contender], dict[str, str]]:
    """All that work here, and why the others do not."""
    config, source = settings(method, graph, encoder, batch), open_source("shapes:4000")
    builders: dict[str, Callable[[], Contender]] = {
        BASELINE: lambda: PaperWay(config, method, images, bf16=False),
        "paper's way, bf16": lambda: PaperWay(config, method, images, bf16=True),
        "lightly, fp32": lambda: Lightly(config, method, images, bf16=False),
        "lightly, bf16": lambda: Lightly(config, method, images, bf16=True),
        "stable-pretraining, fp32": lambda: StablePretraining(config, method, images, bf16=False),
        "stable-pretraining, bf16": lambda: StablePretraining(config, method, images, bf16=True),
        "dssl, fp32": lambda: Ours(config, source, threads=threads, bf16=False),
        "dssl, bf16": lambda: Ours(config, source, threads=threads),
        "dssl, bf16, compute only": lambda: Ours(config, source, threads=threads, compute=True),
    }
    jobs: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for name, build in builders.items():
        try:
            jobs[name] = build()
            jobs[name].step()
            jobs[name].pause()
        except Exception as problem:  # of a peer, any reason at all: the page says which
            if not name.startswith(PEERS):  # a failure of our own rows must not pass for a missing one
                raise
            missing[name] = record.reason(problem)
            if name in jobs:
                jobs.pop(name).close()
            print(f"  {name:26} left out: {missing[name]}", flush=True)
    return jobs, missing


def take_turns(jobs: dict[str, Contender], *, steps: int, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of every step.

    A loader is as far ahead when its turn comes as it was when its last one ended, so every step takes one batch and has the next
    one made beside it.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            job.resume()
            times[name] += [record.seconds(job.step) for _ in range(steps)]
            job.pause()
            record.check_threads(threads)
    return times


def shares(job: Ours, *, step_seconds: float, threads: int) -> record.Record:
    """Shares of the wall-clock of a step, and the views' CPU time against that of all cores in a step."""
    medians = {name: statistics.median(values[1:]) for name, values in job.parts.items()}
    total = sum(medians.values())
    views = job.views_seconds() / (step_seconds * threads)
    return {**{name: value / total for name, value in medians.items()}, "views, share of the cores' time": views}


def compare(
    method: str, graph: str, encoder: str, batch: int, images: np.ndarray, machine: record.Record, options: Any
) -> record.Record:
    jobs, missing = contenders(method, graph, encoder, batch, images, options.threads)
    times = take_turns(jobs, steps=options.steps, rounds=options.rounds, threads=options.threads)
    found = {name: record.rates(batch, values) for name, values in times.items()}
    base = found[BASELINE]["median"]
    rows = [{"name": name, "rate": rate, "ratio": rate["median"] / base} for name, rate in found.items()]
    ours = jobs["dssl, bf16"]
    assert isinstance(ours, Ours)
    passes = METHODS[method].cost(named_graph(graph))
    rate = found["dssl, bf16"]["median"]
    work = rate * encoder_operations(encoder) * (3 * passes.with_gradient + passes.without_gradient)
    row = {
        "encoder": encoder, "method": method, "graph": graph, "batch": batch, "rows": rows, "missing": missing,
        "passes": passes.passes, "passes_of_the_paper": 8 if method == "byol" else 4,
        "end_to_end_share_of_compute": rate / found["dssl, bf16, compute only"]["median"],
        "share_of_matrix_rate": work / machine["matrix_rate_bf16"],
        "time": shares(ours, step_seconds=batch / rate, threads=options.threads),
    }  # fmt: skip
    for job in jobs.values():
        job.close()
    print(f"{encoder}, {method}, {graph}, batch {batch}")
    for one in rows:
        print(f"  {one['name']:26} {one['rate']['median']:8.1f} images/s  {one['ratio']:5.2f}x")
    print(
        f"  end to end {row['end_to_end_share_of_compute']:.1%} of compute; {row['share_of_matrix_rate']:.0%} of the matrix "
        f"rate in the encoder; " + ", ".join(f"{name} {value:.1%}" for name, value in row["time"].items()),
        flush=True,
    )
    return row


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--encoders", nargs="+", default=["resnet18-cifar", "small"])
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128], help="the batch for each encoder")
    parser.add_argument("--methods", nargs="+", default=["simsiam", "byol", "simclr"])
    parser.add_argument("--graphs", nargs="+", default=["standard2", "dssl"])
    parser.add_argument("--steps", type=int, default=1, help="counted steps in a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--threads", type=int, default=record.CORES, help="torch's, and those of our loader")
    options = parser.parse_args()
    if len(options.batches) != len(options.encoders):
        parser.error("give as many batches as encoders")
    clock = record.Clock()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    record.set_threads(options.threads)
    source = open_source("shapes:4000")
    images = np.stack([source.image(index) for index in range(len(source))])
    machine: record.Record = {
        "torch_threads": options.threads, "our_loader_threads": options.threads, "worker_processes": WORKERS,
        "matrix_rate_bf16": matrix_rate(torch.bfloat16), "matrix_rate_fp32": matrix_rate(torch.float32),
    }  # fmt: skip
    bare = []
    for encoder, batch in zip(options.encoders, options.batches, strict=True):
        for bf16 in (False, True):
            rate = encoder_rate(encoder, batch, bf16=bf16)
            kind = "bf16" if bf16 else "fp32"
            share = rate * 3 * encoder_operations(encoder) / machine[f"matrix_rate_{kind}"]
            bare.append({"encoder": encoder, "batch": batch, "precision": kind, "images_per_second": rate,
                         "share_of_matrix_rate": share})  # fmt: skip
            print(f"{encoder}, {kind}: bare encoder {rate:,.0f} images/s, {share:.0%} of the matrix rate", flush=True)
    rows, begun = [], time.perf_counter()
    for encoder, batch in zip(options.encoders, options.batches, strict=True):
        for method in options.methods:
            for graph in options.graphs:
                rows.append(compare(method, graph, encoder, batch, images, machine, options))
                print(f"  {time.perf_counter() - begun:.0f} s so far", flush=True)
    missing = {name: why for row in rows for name, why in row["missing"].items()}
    content = {"machine": machine, "missing": missing, "bare_encoder": bare, "results": rows}
    record.write("train", clock, content, folder=options.out)
    groups = {f"{row['encoder']}, {row['method']}, {row['graph']}, batch {row['batch']}": row["rows"] for row in rows}
    charts.bars(groups, options.out / "train.png", label="images per second, end to end", digits=1, columns=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
