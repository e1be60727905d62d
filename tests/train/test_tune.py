"""The search for a heavy policy: bounded, resumable, blind to labels, and never for a run that collapsed."""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dssl import loop
from dssl.augment import parse, show
from dssl.cli import main
from dssl.commands.tune import Arguments, configuration, train_line
from dssl.config import RunConfig
from dssl.data import Source, Subset, open_source
from dssl.errors import DsslError
from dssl.report import tune as report
from dssl.state import Status, Verdict
from dssl.training import prepare, tune
from dssl.training.tune import COARSE, NONE, Plan, Search, Trial, affordable, neighbours, next_policy, plan_for
from tests.train.running import launch

TRIED = (NONE, "ra(2,5)", "0.9*ra(2,5) | 0.1*jigsaw(4)")
WORDS = [
    "tune", "shapes:60", "--steps", "2", "--batch-size", "16", "--encoder", "small", "--precision", "fp32", "--threads", "1",
    "--policies", *TRIED,
]  # fmt: skip
ARGUMENTS = Arguments(source="shapes:60", batch_size=16, encoder="small", precision="fp32", threads=1)


def trial(policy: str, score: float, *, verdict: Status = "healthy", seconds: float = 10.0) -> Trial:
    """Made up."""
    reason = "" if verdict == "healthy" else "embeddings of view h1 have a spread of 0.05"
    return Trial(
        policy=policy, retrieval=score, error=0.01, rotation=0.4, rank=9.0, verdict=verdict, reason=reason, seconds=seconds
    )  # fmt: skip


def search(out: Path, *, minutes: float = 60, policies: tuple[str, ...] = TRIED, **options: Any) -> Search:
    return tune.tune(configuration(ARGUMENTS), out, minutes=minutes, policies=policies, **({"steps": 2} | options))


def results(out: Path) -> list[dict[str, Any]]:
    """All that was result, apart from how long it took."""
    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nobody stopped, by the command."""
    out = tmp_path_factory.mktemp("tune") / "whole"
    assert main([*WORDS, "--out", str(out)]) == 0
    return out


# -- time


def test_the_plan_of_a_search_fits_its_minutes() -> None:
    for minutes, pair, graph in itertools.product((5, 30, 240), (0.05, 0.2, 0.5), (0.1, 0.4, 1.0)):
        plan = plan_for(minutes, pair=pair, graph=graph)
        start = trial("", 0.3, seconds=plan.start * pair)
        first = trial(NONE, 0.3, seconds=plan.steps * graph)
        count = affordable(minutes, start.seconds + first.seconds, [first])
        assert count == 1 or start.seconds + count * plan.steps * graph <= 60 * minutes
    assert plan_for(30, pair=0.18, graph=0.35) == Plan(start=800, steps=231)  # two cores, the default settings
    with pytest.raises(DsslError, match=r"--minutes is 5\b.* 28\b"):
        plan_for(5, pair=1.7, graph=12)
    assert affordable(30, 150 + 85, [trial(NONE, 0.3, seconds=85)]) == 17
    # the first trial was slow: by the mean of all, as many as the rest of the minutes allow
    assert affordable(30, 150 + 300 + 3 * 60, [trial(NONE, 0.3, seconds=s) for s in (300, 60, 60, 60)]) == 4 + 8


def ticking(seconds: Iterator[float]) -> Callable[[], float]:
    now = itertools.accumulate(seconds)
    return lambda: next(now)


def test_a_search_ends_when_the_next_trial_would_not_fit(tmp_path: Path) -> None:
    # every check of the clock finds it 60 s later: a trial takes a minute, from its beginning to its record
    result = search(tmp_path / "six", policies=(), minutes=6, clock=ticking(itertools.repeat(60.0)))
    assert [entry.policy for entry in result.trials] == [*COARSE[:3], result.trials[3].policy]
    assert result.wanted == 4
    assert {entry.seconds for entry in result.trials} == {60.0}
    assert result.seconds <= 360
    assert result.trials[3].policy in neighbours(max(result.trials[1:3], key=lambda entry: entry.retrieval).policy)
    # more minutes resume the search; the third trial is slow, and there is no time for another of its kind
    slow = ticking(itertools.chain([0.0], itertools.repeat(200.0)))
    more = search(tmp_path / "six", policies=(), minutes=10, clock=slow)
    assert more.trials[:4] == result.trials
    assert len(more.trials) == 5
    assert more.seconds <= 600


def test_what_was_interrupted_counts_as_time_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "run", {"policies": (), "minutes": 8}
    real = tune.rotation_accuracy

    def interrupted(features: torch.Tensor) -> float:
        if (out / "trials.jsonl").is_file() and len(results(out)) == 2:
            raise KeyboardInterrupt
        return real(features)

    with monkeypatch.context() as patched:
        patched.setattr(tune, "rotation_accuracy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(out, **asked, clock=ticking(itertools.repeat(60.0)))
    # a minute each: the start, one trial, and the one that was interrupted; 8 minutes less 10 % have room for four more
    result = search(out, **asked, clock=ticking(itertools.repeat(60.0)))
    assert len(result.trials) == 5
    assert result.seconds + 60 <= 8 * 60


def test_without_steps_a_few_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "FEWEST_STEPS", 2)
    said: list[str] = []
    # 8 s for four steps, of the pair and of the graph: with a minute, 16 trials of two steps each would take too long
    clock = ticking(itertools.repeat(8.0))
    result = search(tmp_path / "timed", policies=(NONE,), minutes=1, steps=None, say=said.append, clock=clock)
    assert result.plan == Plan(start=5, steps=2)
    assert said[0] == "shared start: 5 steps, about 10 seconds; then 2 steps for each policy, about 4 seconds"
    assert json.loads((tmp_path / "timed" / "config.json").read_text())["plan"] == {"start": 5, "steps": 2}


# -- what is tried


def test_the_grid_comes_first_and_then_the_neighbours_of_the_best() -> None:
    scores = {policy: 0.3 + 0.001 * number for number, policy in enumerate(COARSE)} | {"jigsaw(4)": 0.9, NONE: 0.95}
    trials: list[Trial] = []
    while (policy := next_policy(trials, wanted=12)) is not None:
        trials.append(trial(policy, scores.get(policy, 0.2)))
    policies = [entry.policy for entry in trials]
    assert policies[:8] == list(COARSE[:8])
    assert policies[8:10] == ["jigsaw(5)", "jigsaw(3)"]  # then those of the next best, ra(1,9,monotone14)
    assert policies[10:] == ["ra(1,14,monotone14)", "ra(1,6,monotone14)"]
    assert len(set(policies)) == 12


def test_no_neighbour_of_a_run_that_collapsed_is_tried() -> None:
    trials = [trial(NONE, 0.3), trial("ra(2,9,monotone14)", 0.4), trial(COARSE[2], 0.3)]
    trials.append(trial("jigsaw(4)", 0.9, verdict="collapsed"))
    assert next_policy(trials, wanted=5) in neighbours("ra(2,9,monotone14)")


def test_policies_and_their_neighbours_are_written_as_the_program_writes_them() -> None:
    for policy in COARSE[1:]:
        assert show(parse(policy)) == policy
        for other in neighbours(policy):
            assert show(parse(other)) == other != policy
    assert neighbours("ra(1,1)") == ["ra(1,2)", "ra(2,1)"]
    assert neighbours("ra(8,30)") == ["ra(8,20)", "ra(9,30)", "ra(7,30)"]
    assert neighbours("jigsaw(2)") == ["jigsaw(3)"]


# -- the search itself


def test_a_killed_search_resumes_to_the_same_result(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    child = launch([*WORDS, "--out", str(out)], tmp_path / "log")
    file = out / "trials.jsonl"
    deadline = time.monotonic() + 300
    while not file.is_file() or len(file.read_text().splitlines()) < 2:  # the start and one trial
        assert child.process.is_alive() or file.is_file(), child.said()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send(signal.SIGKILL)
    child.wait()
    kept = file.read_text()
    start = next((out / "checkpoints").iterdir()).read_bytes()
    assert main([*WORDS, "--out", str(out)]) == 0
    assert file.read_text().startswith(kept)
    assert next((out / "checkpoints").iterdir()).read_bytes() == start
    assert results(out) == results(whole)
    assert [entry["policy"] for entry in results(out)] == ["", *TRIED]


@pytest.mark.parametrize("within", ["training", "measuring"])
def test_an_interrupted_search_says_so_in_one_line_and_resumes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], within: str
) -> None:
    """Ctrl-C in the second trial: a training without a folder of its own has nothing to save."""
    out = tmp_path / "run"
    owner, name = (tune.Pretraining, "after_step") if within == "training" else (tune, "rotation_accuracy")
    real = getattr(owner, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if (out / "trials.jsonl").is_file() and len(results(out)) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    # a shell starts background jobs with SIGINT ignored, and this one may be among them
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, interrupted)
            assert main([*WORDS, "--out", str(out)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "dssl: stopped by signal 2 and saved; the same command resumes it"
    assert [entry["policy"] for entry in results(out)] == ["", TRIED[0]]
    assert not (out / "tune.html").exists()
    assert main([*WORDS, "--out", str(out)]) == 0
    assert "1 finished trial found" in capsys.readouterr().out
    assert results(out) == results(whole)


def test_labels_are_not_used(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlabelled(text: str, **options: Any) -> Source:
        source = open_source(text, **options)
        bare = Subset(source, torch.arange(len(source)).numpy())
        bare.labels = bare.classes = None
        return bare

    monkeypatch.setattr(prepare, "open_source", unlabelled)
    search(tmp_path / "bare")
    assert results(tmp_path / "bare") == results(whole)


def test_trials_differ_from_each_other_and_from_the_start(whole: Path) -> None:
    records = results(whole)
    assert len({record["rank"] for record in records}) == len(records)


def test_a_policy_whose_run_collapsed_is_never_recommended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune.short_run

    def collapsing(config: RunConfig, *arguments: Any, **options: Any) -> loop.Ending:
        ending = real(config, *arguments, **options)
        bad = config.heavy == "jigsaw(2)" and config.graph == "dssl"
        return replace(ending, verdict=Verdict("collapsed", 1, reason="one point")) if bad else ending

    monkeypatch.setattr(tune, "short_run", collapsing)
    result = search(tmp_path / "run", policies=("jigsaw(2)",))
    assert result.best is None
    assert result.trials[0].verdict == "collapsed"
    both = replace(result, trials=(*result.trials, trial("jigsaw(4)", 0.0)))
    assert both.best is not None
    assert both.best.policy == "jigsaw(4)"
    assert both.ranked[-1].policy == "jigsaw(2)"
    page = report.html(both, line="dssl train", command="dssl tune")
    assert "one point" in page
    assert ">collapsed<" in page


@pytest.mark.parametrize("verdict", ["collapsed", "diverged"])
def test_a_start_that_broke_down_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Status) -> None:
    real = tune.short_run

    def breaking(*arguments: Any, **options: Any) -> loop.Ending:
        ending = real(*arguments, **options)
        return replace(ending, verdict=Verdict(verdict, 1)) if options["run"].folder is not None else ending

    monkeypatch.setattr(tune, "short_run", breaking)
    with pytest.raises(DsslError, match=verdict):
        search(tmp_path / "run")


def test_what_cannot_be_searched_is_refused(whole: Path, tmp_path: Path) -> None:
    config = configuration(ARGUMENTS)
    # small crops count as heavy elsewhere, but the policy to be chosen would be used nowhere
    for graph in ("standard2", "s1<->s2, l1->s1, l1 = crop(0.05,0.3)@16(image)"):
        with pytest.raises(DsslError, match=re.escape(graph)):
            tune.tune(replace(config, graph=graph), tmp_path / "a", minutes=1)
    with pytest.raises(DsslError, match=r"160.*128"):
        tune.tune(replace(config, batch_size=128), tmp_path / "b", minutes=1)
    with pytest.raises(DsslError, match="--steps is 3"):
        search(whole, steps=3)
    with pytest.raises(DsslError, match="seed: 0 -> 1"):
        tune.tune(replace(config, seed=1), whole, minutes=1)
    with pytest.raises(DsslError, match="--out"):
        tune.tune(replace(config, data=str(tmp_path)), tmp_path / "c", minutes=1)
    assert main(["tune", "shapes:60", "--minutes", "0"]) == 2
    assert main(["tune", "shapes:60", "--policies", "none"]) == 2
    assert main(["tune", "shapes:60", "--policies", "ra(2", "--out", str(tmp_path / "d")]) == 2
    assert not list(tmp_path.rglob("*.json*"))


# -- the page and the line to copy


def test_the_page_the_file_and_the_terminal_tell_of_every_policy(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--out", str(whole)]) == 0  # nothing is left to try: it only writes them again
    said = capsys.readouterr().out
    plain = json.loads((whole / "tune.json").read_text())
    page = (whole / "tune.html").read_text()
    assert plain["command"] in said
    for policy in TRIED[1:]:
        assert policy in said
        assert f"<code>{policy}</code>" in page
        assert page.count(f'alt="{policy} of ') == report.SHOWN
    assert "no heavy views" in page
    ranked = sorted(results(whole)[1:], key=lambda entry: -entry["retrieval"])
    assert [entry["policy"] for entry in plain["trials"]] == [entry["policy"] for entry in ranked]
    assert plain["best"] == next(entry["policy"] for entry in plain["trials"] if entry["policy"] != NONE)


def test_a_damaged_line_of_trials_and_a_lost_start_are_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "trials.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for content, problem in (
        ([*lines, '{"policy": "ua"}\n'], "is damaged .*name another"),
        (lines[1:], "the start of all"),
    ):
        file.write_text("".join(content))
        with pytest.raises(DsslError, match=rf"trials\.jsonl .*{problem}"):
            search(tmp_path / "run")


def test_the_printed_line_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = train_line(replace(ARGUMENTS, source="shapes:16"), TRIED[2])
    words = shlex.split(line)
    assert words[:3] == ["dssl", "train", "shapes"]
    assert main([*words[1:], "--epochs", "1", "--precision", "fp32", "--knn-every", "0"]) == 0
    config = json.loads((tmp_path / "runs/shapes/config.json").read_text())["config"]
    assert {"heavy": TRIED[2], "graph": "dssl", "encoder": "small", "batch_size": 16}.items() <= config.items()
    assert config["method"]["name"] == "simclr"


def test_the_line_for_a_folder_is_its_recipe_with_what_was_asked(tmp_path: Path) -> None:
    asked = Arguments(source="my photos", image_size=64, rate=0.1, channels=1, seed=3, graph="soft(0.1)", limit=900)
    line = train_line(asked, "ra(1,9,monotone14)")
    file = tmp_path / "config.json"
    assert main([*shlex.split(line)[1:], "--write-config", str(file)]) == 0
    config = json.loads(file.read_text())
    expected = {"data": "my photos", "image_size": 64, "channels": 1, "seed": 3, "graph": "soft(0.1)", "limit": 900}
    assert expected.items() <= config.items()
    assert config["heavy"] == "ra(1,9,monotone14)"
    assert config["optimizer"]["rate"] == 0.1


def test_every_method_has_a_configuration() -> None:
    for method in ("simclr", "simsiam", "byol", "vicreg", "barlowtwins"):
        assert configuration(replace(ARGUMENTS, method=method)).encoder == "small"
    assert asdict(configuration(Arguments(source="x")))["method"]["temperature"] == 0.2


def test_a_policy_given_twice_is_tried_once_and_minutes_are_a_number(tmp_path: Path) -> None:
    said: list[str] = []
    result = search(tmp_path / "run", policies=("jigsaw(2)", "jigsaw(2)"), say=said.append)
    assert (len(result.trials), result.wanted) == (1, 1)
    assert any(line.startswith("trial 1 of 1: ") for line in said)
    assert not any("fit into the minutes" in note for note in report.notes(result))
    with pytest.raises(DsslError, match="--minutes is inf"):
        tune.tune(configuration(ARGUMENTS), tmp_path / "b", minutes=math.inf)


# -- what a search is answered with

RESULT = Search(
    config=configuration(ARGUMENTS), plan=Plan(start=2, steps=2), start=trial("", 0.3), trials=(), wanted=3, images=40,
    judges=open_source("shapes:20"),
)  # fmt: skip


def test_policies_that_the_score_does_not_tell_apart_are_named() -> None:
    trials = (trial("jigsaw(4)", 0.5), trial("ra(2,5)", 0.48), trial("ua", 0.4), trial("ta", 0.49, verdict="collapsed"))
    result = replace(RESULT, trials=(*trials, trial(NONE, 0.499)))
    assert [other.policy for other in result.as_good] == ["ra(2,5)"]  # 2 points apart, each with an error of 1
    answer = report.answer(result)
    assert answer.startswith("The best heavy policy is jigsaw(4): 50.0 ± 1.0. ")
    assert "different: ra(2,5). " in answer
    assert answer.endswith("49.9 ± 1.0, not significantly different.")
    beside = {line.split("  ")[0]: line for line in report.summary(result, line=None).splitlines()[:6]}
    assert "  best  " in beside["jigsaw(4)"]
    assert "  not significantly different  " in beside["ra(2,5)"]
    assert "  below  " in beside["ua"]
    assert beside["ta"].split() == ["ta", "49.0", "±", "1.0", "40", "%", "9.0", "collapsed", "10"]
    page = report.html(result, line="dssl train", command="dssl tune")
    assert page.count(">not significantly different<") == 2  # ra(2,5) and no heavy views
    assert "every trial collapsed" in report.answer(replace(result, trials=trials[3:]))


def test_the_answer_says_when_the_score_decides_nothing_and_when_it_does() -> None:
    alike = replace(RESULT, trials=(trial("ua", 0.5), trial("ta", 0.49), trial("jigsaw(4)", 0.475)))
    assert "different: ta, jigsaw(4). " in report.answer(alike)
    apart = (trial("ua", 0.5), trial("ta", 0.4), trial("jigsaw(4)", 0.3))
    for control, end in ((0.6, "60.0 ± 1.0, above."), (0.4, "40.0 ± 1.0, below.")):
        text = report.answer(replace(RESULT, trials=(*apart, trial(NONE, control))))
        assert "different" not in text
        assert text.endswith(end)
    assert report.answer(replace(RESULT, trials=apart[:1])).endswith("ua: 50.0 ± 1.0.")


def test_the_last_lines_are_the_policy_and_the_command_that_trains_with_it() -> None:
    tried = (trial("ua", 0.5), trial("ta", 0.4), trial(NONE, 0.6))
    assert report.summary(replace(RESULT, trials=tried), line="dssl train").splitlines()[-2:] == [
        "recommended: ua",
        "dssl train",
    ]
    alone = replace(RESULT, trials=(tried[0], tried[2]))
    assert (alone.only, "only" in report.answer(alone)) == (True, True)
    assert "only" in report.summary(alone, line="dssl train").splitlines()[-2]
    # one of two is left: the other was tried, and collapsed
    left = replace(RESULT, trials=(tried[0], trial("ta", 0.4, verdict="collapsed")))
    assert (left.only, "only" in report.answer(left)) == (False, False)


@pytest.mark.parametrize("source", ["shapes", "figures:200", "cifar10:x", "my photos"])
def test_the_standard_policy_is_that_of_training(source: str, tmp_path: Path) -> None:
    for size in (32, 96):
        asked = Arguments(source=source, image_size=size, out=tmp_path)
        file = tmp_path / f"{size}.json"
        assert main([*shlex.split(train_line(asked, "ua"))[1:], "--write-config", str(file)]) == 0
        assert configuration(asked).standard == json.loads(file.read_text())["standard"]


def test_a_search_of_an_earlier_version_keeps_its_standard_policy(tmp_path: Path) -> None:
    kept = {"config": {"standard": "crop(0.5,1)"}}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert configuration(replace(ARGUMENTS, out=tmp_path)).standard == "crop(0.5,1)"
    assert configuration(replace(ARGUMENTS, out=tmp_path, standard="standard")).standard == "standard"


def test_minutes_that_allowed_no_heavy_policy_are_answered_with_a_number() -> None:
    none = trial(NONE, 0.5, seconds=100)
    result = replace(RESULT, start=trial("", 0.3, seconds=250), trials=(none,))
    assert result.minutes_for_more == 13  # 250 s and 4 trials of 100 s are 90 % of it
    assert affordable(13, 250 + 100, [none]) == 4
    assert report.answer(result) == (
        "No heavy policy was tried: a trial takes 2 minutes here, and the minutes are over. "
        "Rerun the command with --minutes 13: the search resumes."
    )
