"""How fast a run would be on this machine: real steps and the loader, timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dssl.config import Precision, RunConfig
from dssl.data import Source, open_source
from dssl.data.loader import Batches
from dssl.distributed import World
from dssl.loop import take_step
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, optimizer_tensors
from dssl.precision import loss_scaler, precision_of
from dssl.training.prepare import build_method, view_maker

_SMALL, _PHOTOS = 64, 64
"""Pixels up to which a recipe's images are in memory, and how many drawn images stand for a data set."""


@dataclass(frozen=True, slots=True)
class Speed:
    images_per_second: float
    on_one_thread: float | None
    """Images a second with one torch thread; None on a GPU, or if one thread is all there is."""
    checkpoint_bytes: int
    precision: Precision
    why: str
    """What was measured to choose the precision."""


def _rate(work: Callable[[int], object], *, images: int, seconds: float, clock: Callable[[], float]) -> float:
    """Images a second of ``work(step)``, which handles so many at each call and is called at least twice."""
    started, done = clock(), 0
    while done < 2 or clock() - started < seconds:
        work(done)
        done += 1
    return done * images / (clock() - started)


def loader_rate(
    config: RunConfig, source: Source, *, seconds: float = 4.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Images a second whose views the loader makes, on all threads of this machine."""
    batch = min(config.batch_size, len(source), _PHOTOS)
    maker = view_maker(config, config.view_graph, None)
    with Batches(source, maker, batch_size=batch, seed=0, steps=10**9, threads=config.threads) as batches:
        for step in range(2):  # the threads start, and the kernels are loaded
            batches.at(step)
        return _rate(lambda step: batches.at(2 + step), images=batch, seconds=seconds, clock=clock)


def drawn_images(image_size: int, folder: Path) -> tuple[str, str]:
    """Where images are that stand for a user's own, and what they are: JPEG files in ``folder`` if views are large."""
    name = f"shapes:{_PHOTOS}"
    if image_size <= _SMALL:
        return name, "images in memory"
    source, generator = open_source(name), np.random.Generator(np.random.Philox(0))
    for index in range(_PHOTOS):
        drawn = Image.fromarray(source.image(index)).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(drawn) + generator.normal(0, 8, (375, 500, 3)), 0, 255)  # as long as a camera's file
        Image.fromarray(noisy.astype(np.uint8)).save(folder / f"{index}.jpg", quality=90)
    return str(folder), "JPEG files of 500 x 375 px"


def measure_speed(config: RunConfig, device: torch.device, *, seconds: float = 4.0) -> Speed:
    """Steps of the real objective on random views; on a CPU at most 64 images each."""
    batch = min(config.batch_size, 64) if device.type == "cpu" else config.batch_size
    method, graph = build_method(config), config.view_graph
    precision, why = precision_of(
        config.precision, None, World(0, 1, device),
        encoder=method.encoder, image_size=config.image_size, channels=config.channels,
    )  # fmt: skip
    method.to(device).to(memory_format=torch.channels_last)
    if config.checkpoint_activations:
        checkpoint_activations(method.encoder)
    objective = Objective(method, graph)
    optimizer, scaler = build_optimizer(method, config.optimizer), loss_scaler(device, precision)
    sizes = {view.name: graph.size(view.name) or config.image_size for view in graph.made}
    views = {
        name: torch.randn(batch, config.channels, size, size, device=device).to(memory_format=torch.channels_last)
        for name, size in sizes.items()
    }

    def step(number: int) -> float:
        loss = take_step(
            objective, views, optimizer, scaler, progress=0.0, through=objective, device=device, precision=precision
        )
        return float(loss.total)

    def rate(seconds: float) -> float:
        step(0)
        return _rate(step, images=batch, seconds=seconds, clock=time.perf_counter)

    all_threads, one_thread = rate(seconds), None
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        try:
            one_thread = rate(seconds / 2)
        finally:
            torch.set_num_threads(threads)
    tensors = [*method.state_dict().values(), *optimizer_tensors(optimizer, method).values()]
    return Speed(all_threads, one_thread, sum(value.nbytes for value in tensors), precision, why)
