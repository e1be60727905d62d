"""How fast a run would be here: a few real steps on random images."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from dssl.config import Precision, RunConfig
from dssl.distributed import World
from dssl.loop import backward
from dssl.objective import Objective
from dssl.optim import build_optimizer, optimizer_tensors
from dssl.precision import autocast, loss_scaler, precision_of
from dssl.presets import named_graph
from dssl.train.prepare import build_method, normalization_of, view_maker


@dataclass(frozen=True, slots=True)
class Speed:
    images_per_second: float
    on_one_thread: float | None
    """Images a second with one torch thread; None where there is no choice: on a GPU, or where one is all there is."""
    views_per_second: float
    checkpoint_bytes: int
    precision: Precision
    why: str
    """What was measured to choose the precision."""
    views: tuple[str, ...]


class _Noise:
    """Random images of the recipe's size, so that nothing but the machine is measured."""

    def __init__(self, config: RunConfig, count: int) -> None:
        generator = np.random.Generator(np.random.Philox(0))
        side = config.image_size if config.image_size <= 64 else 2 * config.image_size
        self.images = generator.integers(0, 256, (count, side, side, config.channels), dtype=np.uint8)


def measure_speed(
    config: RunConfig, device: torch.device, *, seconds: float = 4.0, batch_size: int | None = None
) -> Speed:
    """Steps of the real objective for some seconds, and the rate at which one process makes the views."""
    batch = batch_size or min(config.batch_size, 64 if device.type == "cpu" else config.batch_size)
    graph = named_graph(config.graph)
    noise = _Noise(config, batch)
    known = normalization_of(config, None) if config.normalization != "measure" else None
    maker = view_maker(config, graph, known)
    buffers = maker.allocate(batch)

    def make_views() -> None:
        plan = maker.plan(np.arange(batch), epoch=0)
        for row in range(batch):
            maker.apply(plan, row, noise.images[row], buffers, row)

    make_views()
    started = time.perf_counter()
    make_views()
    view_rate = batch * len(maker.names) / (time.perf_counter() - started)

    method = build_method(config)
    assert isinstance(method, nn.Module)
    precision, why = precision_of(
        config.precision, None, World(0, 1, device),
        encoder=method.encoder, image_size=config.image_size, channels=config.channels,
    )  # fmt: skip
    method.to(device).to(memory_format=torch.channels_last)
    objective = Objective(method, graph)
    optimizer = build_optimizer(method, config.optimizer)
    scaler = loss_scaler(device, precision)
    views = {
        name: torch.from_numpy(buffers[name]).permute(0, 3, 1, 2).to(device, torch.float32) / (1 if known else 255)
        for name in maker.names
    }

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device, precision):
            loss = backward(objective, views, through=objective, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        float(loss.total)

    def rate(seconds: float) -> float:
        step()
        started, done = time.perf_counter(), 0
        while done < 2 or time.perf_counter() - started < seconds:
            step()
            done += 1
        return done * batch / (time.perf_counter() - started)

    found, one_thread = rate(seconds), None
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        try:
            one_thread = rate(seconds / 2)
        finally:
            torch.set_num_threads(threads)
    tensors = [*method.state_dict().values(), *optimizer_tensors(optimizer, method).values()]
    return Speed(found, one_thread, view_rate, sum(value.nbytes for value in tensors), precision, why, maker.names)
