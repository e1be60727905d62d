"""How a method's rate, heads and edge weights at the scale `cpu` were chosen: one short run per line, scored on held-out images.

python -m benchmarks.tuning NAME --data FOLDER --method simsiam --set hidden=512 --peak 0.3 --steps 500 >> FILE.jsonl

The encoder is `whitened`. Of the training images 5,000 judge and never train; the test images are never read.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.encoder_search import BANK, HELD_OUT, score
from dssl import rng
from dssl.augment import CIFAR10, ViewMaker
from dssl.config import OptimizerConfig, RunConfig
from dssl.data import Subset
from dssl.data.cifar10 import Cifar10
from dssl.data.loader import Batches
from dssl.graph import named_graph
from dssl.methods import METHODS, RelationConfig
from dssl.models.for_cpus import WhitenedEncoder, whiten
from dssl.objective import Objective
from dssl.optim import build_optimizer, learning_rate, set_learning_rate
from dssl.recipes import PAPER_HEAVY
from dssl.training.prepare import build_method, images_to_whiten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--data", required=True)
    parser.add_argument("--method", default="simclr", choices=METHODS)
    parser.add_argument("--set", nargs="*", default=[], help="the method's settings, as temperature=0.2")
    parser.add_argument("--relation", nargs="*", default=[], help="settings of relation edges, as temperature=0.2")
    parser.add_argument("--graph", default="standard")
    parser.add_argument("--heavy", default=PAPER_HEAVY)
    parser.add_argument("--images", type=int, default=45_000)
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "lars", "adamw"))
    parser.add_argument("--peak", type=float, default=0.1)
    parser.add_argument("--fixed", action="store_true", help="keep the predictor's rate constant")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(run(parser.parse_args())), flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train and score; the time is CPU time, since the machine may be busy with other work."""
    torch.set_num_threads(1)
    changes, relation = (
        {name: json.loads(value) for name, _, value in (text.partition("=") for text in texts)}
        for texts in (options.set, options.relation)
    )
    config = RunConfig(
        data=f"cifar10:{options.data}",
        encoder="whitened",
        method=METHODS[options.method](**changes),
        relation=RelationConfig(**relation),
        graph=options.graph,
        heavy=options.heavy,
        seed=options.seed,
        optimizer=OptimizerConfig(
            name=options.optimizer, weight_decay=options.weight_decay, fixed_predictor_rate=options.fixed
        ),
    )
    images = Cifar10(options.data)
    order = rng.permutation(rng.key(7, "search"), len(images))
    held_out, train = np.sort(order[-HELD_OUT:]), np.sort(order[:-HELD_OUT][: options.images])
    source = Subset(images, train)
    method = build_method(config)
    assert isinstance(method, torch.nn.Module)
    for module in method.modules():
        if isinstance(module, WhitenedEncoder):
            whiten(module, images_to_whiten(config, source, CIFAR10))
    method.to(memory_format=torch.channels_last)
    graph = named_graph(options.graph)
    objective, optimizer = Objective(method, graph), build_optimizer(method, config.optimizer)
    maker = ViewMaker(
        graph.made, size=32, seed=options.seed,
        policies={"standard": config.standard, "heavy": options.heavy}, normalization=CIFAR10,
    )  # fmt: skip
    started = 0.0
    with Batches(source, maker, batch_size=options.batch, seed=options.seed, steps=options.steps, threads=1) as batches:
        for step in range(options.steps):
            if step == 2:  # the kernels are compiled by now
                started = time.process_time()
            rate = learning_rate(step, peak=options.peak, total=options.steps, warmup=int(0.05 * options.steps))
            set_learning_rate(optimizer, rate, fixed=options.peak)
            report = objective.backward(batches.at(step).views, progress=step / max(options.steps - 1, 1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            method.after_step(step, options.steps)
            if step % 100 == 0:
                print(f"step {step} of {options.steps}: loss {float(report.total):.3f}", file=sys.stderr)
    seconds = time.process_time() - started if options.steps else 0.0
    bank = order[:-HELD_OUT][rng.permutation(rng.key(8, "bank"), len(order) - HELD_OUT)[:BANK]]
    method.eval()
    views = options.steps * options.batch * len(graph.made)
    return (
        {key: value for key, value in vars(options).items() if key != "data"}
        | {"views": views, "cpu_seconds": round(seconds)}
        | score(method.encoder, images, bank, held_out)
    )


if __name__ == "__main__":
    main()
