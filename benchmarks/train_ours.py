"""Our training step: the real loader and the real step of the loop, without its log."""

import contextlib
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.data import Source
from dssl.data.loader import Batches
from dssl.graph import named_graph
from dssl.objective import Objective
from dssl.optim import build_optimizer, set_learning_rate
from dssl.recipes import recipe
from dssl.training.prepare import build_method, view_maker

STEPS = 10**6


def settings(method: str, graph: str, encoder: str, batch: int) -> RunConfig:
    """CIFAR-10's heads and optimiser; SimCLR with SGD too, so that all peers step alike."""
    base = recipe(
        "cifar10", method=method, data="shapes", encoder=encoder, graph=graph, heavy="ra(2,5)", batch_size=batch
    )
    sgd = recipe("cifar10").optimizer
    return recipe("cifar10", method=method, data="shapes", encoder=encoder, graph=graph, heavy=base.heavy,
                  batch_size=batch, optimizer=sgd)  # fmt: skip


class Ours:
    """One step a call; ``compute`` uses one batch again and again, so that there are no views to wait for."""

    def __init__(self, config: RunConfig, source: Source, *, threads: int, bf16: bool = True, compute: bool = False):
        self.config, self.bf16, self.compute = config, bf16, compute
        method = build_method(config)
        assert isinstance(method, nn.Module)
        self.method = method.to(memory_format=torch.channels_last)
        graph = named_graph(config.graph)
        self.objective = Objective(method, graph)
        self.optimizer = build_optimizer(self.method, config.optimizer)
        self.maker = view_maker(config, graph, CIFAR10)
        self.batches = Batches(source, self.maker, batch_size=config.batch_size, seed=0, steps=STEPS, threads=threads)
        self.number = 0
        self.parts: dict[str, list[float]] = {"waiting for views": [], "forward": [], "backward": [], "optimiser": []}
        self.kept: Mapping[str, Tensor] = {}
        if compute:
            views = self.batches.at(0).views
            self.kept = {name: value.clone(memory_format=torch.preserve_format) for name, value in views.items()}
            self.batches.close()

    def step(self) -> None:
        times = [time.perf_counter()]
        views = self.kept if self.compute else self.batches.at(self.number).views
        times.append(time.perf_counter())
        set_learning_rate(self.optimizer, 0.03, fixed=0.03)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            loss = self.objective(views)
        times.append(time.perf_counter())
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.method.after_step(self.number, STEPS)
        times.append(time.perf_counter())
        self.number += 1
        for part, before, after in zip(self.parts.values(), times, times[1:], strict=False):
            part.append(after - before)

    def views_seconds(self) -> float:
        """CPU seconds of one thread for the views of one batch: the work that the loader's threads do beside the step."""
        import numpy as np

        count = self.config.batch_size
        source = np.stack([np.zeros((32, 32, 3), np.uint8)] * count)
        source[:] = np.random.Generator(np.random.Philox(0)).integers(0, 255, source.shape, dtype=np.uint8)
        buffers = self.maker.allocate(count)
        found = []
        for epoch in range(4):
            start = time.thread_time()
            plan = self.maker.plan(np.arange(count), epoch=epoch)
            self.maker.apply_many(plan, 0, source, buffers, 0)
            found.append(time.thread_time() - start)
        return min(found)

    def pause(self) -> None:
        """The loader's threads rest by themselves once they are two batches ahead."""

    resume = pause

    def close(self) -> None:
        self.batches.close()
