"""The one training loop, for pretraining and for fine-tuning: a step is readable from top to bottom, any step can be the first.

A task says what is trained, on which inputs and how it is watched; the engine owns steps, looks, saves, signals and processes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dssl import rng
from dssl.config import CheckpointConfig, Precision
from dssl.log import Log
from dssl.objective import Objective
from dssl.optim import set_learning_rate
from dssl.precision import autocast, choose_precision, loss_scaler
from dssl.run import RunFolder
from dssl.signals import Stop
from dssl.state import Keeper, Opinion, Pace, TrainState, Watch
from dssl.version import VERSION
from dssl.weights import checkpoint
from dssl.weights.checkpoint import Checkpoint
from dssl.world import World, join_world

_VOTE_EVERY = 32
"""Most steps between two votes on stopping. It waits for the device and for all ranks, so a look takes it along."""

Resumed = tuple[Path, Checkpoint, list[str]]
Batch_co = TypeVar("Batch_co", covariant=True)
Batch = TypeVar("Batch")


class Batches(Protocol[Batch_co]):
    """Inputs by step, from any start step."""

    def at(self, step: int) -> Batch_co: ...


class Task(Protocol[Batch]):
    """What differs between one training and another."""

    @property
    def name(self) -> str:
        """Of the trained module in a checkpoint: its tensors are ``name.…``."""

    @property
    def module(self) -> nn.Module:
        """What is saved."""

    @property
    def objective(self) -> nn.Module:
        """``objective(inputs)`` gives a report whose ``total`` is the loss; DDP wraps it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def watch(self) -> Watch[Any]: ...

    @property
    def header(self) -> Mapping[str, Any]:
        """What every checkpoint says of the run: its configuration and the fingerprint of its data."""

    @property
    def fixed_rate(self) -> float:
        """The learning rate of parameter groups that do not follow the schedule."""

    def batches(self, start: int) -> AbstractContextManager[Batches[Batch]]:
        """The inputs from this step on, made by threads that end with the context."""

    def place(self, batch: Batch) -> Any:
        """The inputs of a step on the device and in the run's arithmetic."""

    def rate(self, step: int) -> float: ...

    def after_step(self, step: int) -> None:
        """What the weights need once they have moved: a moving average."""

    def begin(self, log: Log) -> None:
        """Before the first step."""

    def after_round(self, step: int, log: Log) -> None:
        """Called on every process when ``step`` steps are done and a round is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the engine goes about a task; it knows no configuration."""

    pace: Pace
    batch_size: int
    data: str
    """What the data is called in an error."""
    precision: Precision
    seed: int
    """Of what the network draws while it trains: dropout, stochastic depth."""
    checkpoint: CheckpointConfig
    look_every: int
    stop_collapsed: bool = False
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    step: int
    total: int
    opinion: Opinion
    checkpoint: Path | None
    signal: int | None = None
    """The signal that stopped it, if one did."""

    @property
    def exit_code(self) -> int:
        """0 fine, 3 collapsed, 4 diverged, 5 below where it started, 128 + n stopped by signal n."""
        if self.signal is not None:
            return 128 + self.signal
        codes = {"diverged": 4, "collapsed": 3, "partial collapse": 3, "below where it started": 5}
        return codes.get(self.opinion.verdict, 0)


def run(
    task: Task[Batch],
    settings: Settings,
    *,
    folder: RunFolder | None,
    world: World,
    resumed: Resumed | None = None,
    greeting: Sequence[str] = (),
) -> Ending:
    """Train from the first step, or from the checkpoint that is handed in, to the last step, a signal or a bad end.

    Without a folder nothing is written.
    """
    pace, total, optimizer = settings.pace, settings.pace.total, task.optimizer
    scaler = loss_scaler(world.device, settings.precision)
    state = TrainState(task.name, task.module, optimizer, task.watch, scaler)
    keeper = Keeper(folder, settings.checkpoint, state, pace=pace, header=task.header)
    if resumed is not None:
        keeper.restore(resumed, data=settings.data)
    if world.first and folder is not None:  # also what a run wrote that was killed before its first checkpoint
        folder.drop_metrics_after(state.step)
    wrapped = task.objective
    if world.size > 1:
        # buffers are equal on all ranks where BatchNorm is across ranks, and rank 0's are the ones that are saved elsewhere
        wrapped = DistributedDataParallel(task.objective, broadcast_buffers=False, gradient_as_bucket_view=True)
    bad_step = torch.full((), -1, dtype=torch.int64, device=world.device)
    with (
        task.batches(state.step) as batches,
        Log(folder, start=state.step, pace=pace, batch_size=settings.batch_size, active=world.first) as log,
        Stop() as stop,
    ):
        log.say(*keeper.complaints, *greeting, *_where(state.step, total))
        task.begin(log)
        for step in range(state.step, total):
            started = time.perf_counter()
            batch = batches.at(step)
            waited = time.perf_counter() - started
            inputs = task.place(batch)
            rate = task.rate(step)
            set_learning_rate(optimizer, rate, fixed=task.fixed_rate, step=step)
            # dropout draws from a generator that is not saved: what it draws depends on the step, not on the start
            torch.manual_seed(rng.key(settings.seed, "forward", step, world.rank) % 2**63)
            optimizer.zero_grad(set_to_none=True)
            with autocast(world.device, settings.precision):
                loss = backward(task.objective, inputs, through=wrapped, scaler=scaler)
            if settings.clip is not None:
                scaler.unscale_(optimizer)  # no-op without fp16
                nn.utils.clip_grad_norm_(task.module.parameters(), settings.clip)
            scaler.step(optimizer)  # skips a step whose fp16 gradients overflowed
            scaler.update()
            task.after_step(step)
            state.step = step + 1

            # the first step whose loss is no number is remembered on the device; reading it waits for the device
            bad_step = torch.where((bad_step < 0) & ~torch.isfinite(loss.total.detach()), step, bad_step)
            log.step(waited)
            round_ends = (step + 1) % pace.round == 0 or step + 1 == total
            if step % settings.look_every == 0 or round_ends:
                sight = task.watch.look(step, loss, first_bad=int(bad_step))
                log.look(sight, rate=rate)
                verdict = sight.opinion.verdict
                hopeless = verdict == "diverged" or (settings.stop_collapsed and verdict == "collapsed")
                if world.any(hopeless):  # each process sees its own part of the batch, and they stop together
                    break
            if round_ends:
                task.after_round(step + 1, log)
                log.round(step + 1)
            leaving = _should_stop(stop, step, world, every=min(settings.look_every, _VOTE_EVERY))
            if leaving or keeper.due(round_ends=round_ends, last=step + 1 == total):
                if not state.is_finite():  # is not saved; the next look stops the run, on all processes together
                    task.watch.divergence(step, loss, first_bad=int(bad_step))
                elif world.first:
                    keeper.save()
                else:
                    keeper.begin_again()
            if leaving:
                break
        _farewell(log, keeper, task.watch.opinion, state.step, total, stop)
    world.wait()
    return Ending(state.step, total, task.watch.opinion, keeper.newest(), stop.signal)


@contextmanager
def open_run(
    folder: RunFolder, *, changes: Callable[[dict[str, Any]], list[str]], device: str, batch_size: int
) -> Iterator[World]:
    """Join the other processes; the first one checks and locks the folder before any of them continues.

    ``changes`` compares the configuration of a run that is in the folder with the one that is asked for.
    """
    with join_world(device, batch_size=batch_size) as world, ExitStack() as held:

        def take() -> None:
            folder.check(changes)  # before the lock, which makes the folder
            held.enter_context(folder.locked())
            folder.check(changes)

        world.together(lambda: take() if world.first else None)
        yield world


def what_is_there(folder: RunFolder, world: World) -> tuple[dict[str, Any] | None, Resumed | None]:
    """What an earlier start wrote down, and the newest checkpoint that can be trusted; the same on all processes."""
    kept = world.together(lambda: folder.read_config() if folder.has_run else None)
    resumed = world.together(lambda: None if kept is None else checkpoint.newest_good(folder.checkpoints))
    found = (
        "no checkpoint"
        if resumed is None
        else f"step {resumed[1].header.get('step')} ({resumed[1].header['sha256'][:12]})"
    )
    started = "no run" if kept is None else hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
    world.agree({"dssl": VERSION, f"in {folder.path.name} the run": started, f"in {folder.path.name}": found})
    return kept, resumed


def describe(folder: RunFolder, world: World, plain: dict[str, Any]) -> None:
    """config.json is written by the first process, once; the others wait for it."""
    world.agree({"images with the fingerprint": str(plain["fingerprint"])[:12]})
    world.together(lambda: folder.write_config(plain) if world.first and not folder.has_run else None)


def precision_of(
    asked: Precision, kept: dict[str, Any] | None, world: World, *, encoder: nn.Module, image_size: int, channels: int
) -> tuple[Precision, str]:
    """What the configuration says, what the run started with, or what is measured now; the same on all processes."""
    if asked != "auto":
        return asked, f"{asked}, as asked"
    if kept is not None:
        return kept["precision"], f"{kept['precision']}, as the run started"
    choice: Precision = "fp32"
    why = "as the first process measured"
    if world.first:  # alone: processes that measure at the same time slow each other down
        choice, why = choose_precision(encoder, image_size=image_size, channels=channels, device=world.device)
    if world.size > 1:
        known = get_args(Precision)
        votes = torch.tensor([known.index(choice)], device=world.device)
        torch.distributed.broadcast(votes, 0)
        choice = known[int(votes.item())]
    return choice, why


def backward(objective: nn.Module, inputs: Any, *, through: nn.Module, scaler: torch.amp.GradScaler) -> Any:
    """View by view where there are views; the losses of a detector or a classifier are one graph."""
    if isinstance(objective, Objective):
        return objective.backward(inputs, through=through, scaler=scaler)
    loss = through(inputs)
    with torch.autocast(loss.total.device.type, enabled=False):
        scaler.scale(loss.total).backward()
    return loss


def _where(step: int, total: int) -> list[str]:
    if step >= total:
        return [f"this run is finished: {total} steps"]
    return [f"continuing at step {step} of {total}"] if step else []


def _farewell(log: Log, keeper: Keeper, opinion: Opinion, step: int, total: int, stop: Stop) -> None:
    if opinion.verdict == "diverged" or (step < total and stop.signal is None):
        reasons = opinion.lines() if opinion.verdict != log.verdict else []
        log.say(*reasons, f"stopped at step {step} of {total}: {keeper.last_healthy_line()}")
    elif stop.signal is not None:
        log.say(f"stopped at step {step} of {total} and saved; the same command continues it")
    elif opinion.verdict in ("collapsed", "partial collapse"):
        log.say(f"finished, but {opinion.verdict}: {keeper.last_healthy_line()}")
    elif opinion.verdict == "below where it started":  # judged after the last look, which has not said it
        log.say(*opinion.lines(), keeper.last_healthy_line())


def _should_stop(stop: Stop, step: int, world: World, *, every: int) -> bool:
    if world.size == 1:
        return stop.signal is not None
    return step % every == 0 and world.any(stop.signal is not None)
