"""Which heavy policy suits these images, without labels: short runs from one shared start, each with another policy.

The start trains standard pairs. Every trial continues from it for as many steps, with the same images in the same order and the
same standard views, so that trials differ in nothing but their policy. Images that no trial trains on judge the features. A
finished trial is a line of ``trials.jsonl``; a search that was stopped resumes with the next one.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dssl import config_io, loop, plugins, rng
from dssl.augment import parse, show
from dssl.augment.policy import Jigsaw, RandAugment
from dssl.config import Precision, RunConfig
from dssl.data import Quarantine, Source, Subset, check_sample
from dssl.data.folder import holds
from dssl.errors import DsslError, Stopped
from dssl.evaluation.quality import Turned, retrieval, rotation_accuracy, two_views
from dssl.files import write_text
from dssl.methods.losses import effective_rank
from dssl.methods.method import Method
from dssl.precision import half_type, precision_of
from dssl.run import Run
from dssl.state import RunLength, Status
from dssl.text import duration
from dssl.training import baseline
from dssl.training.prepare import TrainingData, build_method, encoder_of, fit_to_data, training_data
from dssl.training.pretrain import Pretraining
from dssl.version import VERSION
from dssl.weights.checkpoint import Checkpoint, newest_good
from dssl.weights.encoder import Encoder

TASK = "tune"
REFERENCE = baseline.REFERENCE
"""The policy of the views that judge."""
JUDGES, JUDGED_SHARE = 2_000, 0.2
"""Images that judge and are not trained on: at most so many, and at most this share."""
NONE = "none"
"""In place of a policy: two standard pairs, equal compute without heavy views."""
COARSE = (
    NONE, "ra(2,9,monotone14)", "0.9*ra(2,5) | 0.1*jigsaw(4)", "jigsaw(4)", "ra(2,5)", "ra(2,18,monotone14)", "ta",
    "ra(1,9,monotone14)", "jigsaw(2)", "ra(4,9,monotone14)", "ua", "ra(4,18,monotone14)", "ra(1,3,monotone14)",
)  # fmt: skip
"""The first round, the most different first: if time is short, only the beginning is tried."""
COARSE_SHARE = 2 / 3
"""Of the trials; the rest are neighbours of the best."""
START_SHARE, MARGIN = 0.2, 0.1
"""Of the minutes: the shared start, and what is left for the page and for a slow last trial."""
WANTED, FEWEST, FEWEST_STEPS, MOST_STEPS = 16, 3, 40, 400
"""Trials that the length of a trial is chosen for, the fewest that a search may have, and the limits of the length."""
MOST = 2 * WANTED
"""Trials, even if a fast machine could make more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A policy and what became of the encoder that was trained with it."""

    policy: str
    retrieval: float
    """The score: how often an augmented view of a held-out image finds a standard view of it among those of all."""
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
    def healthy(self) -> bool:
        return self.verdict in ("healthy", "too early")

    def differs_from(self, other: "Trial") -> bool:
        """Whether the scores are more than two standard errors apart."""
        return abs(self.retrieval - other.retrieval) > 2 * math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long the runs are; chosen once, and kept when a search resumes."""

    start: int
    steps: int
    """Of each trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result."""

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
        return tuple(sorted(self.trials, key=lambda trial: (trial.healthy, trial.retrieval), reverse=True))

    @property
    def best(self) -> Trial | None:
        """The heavy policy to recommend."""
        return next(iter(_healthy(self.ranked)), None)

    @property
    def others(self) -> tuple[Trial, ...]:
        """The healthy heavy policies but the best."""
        return _healthy(self.ranked)[1:]

    @property
    def as_good(self) -> tuple[Trial, ...]:
        """The other healthy heavy policies that the score does not tell apart from the best."""
        return tuple(trial for trial in self.others if self.best is not None and not self.best.differs_from(trial))

    @property
    def only(self) -> bool:
        """Whether the best is the only heavy policy that was tried."""
        return [trial for trial in self.trials if trial.policy != NONE] == [self.best]

    @property
    def control(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.policy == NONE), None)

    @property
    def minutes_for_more(self) -> int:
        """The minutes that would allow some further trials, each as slow as the slowest so far."""
        seconds = self.start.seconds + (len(self.trials) + FEWEST) * max(trial.seconds for trial in self.trials)
        return math.ceil(seconds / 60 / (1 - MARGIN))

    @property
    def seconds(self) -> float:
        return self.start.seconds + sum(trial.seconds for trial in self.trials)

    def plain(self) -> dict[str, Any]:
        """For tune.json."""
        return {
            "dssl_version": VERSION, "config": config_io.to_dict(self.config), "images": self.images,
            "judges": len(self.judges), "plan": asdict(self.plan), "seconds": self.seconds,
            "best": None if self.best is None else self.best.policy, "start": asdict(self.start),
            "trials": [asdict(trial) | {"score": trial.retrieval} for trial in self.ranked],
        }  # fmt: skip


def _healthy(ranked: Sequence[Trial]) -> tuple[Trial, ...]:
    """The heavy policies that may be recommended."""
    return tuple(trial for trial in ranked if trial.healthy and trial.policy != NONE)


def plan_for(minutes: float, *, pair: float, graph: float) -> Plan:
    """From the seconds of a step with a standard pair and with the graph; an error if they are too many for the minutes."""
    least = FEWEST_STEPS * (pair + FEWEST * graph) / 60 / (1 - MARGIN)
    if minutes < least:
        raise DsslError(
            f"--minutes is {minutes:g}, and a step takes {graph:.1f} s here: expected at least {math.ceil(least)} for {FEWEST} "
            "policies; or choose a smaller --image-size, --batch-size or --encoder"
        )
    usable = 60 * minutes * (1 - MARGIN)
    steps, start = int((1 - START_SHARE) * usable / WANTED / graph), int(START_SHARE * usable / pair)
    return Plan(start=min(max(start, FEWEST_STEPS), 2 * MOST_STEPS), steps=min(max(steps, FEWEST_STEPS), MOST_STEPS))


def affordable(minutes: float, spent: float, trials: Sequence[Trial]) -> int:
    """How many trials fit into the minutes, of which these were made in ``spent`` seconds; at least one is made."""
    if not trials:
        return 1
    each = max(fmean(trial.seconds for trial in trials), 1e-9)
    more = int((60 * minutes * (1 - MARGIN) - spent) / each)
    return min(max(1, len(trials) + more), MOST)


def next_policy(trials: Sequence[Trial], *, wanted: int, policies: Sequence[str] = ()) -> str | None:
    """What to try next; None when there are as many trials as wanted, or nothing is left to try.

    First the coarse grid, or the beginning of it, then the neighbours of the best policy, then those of the next best.
    """
    candidates = list(policies)
    if not policies:
        if len(trials) >= wanted:
            return None
        candidates += COARSE[: max(2, math.ceil(COARSE_SHARE * wanted))]
        for trial in sorted(_healthy(trials), key=lambda trial: -trial.retrieval):
            candidates += neighbours(trial.policy)
    tried = {trial.policy for trial in trials}
    return next((policy for policy in candidates if policy not in tried), None)


def neighbours(policy: str) -> list[str]:
    """Policies a little milder and a little heavier."""
    match parsed := parse(policy):
        case RandAugment(count=count, magnitude=magnitude):
            near = [
                dataclasses.replace(parsed, count=count + more, magnitude=min(30, max(1, round(magnitude * factor))))
                for more, factor in [(0, 1.5), (0, 1 / 1.5), (1, 1.0), (-1, 1.0)]
                if count + more >= 1
            ]
            return [show(neighbour) for neighbour in near if neighbour != parsed]
        case Jigsaw():
            return [show(Jigsaw(tiles)) for tiles in (parsed.tiles + 1, parsed.tiles - 1) if tiles >= 2]
    return []


def tune(
    config: RunConfig, out: Path | str, *, minutes: float, policies: Sequence[str] = (), steps: int | None = None,
    say: Callable[[str], None] = lambda line: None, clock: Callable[[], float] = time.monotonic,
) -> Search:  # fmt: skip
    """Search in the folder ``out``, or resume the search that is there.

    ``policies`` are tried instead of those that the search would choose; ``steps`` is the length of a trial, if the minutes
    should not decide it.
    """
    if holds(config.data, Path(out)):
        raise DsslError(f"--out is {out}, inside the images of {config.data}: name a folder outside it")
    if not any(view.policy == "heavy" for view in config.view_graph.made):
        problem = f"the graph {config.graph} has no view with the policy heavy"
        raise DsslError(f"{problem}, so that there is none to choose: use dssl")
    if not math.isfinite(minutes):
        raise DsslError(f"--minutes is {minutes:g}: expected a number of minutes")
    candidates = tuple(dict.fromkeys(text if text == NONE else show(parse(text)) for text in policies))
    build_method(config)  # an encoder that cannot be built is an error before anything is written
    with Run.open(Path(out), config, task=TASK, by_content=("data",)) as run:
        if run.world.size > 1:
            raise DsslError("dssl tune runs in one process: start it without torchrun")
        tuning = _Tuning(config, run, say, clock)
        try:
            return tuning.search(minutes, candidates, steps)
        except BaseException:
            tuning.keep_time()
            raise


def _read_trials(file: Path) -> list[Trial]:
    try:
        trials = [Trial(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    except (TypeError, ValueError) as error:
        raise DsslError(f"{file} is damaged ({error}): delete its broken line, or name another --out") from None
    if trials and trials[0].policy:
        problem = f"{file} has lost its first line, the start of all trials"
        raise DsslError(f"{problem}: delete the folder, or name another --out")
    return trials


def _read_seconds(file: Path) -> float:
    try:
        return float(json.loads(file.read_text(encoding="utf-8"))["seconds"]) if file.is_file() else 0.0
    except (KeyError, TypeError, ValueError):  # whatever happened to it, the search goes on
        return 0.0


class _Tuning:
    """The search in an open folder."""

    def __init__(self, config: RunConfig, run: Run, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        assert run.folder is not None
        self.config, self.run, self.folder, self.say, self.clock = config, run, run.folder, say, clock
        self.file = run.folder.path / "trials.jsonl"
        self.records = _read_trials(self.file) if self.file.is_file() else []
        """The start, then the trials, in the order in which they were made."""
        self.lost_file = run.folder.path / "interrupted.json"
        self.lost = _read_seconds(self.lost_file)
        """Seconds of what was interrupted in earlier sessions."""
        self.began = clock()
        self.first = first = dataclasses.replace(config, graph="standard")
        self.method, data = build_method(first), training_data(first, kept=run.kept)
        fit_to_data(first, self.method, data, new=run.resumed is None)
        count = len(data.source)
        order = rng.permutation(rng.key(config.seed, "judges"), count)
        held = min(JUDGES, int(JUDGED_SHARE * count))
        if count - held < config.batch_size or held < 4:
            raise DsslError(
                f"{data.source.name} has {count} images, of which {count - held} train and {held} judge: expected at least "
                f"{math.ceil(config.batch_size / (1 - JUDGED_SHARE))} for a batch of {config.batch_size}; "
                "choose a smaller --batch-size or more data"
            )
        self.judges = Subset(data.source, order[:held])  # in random order, as the probe expects
        self.data = TrainingData(Subset(data.source, np.sort(order[held:])), data.normalization)
        check_sample(
            self.data.source, seed=config.seed, threads=config.threads,
            quarantine=Quarantine(self.data.source, max_share=config.bad_share),
        )  # fmt: skip
        self.precision, _ = precision_of(
            config.precision, run.kept, run.world,
            encoder=self.method.encoder, image_size=config.image_size, channels=config.channels,
        )  # fmt: skip
        self.header: dict[str, Any] = {
            "task": TASK, "dssl_version": VERSION, "config": config_io.to_dict(config),
            "normalization": data.normalization.plain(),
            "fingerprint": self.data.source.fingerprint,
            **({"plugins": loaded} if (loaded := plugins.loaded()) else {}),
        }  # fmt: skip
        if run.kept is not None:
            plugins.check(run.kept.get("plugins", []), place=run.folder.path)

    def search(self, minutes: float, policies: tuple[str, ...], steps: int | None) -> Search:
        plan = self._plan(minutes, steps)
        self.run.describe(
            self.header | {"precision": self.precision, "images": len(self.data.source), "plan": asdict(plan)},
            earlier_fingerprints=self.data.source.earlier_fingerprints(),
        )
        saved = self._start(plan)
        if count := len(self.records) - 1:
            self.say(f"{count} finished trial{'s' if count > 1 else ''} found")
        while True:
            start, *trials = self.records
            wanted = self._wanted(minutes, policies)
            policy = next_policy(trials, wanted=wanted, policies=policies)
            if policy is None:  # nothing is left to try
                wanted = len(trials)
                break
            slowest = max((trial.seconds for trial in trials), default=0.0)
            if trials and self.spent + slowest > 60 * minutes:
                break
            self.began = self.clock()
            trial = self._trial(policy, saved, plan)
            self.say(
                f"trial {len(trials) + 1} of {self._wanted(minutes, policies)}: {policy}, score {100 * trial.retrieval:.1f}, "
                f"{trial.verdict}, {trial.seconds:.0f} s"
            )
        return Search(
            config=self.config, plan=plan, start=start, trials=tuple(trials), wanted=wanted,
            images=len(self.data.source), judges=self.judges,
        )  # fmt: skip

    @property
    def spent(self) -> float:
        """Seconds of all sessions, which share the minutes."""
        return self.lost + sum(trial.seconds for trial in self.records)

    def keep_time(self) -> None:
        """Write down how long the start or trial took that is interrupted now."""
        write_text(self.lost_file, json.dumps({"seconds": self.lost + self.clock() - self.began}) + "\n")

    def _wanted(self, minutes: float, policies: tuple[str, ...]) -> int:
        """How many trials there will be, those of earlier sessions included."""
        _, *trials = self.records
        if policies:
            return len({*policies, *(trial.policy for trial in trials)})
        return max(len(trials), affordable(minutes, self.spent, trials))

    def _plan(self, minutes: float, steps: int | None) -> Plan:
        """The one that the search began with, or one that fits the minutes by the time of a few real steps."""
        if self.run.kept is not None:
            plan = Plan(**self.run.kept["plan"])
            if steps not in (None, plan.steps):
                raise DsslError(
                    f"{self.folder.path} holds a search with {plan.steps} steps per trial, and --steps is {steps}: "
                    "leave it out to resume the search, or name another --out"
                )
            return plan
        first = each = ""
        if steps is None:
            pair, graph = (self._seconds_per_step(settings) for settings in (self.first, self.config))
            plan = plan_for(minutes, pair=pair, graph=graph)
            first, each = (f", about {duration(seconds)}" for seconds in (plan.start * pair, plan.steps * graph))
        else:
            plan = Plan(start=2 * steps, steps=steps)
        self.say(f"shared start: {plan.start} steps{first}; then {plan.steps} steps for each policy{each}")
        return plan

    def _seconds_per_step(self, config: RunConfig) -> float:
        method = build_method(config)
        self._train(config, method, steps=1)  # compiles kernels and starts threads
        began = self.clock()
        self._train(config, method, steps=4)
        return (self.clock() - began) / 4

    def _start(self, plan: Plan) -> Checkpoint:
        """The shared start, trained if it is not finished."""
        ending = self._train(self.first, self.method, steps=plan.start, run=self.run)
        if ending.step < plan.start or ending.verdict.status in ("collapsed", "diverged"):
            raise DsslError(
                f"the shared start of standard pairs {ending.verdict.status}, so that policies cannot be compared: "
                "lower --rate by half, or use --method simclr"
            )
        newest = newest_good(self.folder.checkpoints)
        assert newest is not None
        if not self.records:
            self._record("", self.method, ending)
        return newest[1]

    def _trial(self, policy: str, saved: Checkpoint, plan: Plan) -> Trial:
        graph, heavy = ("standard2", self.config.heavy) if policy == NONE else (self.config.graph, policy)
        config, method = continued(dataclasses.replace(self.config, graph=graph, heavy=heavy), saved)
        return self._record(policy, method, self._train(config, method, steps=plan.steps))

    def _train(self, config: RunConfig, method: Method, *, steps: int, run: Run | None = None) -> loop.Ending:
        ending = short_run(
            config, self.data, method, steps=steps, precision=self.precision, header=self.header,
            run=run or Run(world=self.run.world),
        )  # fmt: skip
        if ending.signal is not None:
            raise Stopped(ending.signal)
        return ending

    def _record(self, policy: str, method: Method, ending: loop.Ending) -> Trial:
        """Measure the encoder on the images that judge, and write the result down."""
        verdict = ending.verdict
        scores = dict.fromkeys(("retrieval", "error", "rotation", "rank"), 0.0)
        if verdict.status != "diverged":
            half = half_type(self.precision)
            scores = self._measure(encoder_of(self.config, method.encoder, self.data, autocast=half))
        seconds = self.clock() - self.began
        trial = Trial(policy=policy, verdict=verdict.status, reason=verdict.reason, seconds=seconds, **scores)
        self.records.append(trial)
        write_text(self.file, "".join(json.dumps(asdict(trial)) + "\n" for trial in self.records))
        return trial

    def _measure(self, encoder: Encoder) -> dict[str, float]:
        standard, quarantine = self.config.standard, Quarantine(self.judges, max_share=1.0)
        # the same views for every trial, and one policy for all: each would recognise its own best
        policies = (f"({standard}) > {REFERENCE}", standard)
        views = two_views(encoder, self.judges, policies=policies, seed=self.config.seed, quarantine=quarantine)
        turning = dataclasses.replace(encoder, network=Turned(encoder.network))
        turned = turning.features(self.judges, quarantine=quarantine).values
        score = retrieval(*views)
        return {
            "retrieval": score,
            "error": math.sqrt(score * (1 - score) / len(views[0])),
            "rotation": rotation_accuracy(turned),
            "rank": effective_rank(turned[:, : turned.shape[1] // 4]),
        }


def short_run(
    config: RunConfig, data: TrainingData, method: Method, *,
    steps: int, precision: Precision, run: Run, header: dict[str, Any],
) -> loop.Ending:  # fmt: skip
    """Train the method for so many steps; a run without a folder leaves no files."""
    task = Pretraining(
        config, data, method, run=run, precision=precision, header=header,
        length=RunLength(total=steps, steps_per_epoch=len(data.source) / config.batch_size, round=steps, counted="step"),
        quarantine=Quarantine(data.source, max_share=config.bad_share),
    )  # fmt: skip
    task.warmup = steps // 20
    if run.folder is None:
        task.monitor.patience = steps // 2  # the dip of a run's first steps was the start's
    return loop.run(task, run)


def continued(config: RunConfig, start: Checkpoint) -> tuple[RunConfig, Method]:
    """A trial's configuration, and its method as the shared start left it.

    The seed is another than the start's, so that no image comes with the same views again, and the same for all trials.
    """
    config = dataclasses.replace(config, seed=rng.key(config.seed, "trial") % 2**31)
    method = build_method(config)
    method.load_state_dict(start.part("method"), strict=True)
    return config, method
