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
from dssl.augment import Normalization
from dssl.batchnorm import batchnorm_across_ranks
from dssl.config import RunConfig
from dssl.data import Quarantine, Source, check_sample
from dssl.data.device import Batch, DeviceTransfer
from dssl.data.folder import holds
from dssl.data.loader import Batches, Maker
from dssl.data.scale import as_range
from dssl.data.source import earlier_fingerprints, range_of
from dssl.distributed import World
from dssl.errors import DsslError
from dssl.log import Log
from dssl.methods import Teacher, declaration_of
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, learning_rate, peak_rate
from dssl.precision import half_type, precision_of
from dssl.run import OpenRun, RunFolder, open_run
from dssl.state import RunLength, Verdict
from dssl.training.adaptation import SHARES, add_to_average, interpolate, rate_shares
from dssl.training.health import HealthMonitor, patience
from dssl.training.knn import OnlineKnn
from dssl.training.prepare import Parts, build_method, evaluation_size, prepare, starting_encoder, view_maker
from dssl.training.start import CLOSE, Start
from dssl.types import Images
from dssl.version import VERSION
from dssl.weights import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(loop.Ending):
    """How a pretraining run ended."""

    knn: float | None


Gallery = Callable[[Source, Maker, Path], NDArray[np.uint8]]
"""Draws the views of a few images into a file and returns the picture: ``dssl.report.pictures.draw_gallery``."""


def train(config: RunConfig, out: Path | str, *, gallery: Gallery | None = None) -> RunResult:
    """Pretrain an encoder in the folder ``out``, or resume the run that is there."""
    folder = RunFolder(Path(out))
    if holds(config.data, folder.path):
        raise DsslError(
            f"--out is {folder.path}, inside the images of --data {config.data}: the run's pictures would become part of "
            "the data; name a folder outside it"
        )
    with open_run(
        folder, config, default=RunConfig, device=config.device, batch_size=config.batch_size,
        by_content=("data", "init", "teacher"),
    ) as opened:  # fmt: skip
        return _run(config, opened, gallery)


def _run(config: RunConfig, opened: OpenRun, gallery: Gallery | None) -> RunResult:
    folder, world, kept, resumed = opened.folder, opened.world, opened.kept, opened.resumed
    # before anything is written: an encoder that cannot be built, or cannot see images of this size, is refused here
    method = world.in_turn(lambda: build_method(config, init=None if resumed is not None else config.init))
    if kept is not None:
        world.all_or_error(lambda: _check_init(config, kept["config"].get("init"), folder))
    new = resumed is None and config.init is None
    parts = prepare(
        config, method, normalization=None if kept is None else Normalization.of(kept["normalization"]),
        value_range=as_range((kept or {}).get("range")), new=new, world=world,
    )  # fmt: skip
    quarantine = Quarantine(parts.source, path=folder.quarantine_file, max_share=config.bad_share)
    world.all_or_error(
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
    if kept is not None and kept.get("teacher") != header.get("teacher"):
        raise DsslError(
            f"the teacher {config.teacher} is not the one that the run started with (SHA-256 {header['teacher'][:12]}, then "
            f"{kept['teacher'][:12]}): restore it, or name another --out"
        )
    if resumed is not None and resumed[1].header["fingerprint"] in earlier_fingerprints(parts.source):
        resumed[1].header["fingerprint"] = parts.source.fingerprint
    opened.describe(
        header | {"precision": precision, "images": len(parts.source)},
        earlier_fingerprints=earlier_fingerprints(parts.source),
    )
    settings = loop.LoopSettings(
        length=RunLength(
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
        config, parts, settings, folder=folder, world=world, quarantine=quarantine, header=header, gallery=gallery,
        # a header without a step is refused where the state is restored
        first_step=0 if resumed is None else int(resumed[1].header.get("step", 0)),
    )  # fmt: skip
    ending = loop.run(
        task, settings, folder=folder, world=world, resumed=resumed, intro=[_greeting(config, parts, world, why)]
    )
    return RunResult(
        ending.step,
        ending.total,
        ending.verdict,
        ending.checkpoint,
        ending.signal,
        knn=task.knn.last if task.knn is not None else None,
    )


class Pretraining(loop.Task[Batch]):
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
        first_step: int,
    ) -> None:
        method = parts.method
        assert isinstance(method, nn.Module)
        precision, length = settings.precision, settings.length
        method.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
        method.to(memory_format=torch.channels_last)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
        objective: nn.Module = Objective(method, parts.graph)
        if world.size > 1 and config.batchnorm_across_ranks:
            objective = batchnorm_across_ranks(objective)
        self.config, self.parts, self.folder, self.world, self.header = config, parts, folder, world, header
        self.gallery, self.first_step = gallery, first_step
        self.quarantine, self.precision, self.total = quarantine, precision, length.total
        self.steps_per_epoch = length.round
        if config.checkpoint_activations:
            checkpoint_activations(parts.method.encoder)
        if config.compile:  # part by part: between the passes of the views there are backwards
            for part in method.children():
                part.compile()
        self.module, self.objective = method, objective
        self.head_steps = config.head_epochs * self.steps_per_epoch
        shares = {} if config.adapt is None else rate_shares(parts.method.encoder, config.adapt)
        self.optimizer = build_optimizer(method, config.optimizer, shares=shares, first_step=self.head_steps)
        # what autocast would cast the views to in the first layer, kept once instead of twice
        arithmetic = torch.float64 if precision == "fp64" else half_type(precision) or torch.float32
        self.feed = DeviceTransfer(world.device, normalization=parts.normalization, dtype=arithmetic)
        self.monitor: HealthMonitor = HealthMonitor(
            parts.graph,
            patience=patience(self.steps_per_epoch),
            predictions_from=declaration_of(config.method).predictions_judged_from,
        )
        self.fixed_rate = peak_rate(config.optimizer.rate, config.batch_size)
        self.warmup = round(config.optimizer.warmup_epochs * self.steps_per_epoch)
        self.knn = OnlineKnn(config, parts, autocast=half_type(precision)) if world.first else None
        self.start: Start | None = None
        """Of the first process, where the run started from weights."""

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
        if step < self.head_steps:
            return self.fixed_rate
        step, total = step - self.head_steps, self.total - self.head_steps
        return learning_rate(step, peak=self.fixed_rate, total=total, warmup=self.warmup)

    def after_step(self, step: int) -> None:
        self.parts.method.after_step(step, self.total)
        self.monitor.near_start = False  # until it is measured
        if (adapt := self.config.adapt) is None:
            return
        if step + 1 == self.head_steps:
            self.optimizer.state.clear()  # the moments of gradients that random heads gave
        averaged = max(1, round(adapt.average * (self.total - self.head_steps)))
        if adapt.average and (count := step + 1 - (self.total - averaged)) >= 1:
            add_to_average(self.optimizer, self._trained().values(), count=count)

    def _trained(self) -> dict[str, nn.Parameter]:
        encoder = self.parts.method.encoder
        return {name: value for name, value in encoder.named_parameters() if value.requires_grad}

    def begin(self, log: Log) -> None:
        new, finished = self.first_step == 0, self.first_step >= self.total
        if self.knn is not None and self.knn.obstacle:
            log.say(self.knn.obstacle)
        # a run of an earlier version did not keep its start
        known = self.config.init is not None and (new or self.folder.start_file.is_file())
        if self.config.adapt is not None and not known and not finished:
            raise DsslError(
                f"{self.folder.start_file} is missing: the result of this run lies between these weights and the last ones; "
                "put the file back, or start again with another --out"
            )
        if known and self.world.first and not finished:
            self.start = Start(self.config, self.parts, self.folder, header=self.header, new=new)
            if new and self.knn is not None and self.knn.due(0):
                log.knn(0, self.knn.measure())
            if new:
                log.start(0, self.start.record(None), self.start.text())
                log.say(f"the start: {self.start.text()}")
                if self.config.adapt is not None and self.config.adapt.most_drift is not None:
                    log.say("on the way the encoder may be below its start; the result lies between the two")
        if self.gallery is not None and self.world.first and not self.folder.views_file.is_file():
            maker = view_maker(self.config, self.parts.graph, None)
            log.gallery(self.gallery(self.parts.source, maker, self.folder.views_file))

    def after_round(self, step: int, log: Log) -> None:
        if self.config.adapt is not None and step == self.total:
            self._interpolate(log)
        if self.knn is not None and self.knn.due(step // self.steps_per_epoch):
            log.knn(step, self.knn.measure())
        if self.config.init is not None:
            self.monitor.compare_with_start(self.world.from_first(lambda: self._against_start(step, log)))

    def _interpolate(self, log: Log) -> None:
        """The last step: from the start towards the average, as far as the drift allows."""
        assert self.config.adapt is not None
        if (start := self.start) is None:  # only the first process saves
            return
        encoder, most = self.parts.method.encoder, self.config.adapt.most_drift
        end = {name: self.optimizer.state[one].get("average", one).clone() for name, one in self._trained().items()}
        if most is None:
            encoder.load_state_dict(end, strict=False)
            return
        share, drift = interpolate(encoder, start=start.weights, end=end, drift=lambda: start.drift(encoder), most=most)
        if share:
            log.say(
                f"the result is {share:.0%} of the way from the start to the average of the last weights: drift {drift:.2f}"
            )
        else:
            log.say(
                f"the result is the start, unchanged: even {SHARES[-1]:.0%} of the way to the average drifts by more than "
                f"{most:g}; to let it move, use --adapt.trained-blocks 1, a lower rate, or a larger --adapt.most-drift"
            )

    def _against_start(self, step: int, log: Log) -> Verdict | None:
        """Measure the encoder beside the weights that it started from; the verdict where it fell below them."""
        if self.start is None or step <= self.head_steps:  # it has not moved yet
            return None
        start = self.start
        start.measure(self.parts.method.encoder)
        self.monitor.near_start = start.standing.drift <= CLOSE
        verdict = None
        if self.config.adapt is None or step == self.total:  # else the run ends on weights between these and the start
            verdict = start.judge(step, self._instead())
        log.start(step, start.record(verdict), start.text())
        return verdict

    def _instead(self) -> str:
        """What to take where the run is below its start, chosen without labels."""
        start = f"the weights of the start: {self.folder.start_file}"
        if (step := self.monitor.last_near_start) is None:
            return f"take {start}; no checkpoint stayed within a drift of {CLOSE:g}"
        last = checkpoint.path_at(self.folder.checkpoints, step)
        return f"take {last}, the last checkpoint with a drift of at most {CLOSE:g}, or {start}"


def _check_init(config: RunConfig, before: str | None, folder: RunFolder) -> None:
    """Compare weights that have another name than when the run started with those that the run has kept."""
    if (None if config.init is None else str(config.init)) == before:
        return
    if config.init is not None and before is not None and folder.start_file.is_file():
        encoder = starting_encoder(config, init=config.init)
        kept = checkpoint.read(folder.start_file).part("method.encoder")
        if all(torch.equal(value.double(), kept[name].double()) for name, value in encoder.state_dict().items()):
            return
    raise DsslError(
        f"{folder.path} holds a run with another configuration (init: {before} -> {config.init}): "
        "use the old weights to resume it, or name another --out"
    )


def _header(config: RunConfig, parts: Parts) -> dict[str, Any]:
    teacher = getattr(parts.method, "teacher", None)
    return ({"teacher": teacher.sha256} if isinstance(teacher, Teacher) else {}) | {
        "dssl_version": VERSION,
        "config": config_io.to_dict(config),
        "normalization": parts.normalization.plain(),
        "fingerprint": parts.source.fingerprint,
        # what became black and white: evaluate, embed and export scale values in the same way
        **({} if (value_range := range_of(parts.source)) is None else {"range": value_range.plain()}),
        # what evaluate, embed and export take images at; without it the size of the views
        **({} if config.adapt is None else {"image_size": evaluation_size(config)}),
    }


def _greeting(config: RunConfig, parts: Parts, world: World, why: str) -> str:
    processes = f"{world.size} processes on " if world.size > 1 else ""
    where = f"{config.graph} with {config.encoder} on {processes}{world.device}"
    return f"{parts.source.name}: {len(parts.source):,} images; {where}; {why}"
