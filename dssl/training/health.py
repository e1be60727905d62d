"""Has the run collapsed, where, and what to do about it: a verdict from the embeddings themselves.

Per view, every few steps: the *spread* of the projections and of the predictions (standard deviation of the normalised vectors
times sqrt(d): 1 when they fill the sphere, 0 when they are all the same) and the *effective rank* (exp of the entropy of the
singular values). When SimSiam collapses, the last BatchNorm of its projector keeps the projections apart, but the predictor gives
the same output for every image, so its predictions are judged too; BYOL's are from step 1,000 on. A run that spreads again after
a long collapse is not healthy: what it had lost does not come back. SwAV and DINO may fade to equal scores for all prototypes,
which their loss shows: it is that of guessing. The thresholds come from real runs, kept in
``tests/train/curves``; docs/explanation/health.md states what they miss and where they raise false alarms.

``HealthMonitor`` applies the same rules in any training loop, to embeddings alone; ``RunMonitor`` is that of dssl's own runs:
it knows the graph and names the edge.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dssl.errors import DsslError, choices
from dssl.graph import Edge, ViewGraph
from dssl.methods.losses import effective_rank, spread, wide
from dssl.objective import LossReport
from dssl.state import HealthCheck, Monitor, Status, Verdict

PARTIAL, COLLAPSED = 0.35, 0.2
"""Below these the median spread of a view, of its projections or its predictions, counts as partially and as fully collapsed."""
RANK_SHARE = 0.04
"""Below this share of the largest possible effective rank a view counts as partially collapsed, whatever its spread."""
LEAST_RANK = 1.28
"""Below this effective rank, too: a rank is 1 at least, which of a few images is a large share of the largest possible."""
GUESSED = 0.985
"""Above this share of the loss of guessing, the predictions of a method with prototypes say nothing of the image."""
WINDOW = 5
"""Checks over which the median is taken."""
LASTING = 0.25
"""A run that has recovered still counts as partially collapsed if it was collapsed at this share of all checks or more."""
SAMPLE = 256
"""Rows used for the effective rank: its cost grows with the cube."""


def patience(steps_per_epoch: int) -> int:
    """Steps before the first verdict: three epochs, but no fewer than 100 steps and no more than 500.

    The dip of the first epochs is one of steps, not of images: an epoch of a large set is longer than the dip.
    """
    return min(max(3 * steps_per_epoch, 100), 500)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the health check reads of one step: spreads of projections, predictions (source) and targets, ranks as shares."""

    step: int
    loss: float
    edges: dict[str, float]
    spread: dict[str, float]
    rank: dict[str, float]
    source: dict[str, float]
    target: dict[str, float]
    regularisers: dict[str, float] = field(default_factory=dict)
    """The method's term for each view that has one."""
    rows: int = SAMPLE
    """Images that the rank is of."""


def rank_share(embedding: Tensor) -> float:
    """Effective rank of the normalised embeddings as a share of the largest possible."""
    rows = F.normalize(wide(embedding[:SAMPLE]), dim=1)
    return effective_rank(rows) / min(rows.shape)


def lower_spread(graph: ViewGraph | None, spread: Mapping[str, float], source: Mapping[str, float]) -> dict[str, float]:
    """By view the lower of the spreads of its projections and its predictions, if these count.

    Of a view that pulls no other, as DSSL's heavy ones, predictions may be narrow because little can be told from it: they count
    only if no view that pulls has any.
    """
    pulling = source if graph is None else graph.targets
    counted = {name: value for name, value in source.items() if name in pulling} or source
    return {name: min(float(value), float(counted.get(name, value))) for name, value in spread.items()}


@torch.no_grad()
def observe(step: int, report: LossReport) -> Observation:
    """Read the values of a step; this is the only place that waits for the device."""
    return Observation(
        step=step,
        loss=float(report.total.detach()),
        edges={name: float(value) for name, value in report.edges.items()},
        spread={name: float(value) for name, value in report.spread.items()},
        rank={name: rank_share(value) for name, value in report.projections.items()},
        source={name: float(spread(value)) for name, value in report.predictions.items()},
        target={name: float(spread(value)) for name, value in report.targets.items()},
        regularisers={name: float(value) for name, value in report.regularizers.items()},
        rows=min((len(value) for value in report.projections.values()), default=SAMPLE),
    )


@dataclass(slots=True)
class CollapseEpisode:
    """The collapse that a run has been through, from the first check that saw it to the last, and what was worst at the last."""

    view: str
    edge: str
    since: int
    until: int
    lowest: float
    checks: int


@dataclass
class RunMonitor(Monitor[LossReport]):
    """Checks the run for collapse."""

    graph: ViewGraph | None
    """Without one, no edge is named, and the remedies are those of any training."""
    patience: int
    predictions_from: int | None = None
    """The step from which the predictions are judged too, as the method asks for."""
    guess: float | None = None
    """The loss of an edge whose prediction is the same for every image, if the method has such a number."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The lowest of the edges."""
    spreads: dict[str, deque[float]] = field(default_factory=dict)
    """What is judged, by view."""
    ranks: dict[str, deque[float]] = field(default_factory=dict)
    seen: int = 0
    """Checks so far."""
    episode: CollapseEpisode | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("too early", 0))
    below: Verdict | None = None
    """If the run started from weights and is worse than these; it counts if nothing else is wrong."""

    def judge(self, now: Observation) -> Verdict:
        """Take one check into account and judge the run."""
        if self.verdict.status == "diverged":  # nothing comes back from there, whatever the loss may say
            return self.verdict
        values = [now.loss, *now.edges.values(), *now.spread.values()]
        if not all(map(math.isfinite, values)):
            return self.note_divergence(now, first=-1)
        for name, value in self.judged(now).items():
            self.spreads.setdefault(name, deque(maxlen=WINDOW)).append(value)
            self.ranks.setdefault(name, deque(maxlen=WINDOW)).append(now.rank[name])
        self.losses.append(min(now.edges.values(), default=0.0))
        self.seen += 1
        if now.step + 1 < self.patience:
            self.verdict = Verdict("too early", now.step)
        else:
            self.verdict = self._remember(self._verdict(now))
        self.compare_with_start(self.below)
        return self.verdict

    def compare_with_start(self, below: Verdict | None) -> None:
        """Take note of how the run stands beside the weights that it started from: below them, or not."""
        if self.verdict is self.below is not None:
            self.verdict = Verdict("healthy", self.verdict.step)
        self.below = below
        if below is not None and self.verdict.status in ("healthy", "too early"):
            self.verdict = below

    def judged(self, now: Observation) -> dict[str, float]:
        """The spread that counts, by view."""
        if self.predictions_from is None or now.step < self.predictions_from:
            return now.spread
        return lower_spread(self.graph, now.spread, now.source)

    def check(self, step: int, report: LossReport, *, first_bad: int) -> HealthCheck:
        now = observe(step, report)
        verdict = self.judge(now)
        if first_bad >= 0:
            verdict = self.note_divergence(now, first=first_bad)
        text = f"spread {min(self.judged(now).values()):.2f}"
        return HealthCheck(step=step, loss=now.loss, record=asdict(now), text=text, verdict=verdict)

    def divergence(self, step: int, report: LossReport, *, first_bad: int) -> None:
        self.note_divergence(observe(step, report), first=first_bad)

    def note_divergence(self, now: Observation, *, first: int) -> Verdict:
        """The run is no longer made of numbers; ``first`` is the step at which that began, if it is known."""
        edge = next((name for name, value in now.edges.items() if not math.isfinite(value)), next(iter(now.edges), ""))
        reason = f"the loss is no longer a number (edge {edge})" if edge else "the loss is no longer a number"
        if math.isfinite(now.loss):
            reason = "weights or the optimiser's state are no longer numbers, though the loss is one"
            if self.graph is None:
                reason = "the embeddings are no longer numbers"
        remedies = _DIVERGED if self.graph is None else _RUN_DIVERGED
        step = first if first >= 0 else now.step
        self.verdict = Verdict("diverged", step, edge=edge, reason=reason, remedies=remedies)
        return self.verdict

    def _verdict(self, now: Observation) -> Verdict:
        spread = {name: median(values) for name, values in self.spreads.items()}
        rank = {name: median(values) for name, values in self.ranks.items()}
        least = max(RANK_SHARE, LEAST_RANK / max(now.rows, 2))
        # the view that is worst by its worse measure, unless one has collapsed altogether
        worst = min(spread, key=lambda name: min(spread[name] / PARTIAL, rank[name] / least))
        flattest = min(spread, key=lambda name: spread[name])
        guessed = self.guess is not None and median(self.losses) > GUESSED * self.guess
        status: Status = "partial collapse"
        if guessed or spread[flattest] < COLLAPSED:
            status, worst = "collapsed", flattest
        elif spread[worst] >= PARTIAL and rank[worst] >= least:
            return Verdict("healthy", now.step)
        edge = "" if self.graph is None else likely_cause(self.graph, worst, now.edges).name
        reason = (
            f"{self._judged_name(now.step)} of view {worst} have a spread of {spread[worst]:.2f} (1 is healthy, 0 is one point), "
            f"effective rank {rank[worst]:.0%} of the largest possible{_suspected(edge)}"
        )
        if guessed:
            reason = f"every edge's loss is that of guessing ({self.guess:.2f}); {reason}"
        episode = self.episode or CollapseEpisode(worst, edge, now.step, now.step, spread[worst], checks=0)
        episode.view, episode.edge, episode.until = worst, edge, now.step
        episode.lowest, episode.checks = min(episode.lowest, spread[worst]), episode.checks + 1
        self.episode = episode
        return Verdict(status, now.step, worst, edge, reason, remedies(self.graph, edge))

    def _remember(self, now: Verdict) -> Verdict:
        """A falling rate lets embeddings spread again at the end of a run, but what they had lost does not come back."""
        episode = self.episode
        if now.status != "healthy" or episode is None or episode.checks < LASTING * self.seen:
            return now
        reason = (
            f"{self._judged_name(episode.until)} of view {episode.view} have spread again, but they had collapsed "
            f"(spread {episode.lowest:.2f}) between steps {episode.since} and {episode.until}, at "
            f"{episode.checks / self.seen:.0%} of all checks, and what the encoder knew before may be lost"
            f"{_suspected(episode.edge)}"
        )
        advice = remedies(self.graph, episode.edge)
        return Verdict("partial collapse", now.step, episode.view, episode.edge, reason, advice)

    def _judged_name(self, step: int) -> str:
        return "embeddings" if self.predictions_from is None or step < self.predictions_from else "predictions"

    def state(self) -> dict[str, Any]:
        return {
            "spreads": {name: list(values) for name, values in self.spreads.items()},
            "ranks": {name: list(values) for name, values in self.ranks.items()},
            "losses": list(self.losses),
            "verdict": self.verdict.status,
            "seen": self.seen,
            **({} if self.episode is None else {"spell": asdict(self.episode)}),
            **({} if self.below is None else {"below": asdict(self.below)}),
            **({} if self.last_near_start is None else {"last_close": self.last_near_start}),
            **({"progress": self.progress} if self.progress else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.spreads = {name: deque(values, maxlen=WINDOW) for name, values in state["spreads"].items()}
        self.ranks = {name: deque(values, maxlen=WINDOW) for name, values in state["ranks"].items()}
        self.losses = deque(state.get("losses", ()), maxlen=WINDOW)
        self.verdict = Verdict(state["verdict"], 0)
        self.seen = state["seen"]
        if episode := state.get("spell"):
            self.episode = CollapseEpisode(**_renamed(episode, "looks", "checks"))
        self.last_near_start, self.progress = state.get("last_close"), str(state.get("progress", ""))
        if below := state.get("below"):
            self.below = Verdict(**(_renamed(below, "verdict", "status") | {"remedies": tuple(below["remedies"])}))
            if self.verdict.status == self.below.status:
                self.verdict = self.below


def _renamed(table: Mapping[str, Any], earlier: str, name: str) -> dict[str, Any]:
    """A table of a checkpoint in which earlier versions gave an entry another name."""
    return {name if key == earlier else key: value for key, value in table.items()}


def likely_cause(graph: ViewGraph, view: str, losses: Mapping[str, float]) -> Edge:
    """The edge to suspect first: one whose target is heavy, as the paper found; else the one that is easiest to satisfy."""
    edges = graph.active_edges
    heavy = [edge for edge in edges if _heavy_targets(graph, edge)]
    touching = [edge for edge in heavy or edges if view in (edge.predictor, *edge.target_views)]
    return min(touching or heavy or edges, key=lambda edge: losses.get(edge.name, 0.0))


def _heavy_targets(graph: ViewGraph, edge: Edge) -> list[str]:
    """Without a teacher's, which is frozen: what it makes of a heavy view cannot collapse."""
    return [] if edge.is_taught else [name for name in edge.target_views if graph.view(name).is_heavy]


def _suspected(edge: str) -> str:
    return f"; likely cause: the edge {edge}" if edge else ""


_RUN_DIVERGED = (
    "lower --optimizer.rate by half or more, or lengthen --optimizer.warmup-epochs",
    "set --optimizer.clip 1",
    "use --precision fp32",
)
_DIVERGED = (
    "lower the learning rate by half or more, or lengthen its warm-up",
    "clip the norm of the gradient at 1",
    "train in float32, to see whether half precision is the cause",
)
_COLLAPSED = (
    "check what prevents collapse in this method: the stop-gradient and the predictor (SimSiam, BYOL), the weight of the "
    "variance term (VICReg), the negatives and the temperature (SimCLR), the centering (DINO)",
    "lower the learning rate by half, or lengthen its warm-up",
    "look at the augmented views: from blank or identical views only a constant can be learned",
)


def remedies(graph: ViewGraph | None, cause: str) -> tuple[str, ...]:
    """Three things to try, the most likely first; ``cause`` names an edge of the graph."""
    if graph is None:
        return _COLLAPSED
    if heavy := _heavy_targets(graph, next(edge for edge in graph.active_edges if edge.name == cause)):
        return (
            f"give the edge a direction: with --graph dssl a heavy view such as {heavy[0]} is pulled and never pulls",
            "use a milder --heavy policy; `dssl views` shows how many of its images are blank",
            "add --guard 1 (SimSiam and BYOL), or use --method simclr or vicreg, which tolerate more",
        )
    return (
        "lower --optimizer.rate by half, or lengthen --optimizer.warmup-epochs",
        "inspect the views with `dssl views`: from blank or identical views only a constant can be learned",
        "enlarge --batch-size, add --guard 1 (SimSiam and BYOL), or use --method simclr or vicreg",
    )


class HealthMonitor:
    """Checks any training for collapse, from the embeddings of its views alone: in any framework, with the rules of dssl's runs.

    Nothing is exchanged between processes: each one that calls it judges its own part of the batch.
    """

    def __init__(self, *, patience: int = 200, every: int = 20, predictions_from: int = 0) -> None:
        """The defaults suit runs of a few hundred steps and more.

        Args:
            patience: Steps before the first verdict.
            every: Steps between two checks; a call in between returns the last verdict and costs nothing.
            predictions_from: The step from which predictions are judged, too. 0 is for SimSiam; BYOL's predictor first learns the
                mean of the targets, so its predictions start out nearly identical.
        """
        if patience < 0 or every < 1 or predictions_from < 0:
            raise DsslError(
                f"patience is {patience}, every {every}, predictions_from {predictions_from}: expected steps, 0 or more, "
                "and every at least 1"
            )
        self.every = every
        self._rules = RunMonitor(None, patience=patience, predictions_from=predictions_from)
        self._checked: int | None = None

    @property
    def verdict(self) -> Verdict:
        """The newest one."""
        return self._rules.verdict

    def due(self, step: int) -> bool:
        """Whether ``check`` would look at the embeddings of this step.

        Args:
            step: The number of the step.
        """
        return self._checked is None or not self._checked <= step < self._checked + self.every

    def check(
        self,
        step: int,
        embeddings: Mapping[str, Tensor | NDArray[Any]],
        *,
        predictions: Mapping[str, Tensor | NDArray[Any]] | None = None,
        loss: Tensor | float = 0.0,
    ) -> Verdict:
        """Judge the run by the embeddings of a step; this waits for the device.

        Args:
            step: The number of the step.
            embeddings: By the name of their view, one row per image. Give what the loss compares, such as the projector's
                outputs, not the encoder's features: after a ReLU they are positive and look narrow.
            predictions: The outputs of a predictor, by the same names.
            loss: The loss of the step, which shows a divergence.
        """
        if not self.due(step):
            return self.verdict
        rows = {name: _rows(name, values) for name, values in embeddings.items()}
        predicted = {name: _rows(name, values) for name, values in (predictions or {}).items()}
        if not rows:
            raise DsslError("embeddings is empty: expected those of one view or more by name")
        for name in predicted.keys() - rows.keys():
            raise choices("view of a prediction", name, rows)
        self._checked = step
        return self._rules.judge(
            Observation(
                step=step,
                loss=float(torch.as_tensor(loss).detach()),
                edges={},
                spread={name: float(spread(values)) for name, values in rows.items()},
                rank={name: rank_share(values) for name, values in rows.items()},
                source={name: float(spread(values)) for name, values in predicted.items()},
                target={},
                rows=min(map(len, rows.values())),
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Its memory, for a checkpoint."""
        return {**self._rules.state(), "checked": self._checked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the memory of an earlier monitor.

        Args:
            state: What ``state_dict`` gave.
        """
        self._rules.load_state(state)
        self._checked = state["checked"]


def _rows(name: str, values: Tensor | NDArray[Any]) -> Tensor:
    rows = torch.as_tensor(values).detach()
    if rows.ndim != 2 or len(rows) < 2 or not rows.is_floating_point():
        raise DsslError(
            f"the embeddings of view {name} are {rows.dtype} of shape {tuple(rows.shape)}: expected floating-point numbers, "
            "images x dimensions, of at least 2 images"
        )
    return rows
