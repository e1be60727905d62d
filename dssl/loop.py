"""The one training loop, of pretraining, COCO, fine-tuning and the linear protocols.

A task says what is trained, on which inputs, and who monitors it. The loop owns the steps, checks, saves and stops. Nothing here
remembers how a run got to a step: inputs, learning rate and random numbers are functions of the step's number, so resuming is
"start at step k".
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dssl import config_io, rng
from dssl.config import CheckpointConfig, Precision
from dssl.log import Log, phase
from dssl.objective import Objective
from dssl.optim import set_learning_rate
from dssl.precision import autocast, loss_scaler
from dssl.run import Run
from dssl.state import Checkpointer, Monitor, RunLength, StopSignals, TrainState, Verdict

_VOTE_EVERY = 32
"""The most steps between two votes on stopping. A vote waits for the device and for all ranks, so it comes with a check."""

Inputs = TypeVar("Inputs")


class Hook:
    """Something beside the task that is called as the loop goes, on every process."""

    doing: str = "measuring"
    """What to call it where it takes long."""
    sets_weights: bool = False
    """Whether it changes the weights at the end of the run: one that was stopped before that is not saved as finished."""

    def begin(self, log: Log) -> None: ...

    def after_step(self, step: int) -> None:
        """Called once the weights have moved."""

    def after_round(self, step: int, log: Log) -> None:
        """Called when ``step`` steps are done and a round is complete."""


class Task(Hook, Generic[Inputs]):
    """What differs between one training and another."""

    name: str
    """Of the trained module in a checkpoint: its tensors are ``name.…``."""
    module: nn.Module
    """What is saved."""
    objective: nn.Module
    """``objective(inputs)`` gives a report whose ``total`` is the loss; DDP wraps it."""
    optimizer: torch.optim.Optimizer
    monitor: Monitor[Any]
    header: Mapping[str, Any]
    """What every checkpoint records about the run: its configuration and the fingerprint of its data."""
    fixed_rate: float = 0.0
    """The learning rate of parameter groups that do not follow the schedule."""
    length: RunLength
    batch_size: int
    precision: Precision
    seed: int
    """Of what the network draws while it trains: dropout, stochastic depth."""
    checkpoint: CheckpointConfig
    check_every: int = 20
    stop_collapsed: bool = False
    clip: float | None = None
    hooks: Sequence[Hook] = ()
    """Called after the task itself, in this order."""

    def batches(self, start: int) -> AbstractContextManager[Any]:
        """From this step on: ``at(step)`` gives the inputs of a step, which threads make ahead; they end with the context."""
        raise NotImplementedError

    def to_device(self, batch: Inputs) -> Any:
        """The inputs of a step, on the device and in the run's precision."""
        raise NotImplementedError

    def rate(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Ending:
    step: int
    total: int
    verdict: Verdict
    checkpoint: Path | None
    signal: int | None = None
    """What stopped it, if a signal did."""
    knn: float | None = None
    """The last kNN accuracy in percent that this process has measured since its start."""
    progress: str = ""
    """How the encoder compares with the run's start; empty where that was not measured."""

    @property
    def exit_code(self) -> int:
        """Of health, not progress: 0 success, 3 collapsed, 4 diverged, 5 below where it started, 128 + n stopped by signal n."""
        if self.signal is not None:
            return 128 + self.signal
        codes = {"diverged": 4, "collapsed": 3, "partial collapse": 3, "below where it started": 5}
        return codes.get(self.verdict.status, 0)


def run(
    task: Task[Inputs], opened: Run, *, intro: Sequence[str] = (), signals: StopSignals | None = None,
    trackers: Sequence[str] = (),
) -> Ending:  # fmt: skip
    """Train from the first step, or from a checkpoint, to the last step, a signal or a bad end.

    ``signals`` are those that the caller listens to already, ``trackers`` the names of those that get the curves.
    """
    # -- the start: weights, optimiser, step and the monitor's memory are all that a checkpoint holds
    world, folder, length, total = opened.world, opened.folder, task.length, task.length.total
    optimizer, monitor, hooks = task.optimizer, task.monitor, (task, *task.hooks)
    scaler = loss_scaler(world.device, task.precision)
    state = TrainState(task.name, task.module, optimizer, monitor, scaler)
    checkpointer = Checkpointer(folder, task.checkpoint, state, length=length, header=task.header)
    if opened.resumed is not None:
        checkpointer.restore(opened.resumed)
    if world.first and folder is not None:
        if opened.resumed is not None:
            folder.drop_metrics_after(state.step)
        elif (old := folder.set_metrics_aside()) is not None:
            intro = [*intro, f"no checkpoint of this run exists: it starts again; its old metrics are kept as {old}"]
    wrapped = task.objective
    if world.size > 1:
        wrapped = DistributedDataParallel(task.objective, gradient_as_bucket_view=True)
        # BatchNorm across ranks keeps the buffers equal everywhere; if it is off, those of rank 0 are saved. Set here, because
        # as an argument it has another name in newer versions of torch, which warn of the old one
        wrapped.broadcast_buffers = False
    # the first step whose loss is not a number, kept on the device: asking after every step would make the host wait
    bad_step = torch.full((), -1, dtype=torch.int64, device=world.device)
    with (
        task.batches(state.step) as batches,
        Log(
            folder,
            start=state.step,
            length=length,
            batch_size=task.batch_size,
            active=world.first,
            trackers=trackers,
            parameters=config_io.flat(task.header.get("config", {})),
        ) as log,  # fmt: skip
        StopSignals(alone=world.size == 1) if signals is None else nullcontext(signals) as stop,
    ):
        log.say(*checkpointer.warnings, *intro)
        if state.step:
            resuming = f"resuming at step {state.step} of {total}"
            log.say(resuming if state.step < total else f"this run is finished: {total} steps")
        stopped = not _measure(hooks, log, stop, lambda hook: hook.begin(log))
        for step in range(state.step, state.step if stopped else total):
            # -- the step
            started = time.perf_counter()
            batch = batches.at(step)
            waited = time.perf_counter() - started  # for data, while the device had nothing to do
            inputs = task.to_device(batch)
            rate = task.rate(step)
            set_learning_rate(optimizer, rate, fixed=task.fixed_rate, step=step)
            # dropout draws from a generator that no checkpoint holds: seeded like this, a resumed run draws the same
            torch.manual_seed(rng.key(task.seed, "forward", step, world.rank) % 2**63)
            loss = take_step(
                task.objective, inputs, optimizer, scaler, progress=step / max(total - 1, 1), through=wrapped,
                device=world.device, precision=task.precision, clip=task.clip,
            )  # fmt: skip
            for hook in hooks:
                hook.after_step(step)
            state.step = step + 1
            bad_step = torch.where((bad_step < 0) & ~torch.isfinite(loss.total.detach()), step, bad_step)
            log.step(waited)

            # -- the health check: reads numbers from the device, which waits for it, so it is rare
            last = step + 1 == total
            round_ends = last or (step + 1) % length.round == 0
            if step % task.check_every == 0 or round_ends:
                check = monitor.check(step, loss, first_bad=int(bad_step))
                status = check.verdict.status
                hopeless = status == "diverged" or (task.stop_collapsed and status == "collapsed")
                # each rank sees its own part of the batch: one that stopped alone would hang the rest, and what it saw
                # is the verdict of all
                stops = world.any(hopeless)
                if stops and (theirs := world.first_found(check.verdict if hopeless else None)) is not None:
                    monitor.verdict = theirs
                    check = dataclasses.replace(check, verdict=theirs)
                log.check(check, rate=rate)
                if stops:
                    break
            if round_ends:
                stopped = not _measure(hooks, log, stop, lambda hook: hook.after_round(state.step, log))
                log.round(monitor.verdict.status, progress=monitor.progress)
                if stopped and last and any(hook.sets_weights for hook in hooks):
                    break  # what these weights would have become is not known: the last epoch is repeated

            # -- the save: at the end of a round, after some minutes, at the end, and before a signal ends the run
            leaving = stop.signal is not None
            if world.size > 1:  # they ask each other only every so often
                leaving = step % min(task.check_every, _VOTE_EVERY) == 0 and world.any(leaving)
            if checkpointer.due(round_ends=round_ends, last=last, leaving=leaving):
                if not state.is_finite():
                    # not saved, or a resumed run would start from it; the next check stops all processes together
                    monitor.divergence(step, loss, first_bad=int(bad_step))
                    if last:  # there is no next check, and the metrics would end on the verdict of this one
                        log.check(dataclasses.replace(check, verdict=monitor.verdict), rate=rate)
                elif world.first:
                    with log.aside(), phase("saving"):
                        checkpointer.save()
                else:
                    checkpointer.begin_again()

            # -- the stop
            if leaving:
                break
        signal = world.first_found(stop.signal)  # one node may be preempted and the others not
        log.summary({"verdict": monitor.verdict.status, "progress": monitor.progress}, state.step)
        _say_ending(log, checkpointer, signal)
    world.wait()  # for the last save: a process that ends takes the others with it
    return Ending(
        state.step, total, monitor.verdict, checkpointer.newest(), signal, log.last_knn, progress=monitor.progress
    )


def _measure(hooks: Sequence[Hook], log: Log, stop: StopSignals, call: Callable[[Hook], None]) -> bool:
    """Call all hooks; False if a signal came, and none is called any more."""
    try:
        with log.aside(), stop.interrupting():
            for hook in hooks:
                with phase(hook.doing):
                    call(hook)
    except KeyboardInterrupt:
        if stop.signal is None:
            raise
        return False
    return True


def take_step(
    objective: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *,
    progress: float, through: nn.Module, device: torch.device, precision: Precision, clip: float | None = None,
) -> Any:  # fmt: skip
    """Forward, backward and the moved weights; the report of the loss. ``dssl doctor`` times the same step."""
    optimizer.zero_grad(set_to_none=True)
    with autocast(device, precision):
        if isinstance(objective, Objective):  # view by view
            loss = objective.backward(inputs, progress=progress, through=through, scaler=scaler)
        else:  # the loss of a detector or a classifier is one graph
            loss = through(inputs)
            with torch.autocast(device.type, enabled=False):
                scaler.scale(loss.total).backward()
    if clip is not None:
        scaler.unscale_(optimizer)  # the norm to clip is the true one; without fp16 this does nothing
        nn.utils.clip_grad_norm_(objective.parameters(), clip)
    scaler.step(optimizer)  # skips a step whose fp16 gradients overflowed
    scaler.update()
    return loss


def _say_ending(log: Log, checkpointer: Checkpointer, signal: int | None) -> None:
    verdict, step, total = checkpointer.state.monitor.verdict, checkpointer.state.step, checkpointer.length.total
    stopped = f"stopped at step {step} of {total}"
    if verdict.status == "diverged" or (step < total and signal is None):
        reasons = verdict.lines() if verdict.status != log.status else []
        log.say(*reasons, f"{stopped}: {checkpointer.last_healthy_line()}")
    elif signal is not None:
        at = checkpointer.saved_step
        then = "; the same command starts it again" if at is None else f"; the same command resumes it at step {at}"
        if at == step:
            then = " and saved; the same command resumes it"
        log.say(stopped if checkpointer.folder is None else f"{stopped}{then}")
    elif verdict.status in ("collapsed", "partial collapse"):
        log.say(f"finished, but {verdict.status}: {checkpointer.last_healthy_line()}")
    elif verdict.status == "below where it started":  # judged after the last check, which has not said it
        log.say(*verdict.lines())
