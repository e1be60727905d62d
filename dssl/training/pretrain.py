"""Pretraining on the loop: views of images are pulled to each other along the edges of a graph."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dssl import config_io, loop, plugins
from dssl.augment import BaseViewMaker
from dssl.config import Precision, RunConfig
from dssl.data import Quarantine, Source, check_sample
from dssl.data.folder import holds
from dssl.data.loader import Batch, Batches, DeviceTransfer
from dssl.distributed import World, batchnorm_across_ranks
from dssl.errors import DsslError, Stopped
from dssl.log import Log, phase
from dssl.methods import MatchConfig
from dssl.methods.method import Method
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, learning_rate, peak_rate
from dssl.precision import half_type, precision_of
from dssl.run import Run, RunFolder
from dssl.state import RunLength, StopSignals
from dssl.training.adaptation import Averaged, ComparedWithStart, rate_shares
from dssl.training.budget import Planner, steps_in_epoch
from dssl.training.health import RunMonitor, patience
from dssl.training.knn import OnlineKnn
from dssl.training.prepare import (
    TrainingData,
    build_method,
    encoder_of,
    evaluation_size,
    fit_to_data,
    starting_encoder,
    training_data,
    view_maker,
)
from dssl.training.stability import Stability
from dssl.types import Images
from dssl.version import VERSION
from dssl.weights import checkpoint

Gallery = Callable[[Source, BaseViewMaker, Path], NDArray[np.uint8]]
"""Draws the views of a few images into a file and returns the picture: ``dssl.report.pictures.draw_gallery``."""

_BY_CONTENT = ("data", "init", "teacher")
_EXTENDED = ("epochs", "schedule_from", "optimizer.warmup_epochs")
"""Settings in which a run may differ from what its folder says: files that have moved, and more epochs for a finished run."""


def train(
    config: RunConfig, out: Path | str, *, gallery: Gallery | None = None, planner: Planner | None = None,
    trackers: Sequence[str] = (),
) -> loop.Ending:  # fmt: skip
    """Pretrain an encoder in the folder ``out``, or resume the run that is there; its curves also go to the ``trackers``.

    A new run with ``minutes`` is as long as the ``planner`` finds it can be; a finished run that is given more epochs goes on.
    """
    if holds(config.data, Path(out)):
        raise DsslError(
            f"--out is {out}, inside the images of --data {config.data}: the run's pictures would become part of "
            "the data; choose a folder outside it"
        )
    config, may_differ = as_it_stands(config, RunFolder(Path(out)), fitted=planner is None)
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    signals = StopSignals() if alone else None  # torchrun ends processes that are not in their loop yet
    threads = torch.get_num_threads()
    try:
        with signals or nullcontext(), Run.open(Path(out), config, by_content=may_differ) as run:
            with nullcontext() if signals is None else signals.interrupting():
                task, intro = set_up(config, run, gallery=gallery, planner=planner)
            return loop.run(task, run, intro=intro, signals=signals, trackers=trackers)
    except KeyboardInterrupt:
        if signals is None or signals.signal is None:
            raise
        raise Stopped(signals.signal, saved=False) from None
    finally:
        torch.set_num_threads(threads)


def as_it_stands(config: RunConfig, folder: RunFolder, *, fitted: bool) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with what only the run in the folder knows, and the settings in which it may differ from the run's.

    These are what was ``fitted`` to minutes, unless the configuration is the run's already, the schedule of a run that was given
    more epochs, and of one that is given more now.
    """
    kept = folder.read_config() if folder.has_run else {}
    before = kept.get("config", {})
    images, done, batch, since = (
        kept.get("images"), before.get("epochs"), before.get("batch_size"), before.get("schedule_from", 0)
    )  # fmt: skip
    if "task" in kept or not all(isinstance(number, int) for number in (images, done, batch, since)):
        return config, _BY_CONTENT  # no run of ours, or a damaged file, which has its own error
    if fitted and config.minutes is not None and before.get("minutes") is not None:  # once, when the run began
        known = vars(config_io.from_dict(before, where=str(folder.config_file)))
        same = ("epochs", "optimizer", "adapt", "precision", "schedule_from")
        return replace(config, **{name: known[name] for name in same}), _BY_CONTENT
    if config.epochs == done and since < done:
        return config if config.schedule_from == since else replace(config, schedule_from=since), _BY_CONTENT
    steps = checkpoint.steps_in(folder.checkpoints)
    finished = bool(steps) and steps[-1] >= images // max(1, batch) * done
    if not finished or config.epochs < done:
        return config, _BY_CONTENT
    more = config.epochs - done
    warmup = min(config.optimizer.warmup_epochs, more / 10)
    longer = replace(config, schedule_from=done, optimizer=replace(config.optimizer, warmup_epochs=warmup))
    if config_io.difference(before, longer, ignoring=(*_BY_CONTENT, *_EXTENDED)):  # the error names all differences
        return config, _BY_CONTENT
    return longer, (*_BY_CONTENT, *_EXTENDED)


def set_up(
    config: RunConfig, run: Run, *, gallery: Gallery | None = None, planner: Planner | None = None
) -> tuple["Pretraining", list[str]]:
    """What the loop trains, and what is said before it begins."""
    assert run.folder is not None
    world, kept = run.world, run.kept
    init = None if run.resumed is not None else config.init
    # before the images are opened: an encoder that cannot be built, or cannot see images of this size, is rejected here
    with phase(f"building {config.encoder}"):
        method = world.in_turn(lambda: build_method(config, init=init))
    world.all_or_error(lambda: _check_init(config, run))
    data = training_data(config, kept=kept, world=world)
    intro, warning, recipe = list[str](), list[str](), dict[str, str]()
    if planner is None and config.minutes is not None:
        planner = Planner()
    if kept is None and planner is not None:
        recipe = {} if planner.recipe is None else {"recipe": planner.recipe}
        if config.minutes is not None or planner.recipe == "folder":
            planned, plan = config, planner.plan
            with phase("measuring how fast this machine is"):
                config, intro = world.from_first(lambda: plan(planned, data.source, world.device))
            if (config.encoder, config.image_size) != (planned.encoder, planned.image_size):
                method = world.in_turn(lambda: build_method(config, init=init))
        elif planner.recipe is not None and world.size == 1:
            with phase("measuring how fast this machine is"):
                warning = planner.warning(config, data.source, world.device)
    # a resumed run has as many as it was started with: its sums are then the same to the last bit
    threads = config.torch_threads or (kept or {}).get("config", {}).get("torch_threads")
    if world.device.type == "cpu" and threads is not None:
        torch.set_num_threads(threads)
    with phase("measuring the filters of the first layer"):
        fit_to_data(config, method, data, new=run.resumed is None and config.init is None, world=world)
    quarantine = Quarantine(data.source, path=run.folder.quarantine_file, max_share=config.bad_share)
    with phase("reading a sample of the images"):
        world.all_or_error(
            lambda: (
                check_sample(data.source, seed=config.seed, threads=config.threads, quarantine=quarantine)
                if world.first
                else None
            )
        )
    with phase("choosing the precision"):
        precision, why = precision_of(
            config.precision, kept, world,
            encoder=method.encoder, image_size=config.image_size, channels=config.channels,
        )  # fmt: skip
    header = _header(config, data, method)
    if kept is not None:
        plugins.check(kept.get("plugins", []), place=run.folder.path)
    if kept is not None and kept.get("teacher") != header.get("teacher"):
        raise DsslError(
            f"the teacher {config.teacher} is not the one the run started with (SHA-256 {header['teacher'][:12]}, then "
            f"{kept['teacher'][:12]}): restore it, or choose another --out"
        )
    earlier = data.source.earlier_fingerprints()
    if run.resumed is not None and run.resumed[1].header["fingerprint"] in earlier:
        run.resumed[1].header["fingerprint"] = data.source.fingerprint
    length = epochs_of(config, data.source)
    about = header | {"precision": precision, "images": len(data.source)} | recipe
    run.describe(about, earlier_fingerprints=earlier)
    intro = intro or [_intro(config, data, world, why), *warning]
    if config.schedule_from and run.first_step == config.schedule_from * length.round:
        more = config.epochs - config.schedule_from
        intro.append(
            f"{config.schedule_from} epochs are done: {more} more from the last weights, with a new schedule of the learning rate"
        )
    task = Pretraining(
        config, data, method, run=run, precision=precision, length=length, header=header, quarantine=quarantine,
        gallery=gallery,
    )  # fmt: skip
    return task, intro


def epochs_of(config: RunConfig, source: Source) -> RunLength:
    """As many steps in an epoch as there are whole batches."""
    steps = steps_in_epoch(config, source)
    return RunLength(total=steps * config.epochs, steps_per_epoch=steps, round=steps, counted="epoch")


class Pretraining(loop.Task[Batch]):
    """A method, a graph of views and the images they are made of, as the loop trains them."""

    name = "method"
    doing = "drawing the views"

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        method: Method,
        *,
        run: Run,
        precision: Precision,
        length: RunLength,
        header: Mapping[str, Any],
        quarantine: Quarantine,
        gallery: Gallery | None = None,
    ) -> None:
        self.config, self.data, self.method, self.run, self.header = config, data, method, run, header
        self.quarantine, self.gallery, self.length, self.precision = quarantine, gallery, length, precision
        self.batch_size, self.seed, self.checkpoint = config.batch_size, config.seed, config.checkpoint
        self.check_every, self.stop_collapsed = config.health.every, config.health.stop
        self.clip = config.optimizer.clip
        world, steps, self.total = run.world, length.round, length.total
        full = torch.float64 if precision == "fp64" else torch.float32
        method.to(world.device, full)
        method.to(memory_format=torch.channels_last)
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # torch 2.9 asks for names that others lack
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        torch.backends.cudnn.benchmark = True  # every batch has the same shape
        self.module, self.objective = method, Objective(method, config.view_graph)
        if world.size > 1 and config.batchnorm_across_ranks:
            self.objective = batchnorm_across_ranks(self.objective)
        if config.checkpoint_activations:
            checkpoint_activations(method.encoder)
        if config.compile:  # part by part: between the passes of the views there are backwards
            for part in method.children():
                part.compile()
        self.head_steps = config.head_epochs * steps
        self.schedule_start = max(config.head_epochs, config.schedule_from) * steps
        shares = {} if config.adapt is None else rate_shares(method.encoder, config.adapt)
        self.optimizer = build_optimizer(method, config.optimizer, shares=shares, first_step=self.head_steps)
        # what autocast would cast the views to in the first layer, kept once instead of twice
        self.feed = DeviceTransfer(world.device, normalization=data.normalization, dtype=half_type(precision) or full)
        self.monitor: RunMonitor = RunMonitor(
            config.view_graph,
            patience=patience(steps),
            predictions_from=config.method.predictions_checked_from,
            guess=config.method.loss_of_guessing(),
        )
        self.fixed_rate = peak_rate(config.optimizer.rate, config.batch_size)
        self.warmup = round(config.optimizer.warmup_epochs * steps)
        self.hooks = self._hooks()

    def _hooks(self) -> list[loop.Hook]:
        """kNN is that of the interpolated weights, and comes before the comparison with the start."""
        config, run, source, hooks = self.config, self.run, self.data.source, list[loop.Hook]()
        encoder = encoder_of(config, self.method.encoder, self.data)
        if run.world.first:
            at_start = config.init is not None and run.first_step == 0
            measured = replace(encoder, autocast=half_type(self.precision))
            hooks.append(OnlineKnn(config, source, measured, steps_per_epoch=self.length.round, at_start=at_start))
        measures = config.health.compare_with_start and config.knn_every > 0 and run.folder is not None
        if config.init is not None or measures:
            compared = ComparedWithStart(
                config, source, encoder, self.monitor, run=run, header=self.header, head_steps=self.head_steps,
                length=self.length,
            )  # fmt: skip
            hooks.append(compared)
            if config.adapt is not None:
                hooks.insert(0, Averaged(config.adapt, self.optimizer, compared, first_step=self.schedule_start))
            if isinstance(config.method, MatchConfig):
                hooks.append(Stability(config, source, encoder, self.monitor, run=run, total=self.total))
        return hooks

    def batches(self, start: int) -> AbstractContextManager[Batches]:
        config, data, world = self.config, self.data, self.run.world
        return Batches(
            data.source,
            view_maker(config, config.view_graph, None if self.feed.as_bytes else data.normalization),
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

    def to_device(self, batch: Batch) -> dict[str, Images]:
        """The views by name."""
        return self.feed.to_device(batch)

    def rate(self, step: int) -> float:
        if step < self.head_steps:
            return self.fixed_rate
        step, total = step - self.schedule_start, self.total - self.schedule_start
        return learning_rate(step, peak=self.fixed_rate, total=total, warmup=self.warmup)

    def after_step(self, step: int) -> None:
        self.method.after_step(step, self.total)

    def begin(self, log: Log) -> None:
        folder = self.run.folder
        if self.gallery is not None and folder is not None and self.run.world.first and not folder.views_file.is_file():
            maker = view_maker(self.config, self.config.view_graph, None)
            log.gallery(self.gallery(self.data.source, maker, folder.views_file))


def _check_init(config: RunConfig, run: Run) -> None:
    """Compare weights that have another name than when the run started with those that the run has kept."""
    folder = run.folder
    assert folder is not None
    if run.kept is None or (None if config.init is None else str(config.init)) == run.kept["config"].get("init"):
        return
    before = run.kept["config"].get("init")
    if config.init is not None and before is not None and folder.start_file.is_file():
        encoder = starting_encoder(config, init=config.init)
        started = checkpoint.read(folder.start_file).part("method.encoder")
        if all(torch.equal(value.double(), started[name].double()) for name, value in encoder.state_dict().items()):
            return
    raise DsslError(
        f"{folder.path} contains a run with another configuration (init: {before} -> {config.init}): "
        "use the old weights to resume it, or choose another --out"
    )


def _header(config: RunConfig, data: TrainingData, method: Method) -> dict[str, Any]:
    teacher = method.taught_by
    return ({} if teacher is None else {"teacher": teacher.sha256}) | {
        "dssl_version": VERSION,
        "config": config_io.to_dict(config),
        "normalization": data.normalization.plain(),
        "fingerprint": data.source.fingerprint,
        **({"plugins": loaded} if (loaded := plugins.loaded()) else {}),
        # what became black and white: evaluate, embed and export scale values in the same way
        **({} if (value_range := data.source.value_range) is None else {"range": value_range.plain()}),
        # what evaluate, embed and export take images at; without it the size of the views
        **({} if config.adapt is None else {"image_size": evaluation_size(config)}),
    }


def _intro(config: RunConfig, data: TrainingData, world: World, why: str) -> str:
    processes = f"{world.size} processes on " if world.size > 1 else ""
    where = f"{config.graph} with {config.encoder} on {processes}{world.device}"
    return f"{data.source.name}: {len(data.source):,} images; {where}; {why}"
