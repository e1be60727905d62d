"""What a run will be on this machine, before its first step: its speed is measured, its length chosen, and one screen says so."""

import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dssl.config import Precision, RunConfig
from dssl.data import Source, open_source
from dssl.data.loader import Batches
from dssl.data.pipeline import default_threads
from dssl.distributed import World
from dssl.errors import LARGEST, InvalidSetting
from dssl.loop import take_step
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, optimizer_tensors
from dssl.precision import loss_scaler, precision_of
from dssl.recipes import shortened
from dssl.text import columns, duration
from dssl.training.baseline import SAMPLE
from dssl.training.knn import BANK, QUERIES
from dssl.training.prepare import build_method, view_maker

FEW_IMAGES = 5_000
"""Below this number, weights that are good already are the better start."""
ON_CPUS = (("whitened-quadrants", 32, 0), ("whitened-quadrants", 64, 20_000), ("whitened-quadrants", 96, 200_000))
"""Encoder and image size that the recipe folder chooses from on a CPU, and the images that a run must be able to see for it."""
_MARGIN, _SETUP = 0.1, 10.0
"""Of the minutes, for what the measurement does not know; and seconds until the first step."""
_CHECKS, _CHECK_SHARE = 10, 0.15
"""How often a run that is fitted to minutes measures itself, and the largest share of its time that this may take."""
_MANY_PIXELS = 10**10
"""Of all views of a run: with fewer, a ResNet-18 takes less than a day on two cores."""
_SECONDS = 1.5
"""That a measurement of the speed takes, about."""
_SMALL, _PHOTOS = 64, 64
"""Pixels up to which a recipe's images are in memory, and how many drawn images stand for a data set."""


def _rate(work: Callable[[int], object], *, images: int, seconds: float, clock: Callable[[], float]) -> float:
    """Images a second of ``work(step)``, which handles so many at each call and is called at least twice."""
    started, done = clock(), 0
    while done < 2 or clock() - started < seconds:
        work(done)
        done += 1
    return done * images / (clock() - started)


def loader_rate(
    config: RunConfig, source: Source, *, seconds: float, clock: Callable[[], float] = time.perf_counter
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """How fast the steps of a configuration are here."""

    steps: float
    """Images a second that the steps alone would take, with all torch threads."""
    on_one_thread: float | None
    """The same with one torch thread; None on a GPU, or if one thread is all there is."""
    loader: float
    """Images a second whose views the loader makes."""
    threads: int | None
    """All torch threads; None on a GPU, which computes while views are made: on a CPU both need the same cores."""
    checkpoint_bytes: int
    precision: Precision
    why: str
    """What was measured to choose the precision."""

    @property
    def one_is_faster(self) -> bool:
        return self.on_one_thread is not None and self.on_one_thread > 1.1 * self.steps  # a tie is noise

    @property
    def compute(self) -> float:
        """Images a second that the steps alone would take, with the faster number of threads."""
        return max(self.steps, self.on_one_thread or 0.0)

    @property
    def images_per_second(self) -> float:
        if self.threads is None:
            return min(self.loader, self.compute)
        return 1 / (1 / self.loader + 1 / self.compute)

    def check_seconds(self, config: RunConfig, source: Source) -> float:
        """Of one measurement of kNN and of progress; a forward pass is about a third of a step."""
        if not config.knn_every:
            return 0.0
        images = min(SAMPLE, len(source))
        if source.labels is not None:
            images += min(BANK, len(source)) + min(QUERIES, len(source) // 4)
        return images * (1 / self.loader + 1 / (3 * len(config.view_graph.made) * self.compute))

    def seconds(self, config: RunConfig, source: Source) -> float:
        """Of the whole run."""
        images = len(source) // config.batch_size * config.batch_size * config.epochs
        checks = 2 + config.epochs // config.knn_every if config.knn_every else 0
        return _SETUP + images / self.images_per_second + checks * self.check_seconds(config, source)


def measured(config: RunConfig, source: Source, device: torch.device, *, seconds: float = _SECONDS) -> Throughput:
    """The real loader, and steps of the real objective on random views, on a CPU of at most 64 images each."""
    loader = loader_rate(config, source, seconds=seconds / 2)
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

    all_threads, one_thread, threads = rate(seconds), None, torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        try:
            one_thread = rate(seconds / 2)
        finally:
            torch.set_num_threads(threads)
    tensors = [*method.state_dict().values(), *optimizer_tensors(optimizer, method).values()]
    return Throughput(
        steps=all_threads, on_one_thread=one_thread, loader=loader, threads=None if device.type != "cpu" else threads,
        checkpoint_bytes=sum(value.nbytes for value in tensors), precision=precision, why=why,
    )  # fmt: skip


def steps_in_epoch(config: RunConfig, source: Source) -> int:
    """As many as there are whole batches."""
    if len(source) < config.batch_size:
        raise InvalidSetting(
            "batch_size",
            f"is {config.batch_size:,}, more than the images of {source.name}: choose a smaller batch or more images",
        )
    return len(source) // config.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Decides what was left to decide about a new run."""

    recipe: str | None = None
    typed: frozenset[str] = frozenset()
    """Settings that are not to be chosen."""
    measure: Callable[[RunConfig, Source, torch.device], Throughput] = measured

    def plan(self, config: RunConfig, source: Source, device: torch.device) -> tuple[RunConfig, list[str]]:
        """The configuration with what was chosen, and the screen that says so."""
        began = time.monotonic()
        config, throughput = self._sized(config, source, device)
        changes: dict[str, Any] = {"precision": throughput.precision}
        if throughput.threads is not None and "torch_threads" not in self.typed:
            changes["torch_threads"] = 1 if throughput.one_is_faster else throughput.threads
        if config.minutes is not None:
            left = 60 * config.minutes * (1 - _MARGIN) - (time.monotonic() - began) - _SETUP
            changes |= self._fitted(config, source, throughput, seconds=left)
        config = replace(config, **changes)
        return config, self._screen(config, source, device, throughput)

    def _sized(self, config: RunConfig, source: Source, device: torch.device) -> tuple[RunConfig, Throughput]:
        """On a CPU, with minutes: the last of ``ON_CPUS`` that sees as many images as it needs."""
        if config.minutes is None or self.recipe != "folder" or device.type != "cpu":
            return config, self._measured(config, source, device)
        best: tuple[RunConfig, Throughput] | None = None
        seen = math.inf
        for encoder, size, least in ON_CPUS:
            tried = replace(
                # in short runs the number of steps matters more than that of the images in each
                config, batch_size=config.batch_size if "batch_size" in self.typed else min(64, config.batch_size),
                encoder=config.encoder if "encoder" in self.typed else encoder,
                image_size=config.image_size if "image_size" in self.typed else size,
            )  # fmt: skip
            # it is about twice as slow as the one before
            if best is not None and (seen < 2 * least or tried == best[0]):
                break
            throughput = self._measured(tried, source, device)
            seen = 60 * config.minutes * (1 - _MARGIN) * throughput.images_per_second
            if best is not None and seen < least:
                break
            best = tried, throughput
        assert best is not None
        return best

    def _measured(self, config: RunConfig, source: Source, device: torch.device) -> Throughput:
        steps_in_epoch(config, source)  # which has an error that nobody should wait for
        return self.measure(config, source, device)

    def _fitted(self, config: RunConfig, source: Source, throughput: Throughput, *, seconds: float) -> dict[str, Any]:
        """As many epochs as the seconds allow, with the measurements of kNN and progress."""
        epoch = steps_in_epoch(config, source) * config.batch_size / throughput.images_per_second
        check = throughput.check_seconds(config, source)
        checks = min(_CHECKS, max(1, int(_CHECK_SHARE * seconds / check))) if check else 0
        epochs = min(max(1, int((seconds - (2 + checks) * check) / epoch)), LARGEST["epochs"])
        changes: dict[str, Any] = {"epochs": epochs}
        shorter = shortened(vars(config), epochs)
        if "optimizer.warmup_epochs" not in self.typed:
            changes["optimizer"] = shorter["optimizer"]
        if "adapt.head_epochs" not in self.typed:
            changes["adapt"] = shorter["adapt"]
        if "knn_every" not in self.typed and config.knn_every:
            changes["knn_every"] = -(-epochs // checks)
        return changes

    def _screen(self, config: RunConfig, source: Source, device: torch.device, throughput: Throughput) -> list[str]:
        """Images, machine, speed, what was chosen, and how long it takes."""
        size = f"{config.image_size} px"
        cores = default_threads()
        machine = f"{cores} CPU core{'s' if cores > 1 else ''}"
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        machine += ", no GPU" if device.type == "cpu" else f", {gpu}"
        threads = ""
        if throughput.on_one_thread is not None:
            count = f"{config.torch_threads} torch thread{'s' if config.torch_threads != 1 else ''}"
            threads = f" with {count} (the faster of 1 and all)"
        loader = f"; loader {throughput.loader:,.0f}"
        labels = "" if source.labels is None else " (labels are only used to measure)"
        rows = [
            ("images", f"{len(source):,} in {config.data}{labels}"),
            ("machine", machine),
            ("speed", f"{throughput.images_per_second:,.0f} images/s in {throughput.precision}{threads}{loader}"),
            ("run", f"{config.method.name}, graph {config.graph}, encoder {config.encoder}, {size}, batch {config.batch_size}"),
            ("length", self._length(config, source, throughput)),
        ]  # fmt: skip
        return [*columns(rows), *too_long(config, source, throughput), *self._advice(config, source, device)]

    def warning(self, config: RunConfig, source: Source, device: torch.device) -> list[str]:
        """That a run would take days; measured only if it could."""
        pixels = config.epochs * len(source) * len(config.view_graph.made) * config.image_size**2
        return too_long(config, source, self._measured(config, source, device)) if pixels > _MANY_PIXELS else []

    def _length(self, config: RunConfig, source: Source, throughput: Throughput) -> str:
        seconds = throughput.seconds(config, source)
        text = f"{config.epochs} epoch{'s' if config.epochs != 1 else ''}, about {duration(seconds)}"
        if config.minutes is None:
            return f"{text}; --minutes 30 would fit it to a time"
        fits = "" if seconds <= 60 * config.minutes else ": not even one epoch fits"
        return f"{text} (--minutes {config.minutes:g}{fits})"

    def _advice(self, config: RunConfig, source: Source, device: torch.device) -> Sequence[str]:
        """Another recipe, where training from scratch has too few images or too slow a machine."""
        if self.recipe != "folder" or config.init is not None or (device.type != "cpu" and len(source) >= FEW_IMAGES):
            return ()
        reason = f"with {len(source):,} images" if len(source) < FEW_IMAGES else "without a GPU"
        channels = () if config.channels == 3 else ("--channels", str(config.channels))
        lines = [
            shlex.join(["dssl", "train", name, "--data", config.data, *channels, "--out", f"runs/{name}"])
            for name in ("adapt", "robust")
        ]
        return (
            f"{reason}, an encoder that starts from ImageNet weights is better after minutes than one from scratch after hours:",
            f"  {lines[0]}",
            f"  {lines[1]}    (for noise, blur and bad light)",
        )


def too_long(config: RunConfig, source: Source, throughput: Throughput) -> list[str]:
    """What to do about a run that takes longer than a day."""
    if config.minutes is not None or (seconds := throughput.seconds(config, source)) < 86_400:
        return []
    return [
        f"warning: {config.epochs:,} epochs take about {duration(seconds)} on this machine; --hours 8 fits the run to a night"
    ]
