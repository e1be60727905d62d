"""Pretraining on the loop: views of images are pulled to each other along the edges of a graph."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dssl import config_io, loop
from dssl.augment import Normalization, ViewMaker
from dssl.config import RunConfig
from dssl.data import Quarantine, Source, check_sample
from dssl.data.device import Batch, Feed
from dssl.data.folder import holds
from dssl.data.loader import Batches
from dssl.data.source import earlier_fingerprints
from dssl.distributed import World, batchnorm_across_ranks
from dssl.errors import DsslError
from dssl.log import Log
from dssl.methods import Method, declaration_of
from dssl.models.checkpointing import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, learning_rate, peak_rate
from dssl.precision import half_type, precision_of
from dssl.run import OpenRun, RunFolder, open_run
from dssl.state import Pace
from dssl.train.health import Health, patience
from dssl.train.knn import OnlineKnn
from dssl.train.prepare import Parts, build_method, prepare, view_maker
from dssl.types import Images
from dssl.version import VERSION
from dssl.weights import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(loop.Ending):
    """How a pretraining run ended."""

    knn: float | None


Gallery = Callable[[Source, ViewMaker, Path], NDArray[np.uint8]]
"""Draws the views of a few images into a file and returns the picture: ``dssl.report.pictures.draw_gallery``."""


def train(config: RunConfig, out: Path | str, *, gallery: Gallery | None = None) -> RunResult:
    """Pretrain an encoder in the folder ``out``, or resume the run that is there."""
    folder = RunFolder(Path(out))
    if holds(config.data, folder.path):
        raise DsslError(
            f"--out is {folder.path}, inside the images of --data {config.data}: the run's pictures would become part of "
            "the data; name a folder outside it"
        )
    # before anything is written: an encoder that cannot be built, or cannot see images of this size, is refused here
    method = build_method(config, init=None if checkpoint.steps_in(folder.checkpoints) else config.init)

    with open_run(folder, config, default=RunConfig, device=config.device, batch_size=config.batch_size) as opened:
        return _run(config, method, opened, gallery)


def _run(config: RunConfig, method: Method, opened: OpenRun, gallery: Gallery | None) -> RunResult:
    folder, world, kept, resumed = opened.folder, opened.world, opened.kept, opened.resumed
    new = resumed is None and config.init is None
    parts = prepare(config, method, normalization=_normalization(kept), new=new, world=world)
    quarantine = Quarantine(parts.source, path=folder.quarantine_file, max_share=config.bad_share)
    world.together(
        lambda: (
            check_sample(parts.source, seed=config.seed, threads=config.threads, quarantine=quarantine)
            if world.first
            else None
        )
    )
    steps_per_epoch = len(parts.source) // config.batch_size
    if steps_per_epoch < 1:
        raise DsslError(
            f"{parts.source.name} has {len(parts.source)} images, fewer than the batch of {config.batch_size}: "
            "choose a smaller --batch-size or more data"
        )
    precision, why = precision_of(
        config.precision, kept, world,
        encoder=method.encoder, image_size=config.image_size, channels=config.channels,
    )  # fmt: skip
    header = _header(config, parts)
    if resumed is not None and resumed[1].header["fingerprint"] in earlier_fingerprints(parts.source):
        resumed[1].header["fingerprint"] = parts.source.fingerprint
    opened.describe(header | {"precision": precision, "images": len(parts.source)})
    settings = loop.LoopSettings(
        pace=Pace(
            total=steps_per_epoch * config.epochs,
            steps_per_epoch=steps_per_epoch,
            round=steps_per_epoch,
            counted="epoch",
        ),
        batch_size=config.batch_size,
        data=config.data,
        precision=precision,
        seed=config.seed,
        checkpoint=config.checkpoint,
        look_every=config.health.every,
        stop_collapsed=config.health.stop,
        clip=config.optimizer.clip,
    )
    task = Pretraining(
        config, parts, settings, folder=folder, world=world, quarantine=quarantine, header=header, gallery=gallery
    )
    ending = loop.run(
        task, settings, folder=folder, world=world, resumed=resumed, greeting=[_greeting(config, parts, world, why)]
    )
    return RunResult(
        ending.step,
        ending.total,
        ending.opinion,
        ending.checkpoint,
        ending.signal,
        knn=task.knn.last if task.knn is not None else None,
    )


class Pretraining(loop.Trainable[Batch]):
    """A method, a graph of views and the images they are made of, as the loop trains them."""

    name = "method"

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        settings: loop.LoopSettings,
        *,
        folder: RunFolder,
        world: World,
        quarantine: Quarantine,
        header: Mapping[str, Any],
        gallery: Gallery | None,
    ) -> None:
        method = parts.method
        assert isinstance(method, nn.Module)
        precision, pace = settings.precision, settings.pace
        method.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
        method.to(memory_format=torch.channels_last)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
        objective: nn.Module = Objective(method, parts.graph)
        if world.size > 1 and config.batchnorm_across_ranks:
            objective = batchnorm_across_ranks(objective)
        self.config, self.parts, self.folder, self.world, self.header = config, parts, folder, world, header
        self.gallery = gallery
        self.quarantine, self.precision, self.total = quarantine, precision, pace.total
        self.steps_per_epoch = pace.round
        if config.checkpoint_activations:
            checkpoint_activations(parts.method.encoder)
        if config.compile:  # part by part: between the passes of the views there are backwards
            for part in method.children():
                part.compile()
        self.module, self.objective = method, objective
        self.optimizer = build_optimizer(method, config.optimizer)
        # what autocast would cast the views to in the first layer, kept once instead of twice
        arithmetic = torch.float64 if precision == "fp64" else half_type(precision) or torch.float32
        self.feed = Feed(world.device, normalization=parts.normalization, dtype=arithmetic)
        self.watch = Health(
            parts.graph,
            patience=patience(self.steps_per_epoch),
            predictions=declaration_of(config.method).judges_predictions,
        )
        self.fixed_rate = peak_rate(config.optimizer.rate, config.batch_size)
        self.warmup = round(config.optimizer.warmup_epochs * self.steps_per_epoch)
        self.knn = OnlineKnn(config, parts, autocast=half_type(precision)) if world.first else None

    def batches(self, start: int) -> AbstractContextManager[Batches]:
        config, parts, world = self.config, self.parts, self.world
        return Batches(
            parts.source,
            view_maker(config, parts.graph, None if self.feed.as_bytes else parts.normalization),
            batch_size=config.batch_size,
            seed=config.seed,
            steps=self.total,
            start_step=start,
            threads=config.threads,
            rank=world.rank,
            world_size=world.size,
            quarantine=self.quarantine,
            pinned=self.feed.as_bytes,
            shuffle=config.shuffle,
            window=config.window,
        )

    def place(self, batch: Batch) -> dict[str, Images]:
        """The views by name."""
        return self.feed.place(batch)

    def rate(self, step: int) -> float:
        return learning_rate(step, peak=self.fixed_rate, total=self.total, warmup=self.warmup)

    def after_step(self, step: int) -> None:
        self.parts.method.after_step(step, self.total)

    def begin(self, log: Log) -> None:
        if self.gallery is not None and self.world.first and not self.folder.views_file.is_file():
            maker = view_maker(self.config, self.parts.graph, None)
            log.gallery(self.gallery(self.parts.source, maker, self.folder.views_file))

    def after_round(self, step: int, log: Log) -> None:
        if self.knn is not None and self.knn.due(step // self.steps_per_epoch):
            log.knn(step, self.knn.measure())


def _normalization(kept: dict[str, Any] | None) -> Normalization | None:
    if kept is None:
        return None
    return Normalization(tuple(kept["normalization"]["mean"]), tuple(kept["normalization"]["std"]))


def _header(config: RunConfig, parts: Parts) -> dict[str, Any]:
    return {
        "dssl_version": VERSION,
        "config": config_io.to_dict(config),
        "normalization": {"mean": list(parts.normalization.mean), "std": list(parts.normalization.std)},
        "fingerprint": parts.source.fingerprint,
    }


def _greeting(config: RunConfig, parts: Parts, world: World, why: str) -> str:
    processes = f"{world.size} processes on " if world.size > 1 else ""
    where = f"{config.graph} with {config.encoder} on {processes}{world.device}"
    return f"{parts.source.name}: {len(parts.source):,} images; {where}; {why}"
