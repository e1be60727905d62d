"""Continued pretraining that keeps what is there: how fast the encoder learns, its comparison with the start, the result."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dssl.config import AdaptConfig, RunConfig
from dssl.data import Source
from dssl.errors import DsslError
from dssl.log import Log
from dssl.loop import Hook
from dssl.run import Run
from dssl.state import RunLength, Verdict
from dssl.training.baseline import CLOSE, Baseline
from dssl.training.health import RunMonitor
from dssl.training.knn import knn_due
from dssl.training.prepare import trained_blocks
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder

SHARES = (0.5, 0.35, 0.25, 0.18, 0.12)
"""How far from the start to the average of the last weights the result may lie, tried from far to near."""


def rate_shares(encoder: nn.Module, config: AdaptConfig) -> dict[str, float]:
    """The rate of every trained parameter of the encoder as a share of the heads', by its name in the method."""
    shares: dict[str, float] = {}
    for depth, names in enumerate(reversed(trained_blocks(encoder, config))):
        shares |= {f"encoder.{name}": config.encoder_rate * config.layer_decay**depth for name in names}
    return shares


@torch.no_grad()
def add_to_average(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], *, count: int) -> None:
    """Take the weights into a running mean, as the ``count``-th: it is kept, saved and restored with the optimiser's state."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        if count == 1 or "average" not in state:
            state["average"] = parameter.detach().clone()
        else:
            state["average"].lerp_(parameter, 1 / count)


@torch.no_grad()
def interpolate(
    encoder: nn.Module,
    *,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    drift: Callable[[], float],
    most: float,
) -> tuple[float, float]:
    """Set the weights to start + share (end - start), for the largest share whose drift is at most ``most``.

    Returns the share and the drift; both are 0, and the weights those of the start, where every share drifts further.
    """
    parameters = dict(encoder.named_parameters())
    for share in (*SHARES, 0.0):
        for name, value in end.items():
            parameters[name].copy_(torch.lerp(start[name].to(value), value, share))
        moved = drift() if share else 0.0
        if moved <= most:
            return share, moved
    raise AssertionError("not moving at all is always possible")


class ComparedWithStart(Hook):
    """Measures the encoder beside the one that the run started from: whether it learns.

    Of a run with ``init`` every round, and one that is below its start says so; of any other run when kNN is measured.
    """

    doing = "comparing with the start"

    def __init__(
        self, config: RunConfig, source: Source, encoder: Encoder, monitor: RunMonitor, *, run: Run,
        header: Mapping[str, Any], head_steps: int, length: RunLength,
    ) -> None:  # fmt: skip
        assert run.folder is not None
        self.config, self.source, self.encoder, self.monitor, self.run = config, source, encoder, monitor, run
        self.header, self.folder, self.head_steps, self.length = header, run.folder, head_steps, length
        self.baseline: Baseline | None = None
        """Of the first process, until the run is finished."""
        new = run.first_step == 0
        self._measures = run.first_step < length.total and (new or self.folder.start_file.is_file())
        if config.adapt is not None and run.first_step < length.total and not self._measures:
            raise DsslError(
                f"{self.folder.start_file} is missing: the result of this run lies between these weights and the last ones; "
                "put the file back, or start again with another --out"
            )

    def begin(self, log: Log) -> None:
        if not self._measures or not self.run.world.first:
            return
        new = self.run.first_step == 0
        self.baseline = Baseline(self.config, self.source, self.encoder, self.folder, header=self.header, new=new)
        if not new:
            return
        log.start(0, self.baseline.record(None), self.baseline.text())
        log.say(f"the start{' (untrained)' if self.config.init is None else ''}: {self.baseline.text()}")
        if self.config.adapt is not None and self.config.adapt.max_drift is not None:
            log.say("during training the encoder may score lower than at its start; the result lies between the two")

    def after_step(self, step: int) -> None:
        self.monitor.near_start = False  # until it is measured

    def after_round(self, step: int, log: Log) -> None:
        if self.config.init is not None or knn_due(self.config, step // self.length.round):
            self.monitor.compare_with_start(self.run.world.from_first(lambda: self._compare(step, log)))

    def _compare(self, step: int, log: Log) -> Verdict | None:
        """The verdict if the encoder fell below the weights that it started from."""
        if (baseline := self.baseline) is None or step <= self.head_steps:  # it has not moved yet
            return None
        drift = baseline.measure().drift
        self.monitor.near_start = self.config.init is not None and drift <= CLOSE
        finished = step == self.length.total
        self.monitor.progress, verdict = baseline.progress(finished=finished), None
        if self.config.init is not None and (self.config.adapt is None or finished):
            # else the run ends on weights between these and the start
            verdict = baseline.judge(step, self._instead())
        log.start(step, baseline.record(verdict, progress=self.monitor.progress), baseline.text())
        return verdict

    def _instead(self) -> str:
        """What to take if the run is below its start, chosen without labels."""
        start = f"the weights of the start: {self.folder.start_file}"
        if (step := self.monitor.last_near_start) is None:
            return f"take {start}; no checkpoint stayed within a drift of {CLOSE:g}"
        last = checkpoint.path_at(self.folder.checkpoints, step)
        return f"take {last}, the last checkpoint with a drift of at most {CLOSE:g}, or {start}"


class Averaged(Hook):
    """Averages the last weights of the encoder; at the end it moves from the start towards the average, as the drift allows."""

    doing = "choosing how far to move from the start"
    sets_weights = True

    def __init__(
        self, config: AdaptConfig, optimizer: torch.optim.Optimizer, compared: ComparedWithStart, *, first_step: int
    ) -> None:
        """``first_step`` is the one from which on the encoder learns, or learns again."""
        self.config, self.optimizer, self.compared, self.first_step = config, optimizer, compared, first_step
        self.encoder, self.total = compared.encoder.network, compared.length.total

    def after_step(self, step: int) -> None:
        if step + 1 == self.compared.head_steps:
            self.optimizer.state.clear()  # the moments of gradients that random heads gave
        averaged = max(1, round(self.config.average * (self.total - self.first_step)))
        if self.config.average and (count := step + 1 - (self.total - averaged)) >= 1:
            add_to_average(self.optimizer, self._trained().values(), count=count)

    def after_round(self, step: int, log: Log) -> None:
        if step < self.total or (baseline := self.compared.baseline) is None:  # only the first process saves
            return
        encoder, most = self.encoder, self.config.max_drift
        end = {
            name: self.optimizer.state[value].get("average", value).clone() for name, value in self._trained().items()
        }
        if most is None:
            encoder.load_state_dict(end, strict=False)
            return
        share, drift = interpolate(encoder, start=baseline.weights, end=end, drift=baseline.drift, most=most)
        if share:
            log.say(
                f"the result is {share:.0%} of the way from the start to the average of the last weights: drift {drift:.2f}"
            )
        else:
            log.say(
                f"the result is the start, unchanged: even {SHARES[-1]:.0%} of the way to the average drifts by more than "
                f"{most:g}; to let it move, use --adapt.trained-blocks 1, a lower rate, or a larger --adapt.max-drift"
            )

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.encoder.named_parameters() if value.requires_grad}
