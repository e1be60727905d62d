"""The page of ``dssl tune``: every policy that was tried with its views, score and verdict, and the command to train with the best."""

from collections.abc import Mapping

from dssl.report import page
from dssl.report.page import Colour, percent
from dssl.report.pictures import Picture
from dssl.report.survey import PolicyStrength, Survey, survey
from dssl.report.views import view_picture
from dssl.state import Verdict
from dssl.text import columns
from dssl.train.tune import NONE, Search, Trial

SHOWN, SAMPLE = 6, 200
"""Images whose views are shown, and on which blank views are counted."""
_SIDE = 80
"""Pixels of a thumbnail."""
EVIDENCE = "TODO"
_COLOURS: Mapping[Verdict, Colour] = {
    "healthy": "good", "too early": "neutral", "partial collapse": "bad", "collapsed": "bad", "diverged": "bad",
}  # fmt: skip


def html(search: Search, *, line: str | None, command: str) -> str:
    """The whole page; ``line`` trains with the best policy, ``command`` makes the page again."""
    config = search.config
    policies = [trial.policy for trial in search.ranked if trial.policy != NONE]
    seen = survey(
        search.judges, policies=policies, standard=config.standard, size=config.image_size, channels=config.channels,
        seed=config.seed, examples=SHOWN, sample=SAMPLE, measure_speed=False,
    )  # fmt: skip
    strength = {policy.policy: (number, policy) for number, policy in enumerate(seen.policies)}
    context = {
        "settings": [
            ("images", f"{search.images:,} trained on, {len(search.judges):,} judge"),
            ("encoder", f"{config.encoder}, {config.image_size} px"),
            ("graph", config.graph),
            ("steps", f"{search.plan.start} shared, {search.plan.steps} per policy"),
            ("time", f"{search.seconds / 60:.1f} minutes"),
            ("seed", str(config.seed)),
        ],
        "search": search,
        "answer": answer(search),
        "line": line,
        "notes": notes(search),
        "start": _score(search.start),
        "rows": [_row(trial, search, seen, strength.get(trial.policy)) for trial in search.ranked],
        "examples": [
            ("original", "the whole image", [view_picture(one.original, one.name, side=_SIDE) for one in seen.examples]),
            ("standard view", seen.standard, [view_picture(one.standard, f"standard view of {one.name}", side=_SIDE) for one in seen.examples]),
        ],
        "sample": seen.measured,
        "evidence": EVIDENCE,
        "command": command,
    }  # fmt: skip
    return page.render("tune.html", title=f"Heavy policies for {config.data}", context=context)


def answer(search: Search) -> str:
    """The result in a sentence."""
    best = search.best
    if best is None:
        return "No policy can be recommended: every trial collapsed or diverged."
    if best.policy == NONE:
        return "No heavy policy has a better score than two standard pairs, which cost the same."
    control = next((trial for trial in search.trials if trial.policy == NONE), None)
    against = "" if control is None else f", against {_score(control)} without heavy views"
    return f"{best.policy} has the best score: {_score(best)}{against}."


def notes(search: Search) -> list[str]:
    """What to know before relying on the result."""
    found = []
    if len(search.trials) < search.wanted:
        found.append(
            f"{len(search.trials)} of {search.wanted} trials fit into the minutes; rerun the command with more --minutes to add trials."
        )
    if bad := [trial.policy for trial in search.trials if not trial.healthy]:
        found.append(f"Not recommended whatever their score, because the run was not healthy: {', '.join(bad)}.")
    return found


def summary(search: Search, *, line: str | None) -> str:
    """The page's numbers for a terminal."""
    rows = [("policy", "score", "rotation", "rank", "verdict", "seconds")]
    for trial in search.ranked:
        numbers = (_score(trial), percent(trial.rotation), f"{trial.rank:.1f}")
        rows.append((trial.policy, *numbers, trial.verdict, f"{trial.seconds:.0f}"))
    lines = [*columns(rows, align="<>>><>"), "", answer(search), *notes(search)]
    return "\n".join(lines if line is None else [*lines, "", line])


def _row(trial: Trial, search: Search, seen: Survey, strength: tuple[int, PolicyStrength] | None) -> dict[str, object]:
    pictures: list[Picture] = []
    if strength is not None:
        pictures = [
            view_picture(one.heavy[strength[0]], f"{trial.policy} of {one.name}", side=_SIDE) for one in seen.examples
        ]
    return {
        "trial": trial,
        "control": trial.policy == NONE,
        "score": _score(trial),
        "rotation": percent(trial.rotation),
        "rank": f"{trial.rank:.1f}",
        "blank": "–" if strength is None else percent(strength[1].flat),
        "colour": _COLOURS.get(trial.verdict, "neutral"),
        "best": trial is search.best,
        "pictures": pictures,
    }


def _score(trial: Trial) -> str:
    return f"{100 * trial.score:.1f}"
