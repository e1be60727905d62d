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
from dssl.distributed import World
from dssl.errors import DsslError, Stopped
from dssl.evaluation.quality import Turned, retrieval, rotation_accuracy, two_views
from dssl.files import write_text
from dssl.methods.losses import effective_rank
from dssl.precision import half_type, precision_of
from dssl.presets import named_graph
from dssl.run import OpenRun, Resumed, RunFolder, open_run
from dssl.state import RunLength
from dssl.text import duration
from dssl.training.prepare import Parts, build_method, encoder_of, prepare
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
    folder = RunFolder(Path(out))
    if holds(config.data, folder.path):
        raise DsslError(f"--out is {folder.path}, inside the images of {config.data}: name a folder outside it")
    graph = named_graph(config.graph)
    if not any(view.policy == "heavy" for view in graph.made):
        raise DsslError(
            f"the graph {config.graph} has no view with the policy heavy, so that there is none to choose: use dssl"
        )
    if not math.isfinite(minutes):
        raise DsslError(f"--minutes is {minutes:g}: expected a number of minutes")
    candidates = tuple(dict.fromkeys(text if text == NONE else show(parse(text)) for text in policies))
    build_method(config)  # an encoder that cannot be built is refused before anything is written
    with open_run(
        folder, config, default=RunConfig, task=TASK, device=config.device, batch_size=config.batch_size
    ) as opened:
        if opened.world.size > 1:
            raise DsslError("dssl tune runs in one process: start it without torchrun")
        return _Tuning(config, opened, say, clock).search(minutes, candidates, steps)


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

    def __init__(
        self, config: RunConfig, opened: OpenRun, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self.config, self.opened, self.say, self.clock = config, opened, say, clock
        self.file = opened.folder.path / "trials.jsonl"
        self.kept: list[Trial] = []
        """The start, then the trials, in the order in which they were made."""
        if self.file.is_file():
            self.kept = _read_trials(self.file)
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
            if trials and sum(one.seconds for one in self.kept) + slowest > 60 * minutes:
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
            images=len(self.parts.source), judges=self.judges,
        )  # fmt: skip

    def _wanted(self, minutes: float, policies: tuple[str, ...]) -> int:
        """How many trials there will be, those of earlier sessions included."""
        start, *trials = self.kept
        if policies:
            return len({*policies, *(trial.policy for trial in trials)})
        return max(len(trials), affordable(minutes, start, trials))

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
            self.say(
                f"shared start: {plan.start} steps, about {duration(plan.start * pair)}; "
                f"then {plan.steps} steps for each policy, about {duration(plan.steps * graph)}"
            )
        else:
            plan = Plan(start=2 * steps, steps=steps)
            self.say(f"shared start: {plan.start} steps; then {plan.steps} steps for each policy")
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
        if ending.step < plan.start or ending.verdict.status in ("collapsed", "diverged"):
            raise DsslError(
                f"the shared start of standard pairs {ending.verdict.status}, so that policies cannot be compared: "
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
        verdict = ending.verdict
        measured = dict.fromkeys(("retrieval", "error", "rotation", "rank"), 0.0)
        if verdict.status != "diverged":
            measured = self._measure(encoder_of(self.config, parts, autocast=half_type(self.precision)))
        seconds = self.clock() - self.began
        trial = Trial(policy=policy, verdict=verdict.status, reason=verdict.reason, seconds=seconds, **measured)
        self.kept.append(trial)
        write_text(self.file, "".join(json.dumps(asdict(one)) + "\n" for one in self.kept))
        return trial

    def _measure(self, encoder: Encoder) -> dict[str, float]:
        standard, quarantine = self.config.standard, Quarantine(self.judges, max_share=1.0)
        # the same views for every trial, and one policy for all: each would recognise its own best
        policies = (f"({standard}) > {REFERENCE}", standard)
        views = two_views(encoder, self.judges, policies=policies, seed=self.config.seed, quarantine=quarantine)
        turning = dataclasses.replace(encoder, network=Turned(encoder.network))
        turned = turning.features(self.judges, quarantine=quarantine).values
        found = retrieval(*views)
        return {
            "retrieval": found,
            "error": math.sqrt(found * (1 - found) / len(views[0])),
            "rotation": rotation_accuracy(turned),
            "rank": effective_rank(turned[:, : turned.shape[1] // 4]),
        }


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
        length=RunLength(
            total=steps, steps_per_epoch=len(parts.source) / config.batch_size, round=steps, counted="step"
        ),
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
        task.monitor.patience = steps // 2  # the dip of a run's first steps was the start's
    return loop.run(task, settings, world=world, folder=folder if kept else None, resumed=resumed)


def continued(config: RunConfig, parts: Parts, start: Checkpoint) -> tuple[RunConfig, Parts]:
    """A trial's configuration, and its parts with the method as the shared start left it.

    The seed is another than the start's, so that no image comes with the same views again, and the same for all trials.
    """
    config = dataclasses.replace(config, seed=rng.key(config.seed, "trial") % 2**31)
    method = build_method(config)
    method.load_state_dict(start.part("method"), strict=True)
    return config, dataclasses.replace(parts, graph=named_graph(config.graph), method=method)
