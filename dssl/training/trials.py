"""The trials of a search for a heavy policy: what each found, which policy is tried next, and how long the runs are."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dssl import config_io
from dssl.augment import parse, show
from dssl.augment.policy import Jigsaw, RandAugment
from dssl.config import RunConfig
from dssl.data import Source
from dssl.errors import DsslError
from dssl.state import Status
from dssl.version import VERSION

NONE = "none"
"""In place of a policy: two standard pairs, equal compute without heavy views."""
COARSE = (
    NONE, "ra(2,9,monotone14)", "0.9*ra(2,5) | 0.1*jigsaw(4)", "jigsaw(4)", "ra(2,5)", "ra(2,18,monotone14)", "ta",
    "ra(1,9,monotone14)", "jigsaw(2)", "ra(4,9,monotone14)", "ua", "ra(4,18,monotone14)", "ra(1,3,monotone14)",
)  # fmt: skip
"""The first round, the most different first: where time is short, only the beginning is tried."""
COARSE_SHARE = 2 / 3
"""Of the trials; the rest are neighbours of the best."""
START_SHARE, MARGIN = 0.2, 0.1
"""Of the minutes: the shared start, and what is left for the page and for a slow last trial."""
WANTED, FEWEST, FEWEST_STEPS, MOST_STEPS = 16, 3, 40, 400
"""Trials that the length of a trial is chosen for, those without which a search is refused, and the limits of the length."""
MOST = 2 * WANTED
"""Trials, where a fast machine could make more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A policy and what became of the encoder that was trained with it."""

    policy: str
    retrieval: float
    """How often an augmented view of a held-out image finds a standard view of it among those of all."""
    error: float
    """Its standard error from the choice of these images; that of another training seed comes on top."""
    rotation: float
    """How many quarter turns of held-out images a linear probe on the features recognises."""
    rank: float
    """Effective rank of the features of held-out images."""
    verdict: Status
    reason: str
    seconds: float

    @property
    def score(self) -> float:
        return self.retrieval

    @property
    def healthy(self) -> bool:
        return self.verdict in ("healthy", "too early")

    def differs_from(self, other: "Trial") -> bool:
        """Whether the scores are more than two standard errors apart."""
        return abs(self.score - other.score) > 2 * math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the runs are; chosen once, and kept when a search resumes."""

    start: int
    steps: int
    """Of each trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """All that was found."""

    config: RunConfig
    plan: Plan
    start: Trial
    trials: tuple[Trial, ...]
    """In the order in which they were made."""
    wanted: int
    """How many trials the minutes were expected to allow."""
    images: int
    judges: Source

    @property
    def ranked(self) -> tuple[Trial, ...]:
        """The best first; those that are not healthy last, and never recommended."""
        return tuple(sorted(self.trials, key=lambda trial: (trial.healthy, trial.score), reverse=True))

    @property
    def best(self) -> Trial | None:
        """The heavy policy to recommend."""
        return next((trial for trial in self.ranked if trial.healthy and trial.policy != NONE), None)

    @property
    def as_good(self) -> tuple[Trial, ...]:
        """The other healthy heavy policies that the score does not tell apart from the best."""
        best = self.best
        return tuple(trial for trial in self.others if best is not None and not best.differs_from(trial))

    @property
    def others(self) -> tuple[Trial, ...]:
        """The healthy heavy policies but the best."""
        return tuple(
            trial for trial in self.ranked if trial.healthy and trial.policy != NONE and trial is not self.best
        )

    @property
    def control(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.policy == NONE), None)

    @property
    def minutes_for_more(self) -> int:
        """The minutes that would allow some further trials, each as slow as the slowest so far."""
        slowest = max(trial.seconds for trial in self.trials)
        seconds = self.start.seconds + (len(self.trials) + FEWEST) * slowest
        return math.ceil(seconds / 60 / (1 - MARGIN))

    @property
    def seconds(self) -> float:
        return self.start.seconds + sum(trial.seconds for trial in self.trials)

    def plain(self) -> dict[str, Any]:
        """For tune.json."""
        best = self.best
        return {
            "dssl_version": VERSION,
            "config": config_io.to_dict(self.config),
            "images": self.images,
            "judges": len(self.judges),
            "plan": asdict(self.plan),
            "seconds": self.seconds,
            "best": None if best is None else best.policy,
            "start": asdict(self.start),
            "trials": [asdict(trial) | {"score": trial.score} for trial in self.ranked],
        }


def plan_for(minutes: float, *, pair: float, graph: float) -> Plan:
    """From the seconds of a step with a standard pair and with the graph; refused where they are too many for the minutes."""
    least = FEWEST_STEPS * (pair + FEWEST * graph) / 60 / (1 - MARGIN)
    if minutes < least:
        raise DsslError(
            f"--minutes is {minutes:g}, and a step takes {graph:.1f} s here: expected at least {math.ceil(least)} for {FEWEST} "
            "policies; or choose a smaller --image-size, --batch-size or --encoder"
        )
    usable = 60 * minutes * (1 - MARGIN)
    steps = int((1 - START_SHARE) * usable / WANTED / graph)
    steps = min(max(steps, FEWEST_STEPS), MOST_STEPS)
    start = min(max(int(START_SHARE * usable / pair), FEWEST_STEPS), 2 * MOST_STEPS)
    return Plan(start=start, steps=steps)


def affordable(minutes: float, start: Trial, trials: Sequence[Trial]) -> int:
    """How many trials fit into the minutes, by the time of the first one; at least one is made."""
    if not trials:
        return 1
    count = int((60 * minutes * (1 - MARGIN) - start.seconds) / max(trials[0].seconds, 1e-9))
    return min(max(1, count), MOST)


def next_policy(trials: Sequence[Trial], *, wanted: int, policies: Sequence[str] = ()) -> str | None:
    """What to try next; None when there are as many trials as wanted, or nothing is left to try.

    First the coarse grid, or the beginning of it, then the neighbours of the best policy, then those of the next best.
    """
    tried = {trial.policy for trial in trials}
    if policies:
        return next((policy for policy in policies if policy not in tried), None)
    if len(trials) >= wanted:
        return None
    for policy in COARSE[: max(2, math.ceil(COARSE_SHARE * wanted))]:
        if policy not in tried:
            return policy
    ranked = sorted(
        (trial for trial in trials if trial.healthy and trial.policy != NONE), key=lambda trial: -trial.score
    )
    for trial in ranked:
        for policy in neighbours(trial.policy):
            if policy not in tried:
                return policy
    return None


def neighbours(policy: str) -> list[str]:
    """Policies a little milder and a little heavier."""
    match parsed := parse(policy):
        case RandAugment():
            steps = [(0, 1.5), (0, 1 / 1.5), (1, 1.0), (-1, 1.0)]
            near = [
                dataclasses.replace(
                    parsed, count=parsed.count + more, magnitude=min(30, max(1, round(parsed.magnitude * factor)))
                )
                for more, factor in steps
                if parsed.count + more >= 1
            ]
            return [show(neighbour) for neighbour in near if neighbour != parsed]
        case Jigsaw():
            return [show(Jigsaw(tiles)) for tiles in (parsed.tiles + 1, parsed.tiles - 1) if tiles >= 2]
    return []
