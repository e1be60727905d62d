"""The training loop: one step is readable from top to bottom, and any step can be the first."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dssl import config_io
from dssl.augment import Normalization
from dssl.config import Precision, RunConfig, SimSiamConfig
from dssl.data import Quarantine, check_sample
from dssl.data.loader import Batches
from dssl.distributed import batchnorm_across_ranks
from dssl.errors import DsslError
from dssl.objective import Objective
from dssl.train import checkpoint
from dssl.train.health import Health, Opinion, look
from dssl.train.knn import OnlineKnn
from dssl.train.log import Log
from dssl.train.optim import build_optimizer, set_learning_rate
from dssl.train.precision import autocast, choose_precision
from dssl.train.prepare import Parts, prepare, view_maker
from dssl.train.run_folder import RunFolder
from dssl.train.schedule import learning_rate, peak_rate
from dssl.train.signals import Stop
from dssl.train.state import Keeper, TrainState
from dssl.train.world import World, join_world
from dssl.version import VERSION

_VOTE_EVERY = 8
"""Steps between the votes on stopping when there are several processes: a vote waits for all of them."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    step: int
    total: int
    opinion: Opinion
    checkpoint: Path | None
    knn: float | None
    signal: int | None = None
    """The signal that stopped it, if one did."""

    @property
    def exit_code(self) -> int:
        """0 fine, 3 collapsed, 4 diverged, 128 + n stopped by signal n."""
        if self.signal is not None:
            return 128 + self.signal
        return {"diverged": 4, "collapsed": 3, "partial collapse": 3}.get(self.opinion.verdict, 0)


def train(config: RunConfig, out: Path | str) -> RunResult:
    """Pretrain an encoder in the folder ``out``, or continue the run that is there."""
    folder = RunFolder(Path(out))
    with join_world(config.device, batch_size=config.batch_size) as world:
        if not world.first:
            world.wait()  # the first process may refuse the folder
            return _run(config, folder, world)
        folder.check(config)
        with folder.locked():
            folder.check(config)
            world.wait()
            return _run(config, folder, world)


def _run(config: RunConfig, folder: RunFolder, world: World) -> RunResult:
    kept = folder.read_config() if folder.has_run else None
    world.wait()  # all have looked before the first process writes
    resumed = checkpoint.newest_good(folder.checkpoints) if kept is not None else None
    precision, why = _precision(config, kept, world)
    parts = prepare(config, normalization=_normalization(kept), init=config.init if resumed is None else None)
    quarantine = Quarantine(parts.source, path=folder.quarantine_file, max_share=config.bad_share)
    check_sample(parts.source, seed=config.seed, quarantine=quarantine)
    steps_per_epoch = len(parts.source) // config.batch_size
    if steps_per_epoch < 1:
        raise DsslError(
            f"{parts.source.name} has {len(parts.source)} images, fewer than the batch of {config.batch_size}: "
            "choose a smaller --batch-size or more data"
        )
    total = steps_per_epoch * config.epochs
    _describe(config, folder, world, parts, precision)

    method = parts.method
    assert isinstance(method, nn.Module)
    method.to(world.device, torch.float64 if precision == "fp64" else torch.float32)
    method.to(memory_format=torch.channels_last)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    objective: nn.Module = Objective(method, parts.graph)
    if world.size > 1 and config.batchnorm_across_ranks:
        objective = batchnorm_across_ranks(objective, device=world.device)
    optimizer = build_optimizer(method, config.optimizer)
    health = Health(
        parts.graph, patience=max(3 * steps_per_epoch, 100), predictions=isinstance(config.method, SimSiamConfig)
    )
    state = TrainState(method, optimizer, health)
    keeper = Keeper(folder, config, state, steps_per_epoch=steps_per_epoch, header=_header(config, parts))
    if resumed is not None:
        keeper.restore(resumed, fingerprint=parts.source.fingerprint)
        if world.first:
            folder.drop_metrics_after(state.step)
    if world.size > 1:
        objective = DistributedDataParallel(objective)
    compiled = torch.compile(objective) if config.compile else objective

    peak = peak_rate(config.optimizer.rate, config.batch_size)
    warmup = round(config.optimizer.warmup_epochs * steps_per_epoch)
    knn = OnlineKnn(config, parts, autocast=torch.bfloat16 if precision == "bf16" else None) if world.first else None
    bad_step = torch.full((), -1, dtype=torch.int64, device=world.device)
    batches = Batches(
        parts.source,
        view_maker(config, parts.graph, parts.normalization),
        batch_size=config.batch_size,
        seed=config.seed,
        steps=total,
        start_step=state.step,
        threads=config.threads,
        rank=world.rank,
        world_size=world.size,
        quarantine=quarantine,
    )
    log = Log(
        folder,
        start=state.step,
        total=total,
        steps_per_epoch=steps_per_epoch,
        batch_size=config.batch_size,
        active=world.first,
    )
    now = None
    with batches, log, Stop() as stop:
        log.say(*keeper.complaints, *_greeting(config, parts, world, why, state.step, total))
        _gallery(config, folder, parts, log, world)
        for step in range(state.step, total):
            started = time.perf_counter()
            views = batches.at(step).views
            waited = time.perf_counter() - started
            views = {name: _place(images, world.device, precision) for name, images in views.items()}
            rate = learning_rate(step, peak=peak, total=total, warmup=warmup)
            set_learning_rate(optimizer, rate, fixed=peak)
            with autocast(world.device, precision):
                loss = compiled(views)
            optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            if config.optimizer.clip is not None:
                nn.utils.clip_grad_norm_(method.parameters(), config.optimizer.clip)
            optimizer.step()
            method.after_step(step, total)
            state.step = step + 1

            # the first step whose loss is no number is remembered on the device; reading it waits for the device
            bad_step = torch.where((bad_step < 0) & ~torch.isfinite(loss.total.detach()), step, bad_step)
            log.step(waited)
            epoch_ends = (step + 1) % steps_per_epoch == 0
            if step % config.health.every == 0 or epoch_ends or step + 1 == total:
                now = look(step, loss)
                opinion = health.judge(now)
                if int(bad_step) >= 0 or opinion.verdict == "diverged":
                    opinion = health.divergence(now, first=int(bad_step))
                log.look(now, opinion, rate=rate, spread=min(health.judged(now).values()))
                hopeless = opinion.verdict == "diverged" or (config.health.stop and opinion.verdict == "collapsed")
                if world.any(hopeless):  # each process sees its own part of the batch, and they stop together
                    break
            if epoch_ends:
                epoch = (step + 1) // steps_per_epoch
                if knn is not None and knn.due(epoch):
                    log.knn(step + 1, knn.measure())
                log.epoch(epoch, config.epochs, now)
            leaving = _should_stop(stop, step, world)
            if leaving or keeper.due(epoch_ends=epoch_ends, last=step + 1 == total):
                if not state.is_finite():  # is not saved; the next look stops the run, on all processes together
                    health.divergence(now or look(step, loss), first=int(bad_step))
                elif world.first:
                    keeper.save()
            if leaving:
                break
        _farewell(log, keeper, health, state.step, total, stop)
    world.wait()
    return RunResult(
        state.step, total, health.opinion, keeper.newest(), knn.last if knn is not None else None, stop.signal
    )


def _farewell(log: Log, keeper: Keeper, health: Health, step: int, total: int, stop: Stop) -> None:
    opinion = health.opinion
    if opinion.verdict == "diverged" or (step < total and stop.signal is None):
        reasons = opinion.lines() if opinion.verdict != log.verdict else []
        log.say(*reasons, f"stopped at step {step} of {total}: {keeper.last_healthy_line()}")
    elif stop.signal is not None:
        log.say(f"stopped at step {step} of {total} and saved; the same command continues it")
    elif opinion.verdict in ("collapsed", "partial collapse"):
        log.say(f"finished, but {opinion.verdict}: {keeper.last_healthy_line()}")


def _should_stop(stop: Stop, step: int, world: World) -> bool:
    if world.size == 1:
        return stop.signal is not None
    return step % _VOTE_EVERY == 0 and world.any(stop.signal is not None)


def _place(images: Tensor, device: torch.device, precision: Precision) -> Tensor:
    images = images.to(device, non_blocking=True)
    return images.double() if precision == "fp64" else images


def _precision(config: RunConfig, kept: dict[str, Any] | None, world: World) -> tuple[Precision, str]:
    """What the configuration says, what the run started with, or what is measured now; the same on all processes."""
    if config.precision != "auto":
        return config.precision, f"{config.precision}, as asked"
    if kept is not None:
        return kept["precision"], f"{kept['precision']}, as the run started"
    choice, why = choose_precision(world.device)
    if world.size > 1:
        votes = torch.tensor([int(choice == "bf16")], device=world.device)
        torch.distributed.broadcast(votes, 0)
        choice = "bf16" if votes.item() else "fp32"
    return choice, why


def _normalization(kept: dict[str, Any] | None) -> Normalization | None:
    if kept is None:
        return None
    return Normalization(tuple(kept["normalization"]["mean"]), tuple(kept["normalization"]["std"]))


def _header(config: RunConfig, parts: Parts) -> dict[str, object]:
    return {
        "dssl_version": VERSION,
        "config": config_io.to_dict(config),
        "normalization": {"mean": list(parts.normalization.mean), "std": list(parts.normalization.std)},
        "fingerprint": parts.source.fingerprint,
    }


def _describe(config: RunConfig, folder: RunFolder, world: World, parts: Parts, precision: Precision) -> None:
    """config.json is written by the first process, once; the others wait for it."""
    if world.first and not folder.has_run:
        folder.write_config(_header(config, parts) | {"precision": precision, "images": len(parts.source)})
    world.wait()


def _greeting(config: RunConfig, parts: Parts, world: World, why: str, step: int, total: int) -> list[str]:
    processes = f"{world.size} processes on " if world.size > 1 else ""
    where = f"{config.graph} with {config.encoder} on {processes}{world.device}"
    lines = [f"{parts.source.name}: {len(parts.source):,} images; {where}; {why}"]
    if step >= total:
        lines.append(f"this run is finished: {total} steps")
    elif step:
        lines.append(f"continuing at step {step} of {total}")
    return lines


def _gallery(config: RunConfig, folder: RunFolder, parts: Parts, log: Log, world: World) -> None:
    if world.first and not folder.views_file.is_file():
        from dssl.train.gallery import draw_gallery

        log.gallery(draw_gallery(parts.source, view_maker(config, parts.graph, None), folder.views_file))
