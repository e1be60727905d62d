"""Backward view by view against one whole backward, on the CPU: seconds in turns in one process, peak memory in one process each.

    python -m benchmarks.backward [--encoder small] [--batch 128] [--rounds 15]

Bars: view by view is at most 2 % slower and holds less.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from dssl import Objective, named_graph
from dssl.methods import METHODS
from dssl.methods.method import Method
from dssl.models import build_encoder, feature_dim


def step(objective: Objective, views: dict[str, torch.Tensor], *, whole: bool) -> float:
    """Seconds of one forward and backward."""
    objective.zero_grad(set_to_none=True)
    started = time.perf_counter()
    if whole:
        objective(views).total.backward()
    else:
        objective.backward(views)
    return time.perf_counter() - started


def peak_memory() -> int:
    """MiB that this process has held at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="small")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--methods", nargs="+", default=["simsiam", "byol", "simclr"])
    parser.add_argument("--peak", choices=("whole", "views"), help="only print the peak memory of two steps in MiB")
    options = parser.parse_args()
    for name in options.methods:
        torch.manual_seed(0)
        encoder = build_encoder(options.encoder, image_size=options.size)
        dim = feature_dim(encoder, image_size=options.size)
        objective = Objective(Method.of(METHODS[name](), encoder, feature_dim=dim), named_graph("dssl"))
        objective.to(memory_format=torch.channels_last)
        made = ("s1", "s2", "h1", "h2")
        views = {view: torch.randn(options.batch, 3, options.size, options.size) for view in made}
        if options.peak:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: the peak begins anew
            before = peak_memory()
            for _ in range(2):
                step(objective, views, whole=options.peak == "whole")
            print(peak_memory() - before)
            return
        for whole in (True, False):
            step(objective, views, whole=whole)
        ratios = []
        for _ in range(options.rounds):
            one, other = step(objective, views, whole=True), step(objective, views, whole=False)
            ratios.append(other / one)
        words = [sys.executable, "-m", "benchmarks.backward", "--encoder", options.encoder, "--size", str(options.size)]
        words += ["--batch", str(options.batch), "--methods", name, "--peak"]
        peaks = [
            int(subprocess.run([*words, kind], check=True, capture_output=True, text=True).stdout)
            for kind in ("whole", "views")
        ]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {name} | {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) | {peaks[0]} | {peaks[1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
