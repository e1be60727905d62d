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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dssl import config_io, loop, rng
from dssl.augment import parse, show
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
from dssl.state import RunLength
from dssl.text import duration
from dssl.training.prepare import TrainingData, build_method, encoder_of, fit_to_data, training_data
from dssl.training.pretrain import Pretraining
from dssl.training.trials import NONE, Plan, Search, Trial, affordable, next_policy, plan_for
from dssl.version import VERSION
from dssl.weights.checkpoint import Checkpoint, newest_good
from dssl.weights.encoder import Encoder

TASK = "tune"
REFERENCE = "ra(2,9,monotone14)"
"""The policy of the views that judge."""
JUDGES, JUDGED_SHARE = 2_000, 0.2
"""Images that judge and are not trained on: at most so many, and at most this share."""


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
    if holds(config.data, Path(out)):
        raise DsslError(f"--out is {out}, inside the images of {config.data}: name a folder outside it")
    if not any(view.policy == "heavy" for view in config.view_graph.made):
        raise DsslError(
            f"the graph {config.graph} has no view with the policy heavy, so that there is none to choose: use dssl"
        )
    if not math.isfinite(minutes):
        raise DsslError(f"--minutes is {minutes:g}: expected a number of minutes")
    candidates = tuple(dict.fromkeys(text if text == NONE else show(parse(text)) for text in policies))
    build_method(config)  # an encoder that cannot be built is refused before anything is written
    with Run.open(Path(out), config, task=TASK, by_content=("data",)) as run:
        if run.world.size > 1:
            raise DsslError("dssl tune runs in one process: start it without torchrun")
        return _Tuning(config, run, say, clock).search(minutes, candidates, steps)


def _read_trials(file: Path) -> list[Trial]:
    try:
        trials = [Trial(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    except (TypeError, ValueError) as error:
        raise DsslError(f"{file} is damaged ({error}): delete its broken line, or name another --out") from None
    if trials and trials[0].policy:
        raise DsslError(
            f"{file} has lost its first line, the start of all trials: delete the folder, or name another --out"
        )
    return trials


class _Tuning:
    """The search in an open folder."""

    def __init__(self, config: RunConfig, run: Run, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        assert run.folder is not None
        self.config, self.run, self.folder, self.say, self.clock = config, run, run.folder, say, clock
        self.file = run.folder.path / "trials.jsonl"
        self.kept: list[Trial] = []
        """The start, then the trials, in the order in which they were made."""
        if self.file.is_file():
            self.kept = _read_trials(self.file)
        self.began = clock()
        first = dataclasses.replace(config, graph="standard")
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
        # in random order, as the probe expects
        self.judges: Source = Subset(data.source, order[:held])
        self.data = TrainingData(Subset(data.source, np.sort(order[held:])), data.normalization)
        self.first = first
        check_sample(
            self.data.source, seed=config.seed, threads=config.threads,
            quarantine=Quarantine(self.data.source, max_share=config.bad_share),
        )  # fmt: skip
        self.precision, _ = precision_of(
            config.precision, run.kept, run.world,
            encoder=self.method.encoder, image_size=config.image_size, channels=config.channels,
        )  # fmt: skip
        self.header: dict[str, Any] = {
            "task": TASK,
            "dssl_version": VERSION,
            "config": config_io.to_dict(config),
            "normalization": {"mean": list(data.normalization.mean), "std": list(data.normalization.std)},
            "fingerprint": self.data.source.fingerprint,
        }

    def search(self, minutes: float, policies: tuple[str, ...], steps: int | None) -> Search:
        plan = self._plan(minutes, steps)
        saved = self._start(plan)
        start = self.kept[0]
        if len(self.kept) > 1:
            count = len(self.kept) - 1
            self.say(f"{count} finished trial{'s' if count > 1 else ''} found")
        while True:
            trials = self.kept[1:]
            wanted = self._wanted(minutes, policies)
            policy = next_policy(trials, wanted=wanted, policies=policies)
            slowest = max((trial.seconds for trial in trials), default=0.0)
            if policy is None:  # nothing is left to try
                wanted = len(trials)
                break
            if trials and sum(trial.seconds for trial in self.kept) + slowest > 60 * minutes:
                break
            self.began = self.clock()
            now = self._trial(policy, saved, plan)
            number = len(self.kept) - 1
            of = self._wanted(minutes, policies)
            self.say(
                f"trial {number} of {of}: {now.policy}, score {100 * now.score:.1f}, {now.verdict}, {now.seconds:.0f} s"
            )
        return Search(
            config=self.config, plan=plan, start=start, trials=tuple(trials), wanted=wanted,
            images=len(self.data.source), judges=self.judges,
        )  # fmt: skip

    def _wanted(self, minutes: float, policies: tuple[str, ...]) -> int:
        """How many trials there will be, those of earlier sessions included."""
        start, *trials = self.kept
        if policies:
            return len({*policies, *(trial.policy for trial in trials)})
        return max(len(trials), affordable(minutes, start, trials))

    def _plan(self, minutes: float, steps: int | None) -> Plan:
        """The one that the search began with, or one that fits the minutes by the time of a few real steps."""
        run = self.run
        if run.kept is not None:
            plan = Plan(**run.kept["plan"])
            if steps is not None and steps != plan.steps:
                raise DsslError(
                    f"{self.folder.path} holds a search with {plan.steps} steps per trial, and --steps is {steps}: "
                    "leave it out to resume the search, or name another --out"
                )
            self._describe(plan)
            return plan
        if steps is None:
            pair, graph = (self._seconds_per_step(settings) for settings in (self.first, self.config))
            plan = plan_for(minutes, pair=pair, graph=graph)
            self.say(
                f"shared start: {plan.start} steps, about {duration(plan.start * pair)}; "
                f"then {plan.steps} steps for each policy, about {duration(plan.steps * graph)}"
            )
        else:
            plan = Plan(start=2 * steps, steps=steps)
            self.say(f"shared start: {plan.start} steps; then {plan.steps} steps for each policy")
        self._describe(plan)
        return plan

    def _describe(self, plan: Plan) -> None:
        self.run.describe(
            self.header | {"precision": self.precision, "images": len(self.data.source), "plan": asdict(plan)},
            earlier_fingerprints=self.data.source.earlier_fingerprints(),
        )

    def _seconds_per_step(self, config: RunConfig) -> float:
        method = build_method(config)
        self._train(config, method, steps=1)  # compiles kernels and starts threads
        began = self.clock()
        self._train(config, method, steps=4)
        return (self.clock() - began) / 4

    def _start(self, plan: Plan) -> Checkpoint:
        """The shared start, trained where it is not finished."""
        ending = self._train(self.first, self.method, steps=plan.start, kept=True)
        if ending.step < plan.start or ending.verdict.status in ("collapsed", "diverged"):
            raise DsslError(
                f"the shared start of standard pairs {ending.verdict.status}, so that policies cannot be compared: "
                "lower --rate by half, or use --method simclr"
            )
        newest = newest_good(self.folder.checkpoints)
        assert newest is not None
        if not self.kept:
            self._record("", self.method, ending)
        return newest[1]

    def _trial(self, policy: str, saved: Checkpoint, plan: Plan) -> Trial:
        graph, heavy = ("standard2", self.config.heavy) if policy == NONE else (self.config.graph, policy)
        config, method = continued(dataclasses.replace(self.config, graph=graph, heavy=heavy), saved)
        ending = self._train(config, method, steps=plan.steps)
        return self._record(policy, method, ending)

    def _train(self, config: RunConfig, method: Method, *, steps: int, kept: bool = False) -> loop.Ending:
        ending = short_run(
            config, self.data, method, steps=steps, precision=self.precision, header=self.header,
            run=self.run if kept else Run(world=self.run.world),
        )  # fmt: skip
        if ending.signal is not None:
            raise Stopped(ending.signal)
        return ending

    def _record(self, policy: str, method: Method, ending: loop.Ending) -> Trial:
        """Measure the encoder on the images that judge, and keep the result."""
        verdict = ending.verdict
        measured = dict.fromkeys(("retrieval", "error", "rotation", "rank"), 0.0)
        if verdict.status != "diverged":
            measured = self._measure(
                encoder_of(self.config, method.encoder, self.data, autocast=half_type(self.precision))
            )
        seconds = self.clock() - self.began
        trial = Trial(policy=policy, verdict=verdict.status, reason=verdict.reason, seconds=seconds, **measured)
        self.kept.append(trial)
        write_text(self.file, "".join(json.dumps(asdict(trial)) + "\n" for trial in self.kept))
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
    config: RunConfig,
    data: TrainingData,
    method: Method,
    *,
    steps: int,
    precision: Precision,
    run: Run,
    header: dict[str, Any],
) -> loop.Ending:
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
