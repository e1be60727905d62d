"""How fast a run would be here: a few real steps on random images, and the loader on its own."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dssl.config import Precision, RunConfig
from dssl.data import open_source
from dssl.data.loader import Batches
from dssl.distributed import World
from dssl.loop import take_step
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, optimizer_tensors
from dssl.precision import loss_scaler, precision_of
from dssl.training.prepare import build_method, normalization_of, view_maker

_SMALL, _PHOTOS = 64, 64
"""Pixels up to which a recipe's images are in memory, and how many drawn images stand for a data set."""


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


def loader_rate(
    config: RunConfig, data: str | None, *, seconds: float = 4.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Images a second that the loader makes into bytes for a GPU, on all threads of this machine.

    Without ``data``: JPEG files of 500 x 375 pixels for recipes with large views, else images in memory.
    """
    with tempfile.TemporaryDirectory() as held:
        if data is None and config.image_size > _SMALL:
            _draw_photos(Path(held))
            data = held
        source = open_source(data or f"shapes:{_PHOTOS}", channels=config.channels, value_range=config.range)
        batch = min(config.batch_size, len(source), _PHOTOS)
        maker = view_maker(config, config.view_graph, None)
        with Batches(source, maker, batch_size=batch, seed=0, steps=10**9, threads=config.threads) as batches:
            for step in range(2):  # the threads start, and the kernels are loaded
                batches.at(step)
            started, done = clock(), 0
            while done < 2 or clock() - started < seconds:
                batches.at(2 + done)
                done += 1
            return done * batch / (clock() - started)


def _draw_photos(folder: Path) -> None:
    """Drawn images of a photo's size and file length, with the noise of a camera."""
    source = open_source(f"shapes:{_PHOTOS}")
    generator = np.random.Generator(np.random.Philox(0))
    for index in range(_PHOTOS):
        drawn = Image.fromarray(source.image(index)).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(drawn) + generator.normal(0, 8, (375, 500, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{index}.jpg", quality=90)


class _Noise:
    """Random images of the recipe's size, so that nothing but the machine is measured."""

    def __init__(self, config: RunConfig, count: int) -> None:
        generator = np.random.Generator(np.random.Philox(0))
        side = config.image_size if config.image_size <= _SMALL else 2 * config.image_size
        self.images = generator.integers(0, 256, (count, side, side, config.channels), dtype=np.uint8)


def measure_speed(
    config: RunConfig, device: torch.device, *, seconds: float = 4.0, batch_size: int | None = None
) -> Speed:
    """Steps of the real objective for some seconds, and the rate at which one process makes the views."""
    batch = batch_size or min(config.batch_size, 64 if device.type == "cpu" else config.batch_size)
    graph = config.view_graph
    noise = _Noise(config, batch)
    known = (
        normalization_of(replace(config, init=None, adapt=None), None) if config.normalization != "measure" else None
    )
    maker = view_maker(config, graph, known)
    buffers = maker.allocate(batch)

    def make_views() -> None:
        plan = maker.plan(np.arange(batch), epoch=0)
        for row in range(batch):
            maker.apply_many(plan, row, [noise.images[row]], buffers, row)

    make_views()
    started = time.perf_counter()
    make_views()
    view_rate = batch * len(maker.names) / (time.perf_counter() - started)

    method = build_method(config)
    precision, why = precision_of(
        config.precision, None, World(0, 1, device),
        encoder=method.encoder, image_size=config.image_size, channels=config.channels,
    )  # fmt: skip
    method.to(device).to(memory_format=torch.channels_last)
    if config.checkpoint_activations:
        checkpoint_activations(method.encoder)
    objective = Objective(method, graph)
    optimizer = build_optimizer(method, config.optimizer)
    scaler = loss_scaler(device, precision)
    views = {
        name: torch.from_numpy(buffers[name]).permute(0, 3, 1, 2).to(device, torch.float32) / (1 if known else 255)
        for name in maker.names
    }

    def step() -> None:
        loss = take_step(
            objective, views, optimizer, scaler, progress=0.0, through=objective, device=device, precision=precision
        )
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
