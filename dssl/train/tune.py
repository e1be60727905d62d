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
from typing import Any

import numpy as np
from torch import nn

from dssl import config_io, loop, rng
from dssl.augment import parse, show
from dssl.augment.policy import Jigsaw, RandAugment
from dssl.config import Precision, RunConfig
from dssl.data import Quarantine, Source, Subset, check_sample
from dssl.data.folder import holds
from dssl.distributed import World
from dssl.errors import DsslError, Stopped
from dssl.evaluate.features import compute_features
from dssl.evaluate.quality import Turned, retrieval, rotation_accuracy, two_views
from dssl.files import write_text
from dssl.methods.losses import effective_rank
from dssl.precision import half_type, precision_of
from dssl.presets import named_graph
from dssl.run import OpenRun, Resumed, RunFolder, open_run
from dssl.state import Pace, Verdict
from dssl.train.prepare import Parts, build_method, prepare
from dssl.train.pretrain import Pretraining
from dssl.version import VERSION
from dssl.weights.checkpoint import Checkpoint, newest_good

TASK = "tune"
NONE = "none"
"""In place of a policy: two standard pairs, the same work without heavy views."""
COARSE = (
    NONE, "ra(2,9,monotone14)", "0.9*ra(2,5) | 0.1*jigsaw(4)", "jigsaw(4)", "ra(2,5)", "ra(2,18,monotone14)", "ta",
    "ra(1,9,monotone14)", "jigsaw(2)", "ra(4,9,monotone14)", "ua", "ra(4,18,monotone14)", "ra(1,3,monotone14)",
)  # fmt: skip
"""The first round, the most different first: where time is short, only the beginning is tried."""
COARSE_SHARE = 2 / 3
"""Of the trials; the rest are neighbours of the best."""
REFERENCE = "ra(2,9,monotone14)"
"""The policy of the views that judge."""
JUDGES, JUDGED_SHARE = 2_000, 0.2
"""Images that judge and are not trained on: at most so many, and at most this share."""
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
    verdict: Verdict
    reason: str
    seconds: float

    @property
    def score(self) -> float:
        return self.retrieval

    @property
    def healthy(self) -> bool:
        return self.verdict in ("healthy", "too early")


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
        """The other healthy heavy policies whose score is within two standard errors of the best."""
        best = self.best
        return tuple(
            trial
            for trial in self.ranked
            if best is not None
            and trial is not best
            and trial.healthy
            and trial.policy != NONE
            and best.score - trial.score <= 2 * math.hypot(best.error, trial.error)
        )

    @property
    def control(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.policy == NONE), None)

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


def tune(
    config: RunConfig,
    out: Path | str,
    *,
    minutes: float,
    policies: Sequence[str] = (),
    steps: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Search in the folder ``out``, or resume the search that is there.

    ``policies`` are tried instead of those that the search would choose. ``steps`` is the length of a trial, where the minutes
    should not decide it.
    """
    folder = RunFolder(Path(out))
    if holds(config.data, folder.path):
        raise DsslError(f"--out is {folder.path}, inside the images of {config.data}: name a folder outside it")
    graph = named_graph(config.graph)
    if not any(view.is_heavy for view in graph.made):
        raise DsslError(f"the graph {config.graph} has no heavy view, so that there is no policy to choose: use dssl")
    candidates = tuple(text if text == NONE else show(parse(text)) for text in policies)
    build_method(config)  # an encoder that cannot be built is refused before anything is written
    with open_run(
        folder, config, default=RunConfig, task=TASK, device=config.device, batch_size=config.batch_size
    ) as opened:
        if opened.world.size > 1:
            raise DsslError("dssl tune runs in one process: start it without torchrun")
        return _Tuning(config, opened, say, clock).search(minutes, candidates, steps)


class _Tuning:
    """The search in an open folder."""

    def __init__(
        self, config: RunConfig, opened: OpenRun, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.config, self.opened, self.say, self.clock = config, opened, say, clock
        self.file = opened.folder.path / "trials.jsonl"
        self.kept: list[Trial] = []
        """The start, then the trials, in the order in which they were made."""
        if self.file.is_file():
            self.kept = [Trial(**json.loads(line)) for line in self.file.read_text(encoding="utf-8").splitlines()]
        self.began = clock()
        first = dataclasses.replace(config, graph="standard")
        method = build_method(first)
        parts = prepare(first, method, normalization=None, new=opened.resumed is None)
        count = len(parts.source)
        order = rng.permutation(rng.key(config.seed, "judges"), count)
        held = min(JUDGES, int(JUDGED_SHARE * count))
        if count - held < config.batch_size or held < 4:
            raise DsslError(
                f"{parts.source.name} has {count} images, of which {count - held} train and {held} judge: expected at least "
                f"{math.ceil(config.batch_size / (1 - JUDGED_SHARE))} for a batch of {config.batch_size}; "
                "choose a smaller --batch-size or more data"
            )
        # in random order, as the probe expects
        self.judges: Source = Subset(parts.source, order[:held])
        self.parts = dataclasses.replace(parts, source=Subset(parts.source, np.sort(order[held:])))
        self.first = first
        check_sample(
            self.parts.source, seed=config.seed, threads=config.threads,
            quarantine=Quarantine(self.parts.source, max_share=config.bad_share),
        )  # fmt: skip
        self.precision, _ = precision_of(
            config.precision, opened.kept, opened.world,
            encoder=method.encoder, image_size=config.image_size, channels=config.channels,
        )  # fmt: skip
        self.header: dict[str, Any] = {
            "task": TASK,
            "dssl_version": VERSION,
            "config": config_io.to_dict(config),
            "normalization": {"mean": list(parts.normalization.mean), "std": list(parts.normalization.std)},
            "fingerprint": self.parts.source.fingerprint,
        }

    def search(self, minutes: float, policies: tuple[str, ...], steps: int | None) -> Search:
        plan = self._plan(minutes, steps)
        saved = self._start(plan)
        start = self.kept[0]
        if len(self.kept) > 1:
            self.say(f"{len(self.kept) - 1} finished trials found")
        while True:
            trials = self.kept[1:]
            wanted = len(policies) or affordable(minutes, start, trials)
            policy = next_policy(trials, wanted=wanted, policies=policies)
            slowest = max((trial.seconds for trial in trials), default=0.0)
            if policy is None or (trials and sum(one.seconds for one in self.kept) + slowest > 60 * minutes):
                break
            self.began = self.clock()
            now = self._trial(policy, saved, plan)
            number = len(self.kept) - 1
            of = f" of {len(policies) or affordable(minutes, start, self.kept[1:])}"
            self.say(
                f"trial {number}{of}: {now.policy}, score {100 * now.score:.1f}, {now.verdict}, {now.seconds:.0f} s"
            )
        return Search(
            config=self.config, plan=plan, start=start, trials=tuple(trials), wanted=wanted,
            images=len(self.parts.source), judges=self.judges,
        )  # fmt: skip

    def _plan(self, minutes: float, steps: int | None) -> Plan:
        """The one that the search began with, or one that fits the minutes by the time of a few real steps."""
        opened = self.opened
        if opened.kept is not None:
            plan = Plan(**opened.kept["plan"])
            if steps is not None and steps != plan.steps:
                raise DsslError(
                    f"{opened.folder.path} holds a search with {plan.steps} steps per trial, and --steps is {steps}: "
                    "leave it out to resume the search, or name another --out"
                )
            return plan
        if steps is None:
            pair, graph = (self._seconds_per_step(one) for one in (self.first, self.config))
            plan = plan_for(minutes, pair=pair, graph=graph)
            self.say(f"a step takes {pair:.2f} s with standard pairs and {graph:.2f} s with the graph, measured")
        else:
            plan = Plan(start=2 * steps, steps=steps)
        self.say(
            f"shared start of {plan.start} steps, then {plan.steps} steps for each policy, within {minutes:g} minutes"
        )
        opened.describe(
            self.header | {"precision": self.precision, "images": len(self.parts.source), "plan": asdict(plan)}
        )
        return plan

    def _seconds_per_step(self, config: RunConfig) -> float:
        method = build_method(config)
        parts = dataclasses.replace(self.parts, graph=named_graph(config.graph), method=method)
        self._run(config, parts, steps=1)  # compiles kernels and starts threads
        began = self.clock()
        self._run(config, parts, steps=4)
        return (self.clock() - began) / 4

    def _start(self, plan: Plan) -> Checkpoint:
        """The shared start, trained where it is not finished."""
        folder = self.opened.folder
        ending = self._run(self.first, self.parts, steps=plan.start, resumed=self.opened.resumed, kept=True)
        if ending.step < plan.start or ending.opinion.verdict == "collapsed":
            raise DsslError(
                f"the shared start of standard pairs {ending.opinion.verdict}, so that policies cannot be compared: "
                "lower --rate by half, or use --method simclr"
            )
        found = newest_good(folder.checkpoints)
        assert found is not None
        if not self.kept:
            self._record("", self.parts, ending)
        return found[1]

    def _trial(self, policy: str, saved: Checkpoint, plan: Plan) -> Trial:
        graph, heavy = ("standard2", self.config.heavy) if policy == NONE else (self.config.graph, policy)
        config, parts = continued(dataclasses.replace(self.config, graph=graph, heavy=heavy), self.parts, saved)
        ending = self._run(config, parts, steps=plan.steps)
        return self._record(policy, parts, ending)

    def _run(
        self, config: RunConfig, parts: Parts, *, steps: int, resumed: Resumed | None = None, kept: bool = False
    ) -> loop.Ending:
        opened = self.opened
        ending = short_run(
            config, parts, steps=steps, precision=self.precision, world=opened.world, folder=opened.folder,
            header=self.header, resumed=resumed, kept=kept,
        )  # fmt: skip
        if ending.signal is not None:
            raise Stopped(ending.signal)
        return ending

    def _record(self, policy: str, parts: Parts, ending: loop.Ending) -> Trial:
        """Measure the encoder on the images that judge, and keep the result."""
        opinion = ending.opinion
        measured = dict.fromkeys(("retrieval", "error", "rotation", "rank"), 0.0)
        if opinion.verdict != "diverged":
            measured = self._measure(parts.method.encoder)
        seconds = self.clock() - self.began
        trial = Trial(policy=policy, verdict=opinion.verdict, reason=opinion.reason, seconds=seconds, **measured)
        self.kept.append(trial)
        write_text(self.file, "".join(json.dumps(asdict(one)) + "\n" for one in self.kept))
        return trial

    def _measure(self, encoder: nn.Module) -> dict[str, float]:
        config, judges, normalization = self.config, self.judges, self.parts.normalization
        half, quarantine = half_type(self.precision), Quarantine(self.judges, max_share=1.0)
        # the same views for every trial, and one policy for all: each would recognise its own best
        views = two_views(
            encoder, judges, policies=(f"({config.standard}) > {REFERENCE}", config.standard), size=config.image_size,
            channels=config.channels, normalization=normalization, seed=config.seed, threads=config.threads, autocast=half,
            quarantine=quarantine,
        )  # fmt: skip
        turned = compute_features(
            Turned(encoder), judges, image_size=config.image_size, normalization=normalization, channels=config.channels,
            autocast=half, threads=config.threads, quarantine=quarantine,
        ).values  # fmt: skip
        found = retrieval(*views)
        return {
            "retrieval": found,
            "error": math.sqrt(found * (1 - found) / len(views[0])),
            "rotation": rotation_accuracy(turned),
            "rank": effective_rank(turned[:, : turned.shape[1] // 4]),
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
    ranked = sorted((one for one in trials if one.healthy and one.policy != NONE), key=lambda one: -one.score)
    for trial in ranked:
        for policy in neighbours(trial.policy):
            if policy not in tried:
                return policy
    return None


def neighbours(policy: str) -> list[str]:
    """Policies a little milder and a little heavier."""
    match known := parse(policy):
        case RandAugment():
            steps = [(0, 1.5), (0, 1 / 1.5), (1, 1.0), (-1, 1.0)]
            made = [
                dataclasses.replace(
                    known, count=known.count + more, magnitude=min(30, max(1, round(known.magnitude * factor)))
                )
                for more, factor in steps
                if known.count + more >= 1
            ]
            return [show(one) for one in made if one != known]
        case Jigsaw():
            return [show(Jigsaw(tiles)) for tiles in (known.tiles + 1, known.tiles - 1) if tiles >= 2]
    return []


def short_run(
    config: RunConfig,
    parts: Parts,
    *,
    steps: int,
    precision: Precision,
    world: World,
    folder: RunFolder,
    header: dict[str, Any],
    resumed: Resumed | None = None,
    kept: bool = False,
) -> loop.Ending:
    """Train the method of the parts for so many steps; only a run that is ``kept`` writes anything."""
    settings = loop.LoopSettings(
        pace=Pace(total=steps, steps_per_epoch=len(parts.source) / config.batch_size, round=steps, counted="step"),
        batch_size=config.batch_size,
        data=config.data,
        precision=precision,
        seed=config.seed,
        checkpoint=config.checkpoint,
        look_every=config.health.every,
        clip=config.optimizer.clip,
    )
    task = Pretraining(
        config, parts, settings, folder=folder, world=world, header=header, gallery=None, first_step=0,
        quarantine=Quarantine(parts.source, max_share=config.bad_share),
    )  # fmt: skip
    task.warmup = steps // 20
    if not kept:
        task.watch.patience = steps // 2  # the dip of a run's first steps was the start's
    return loop.run(task, settings, world=world, folder=folder if kept else None, resumed=resumed)


def continued(config: RunConfig, parts: Parts, start: Checkpoint) -> tuple[RunConfig, Parts]:
    """A trial's configuration, and its parts with the method as the shared start left it.

    The seed is another than the start's, so that no image comes with the same views again, and the same for all trials.
    """
    config = dataclasses.replace(config, seed=rng.key(config.seed, "trial") % 2**31)
    method = build_method(config)
    assert isinstance(method, nn.Module)
    method.load_state_dict(start.part("method"), strict=True)
    return config, dataclasses.replace(parts, graph=named_graph(config.graph), method=method)
