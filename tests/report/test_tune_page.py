"""What a search for a policy is answered with: in the terminal and on its page."""

from dataclasses import replace

from dssl.commands.tune import Arguments, configuration
from dssl.data import open_source
from dssl.report import tune as report
from dssl.training.tune import NONE, Plan, Search, affordable
from tests.train.searching import trial

FOUND = Search(
    config=configuration(Arguments(source="shapes:60", encoder="small")),
    plan=Plan(start=2, steps=2),
    start=trial("", 0.3),
    trials=(),
    wanted=3,
    images=40,
    judges=open_source("shapes:20"),
)


def test_policies_that_the_score_does_not_tell_apart_are_named() -> None:
    trials = (trial("jigsaw(4)", 0.5), trial("ra(2,5)", 0.48), trial("ua", 0.4), trial("ta", 0.49, verdict="collapsed"))
    told = replace(FOUND, trials=(*trials, trial(NONE, 0.499)))
    assert [one.policy for one in told.as_good] == ["ra(2,5)"]  # 2 points apart, each with an error of 1
    assert report.answer(told).startswith(
        "jigsaw(4) has the best score of the heavy policies: 50.0 ± 1.0. It cannot be told apart from 1 of the 2 others"
    )
    assert "have 49.9 ± 1.0: the score does not show that heavy views help here." in report.answer(told)
    beside = {line.split("  ")[0]: line for line in report.summary(told, line=None).splitlines()[:6]}
    assert "  best  " in beside["jigsaw(4)"]
    assert "  not told apart  " in beside["ra(2,5)"]
    assert "  below  " in beside["ua"]
    assert beside["ta"].split() == ["ta", "49.0", "±", "1.0", "40", "%", "9.0", "collapsed", "10"]
    page = report.html(told, line="dssl train", command="dssl tune")
    assert page.count(">not told apart<") == 2  # ra(2,5) and no heavy views
    assert "every trial collapsed" in report.answer(replace(told, trials=trials[3:]))


def test_the_answer_says_when_the_score_decides_nothing_and_when_it_does() -> None:
    alike = replace(FOUND, trials=(trial("ua", 0.5), trial("ta", 0.49), trial("jigsaw(4)", 0.475)))
    assert report.answer(alike).startswith(
        "The score cannot tell these 3 heavy policies apart: from the best, ua with 50.0 ± 1.0, to the lowest, jigsaw(4)"
    )
    apart = (trial("ua", 0.5), trial("ta", 0.4), trial("jigsaw(4)", 0.3))
    for control, end in ((0.6, "by this score heavy views do not help here."), (0.4, "below the best heavy policy.")):
        text = report.answer(replace(FOUND, trials=(*apart, trial(NONE, control))))
        assert "The 2 others are more than two standard errors below." in text
        assert text.endswith(end)
    assert "ua is the only heavy policy" in report.answer(replace(FOUND, trials=apart[:1]))


def test_minutes_that_allowed_no_heavy_policy_are_answered_with_a_number() -> None:
    none = trial(NONE, 0.5, seconds=100)
    found = replace(FOUND, start=trial("", 0.3, seconds=250), trials=(none,))
    assert found.minutes_for_more == 13  # 250 s and 4 trials of 100 s are 90 % of it
    assert affordable(13, found.start, [none]) == 4
    assert report.answer(found) == (
        "No heavy policy was tried: a trial takes 2 minutes here, and the minutes are over. "
        "Rerun the command with --minutes 13: the search resumes."
    )
