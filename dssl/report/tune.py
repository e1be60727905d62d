"""The page of ``dssl tune``: every policy with its views, score and verdict, and the command to train with the best."""

from collections.abc import Mapping

from dssl.report import page
from dssl.report.page import Colour, percent
from dssl.report.views import FLAT_WARN, gallery, survey
from dssl.state import Status
from dssl.text import columns, duration
from dssl.training.tune import NONE, REFERENCE, Search, Trial

SHOWN, SAMPLE = 6, 200
"""Images whose views are shown, and on which blank views are counted."""
_SIDE = 80
"""Pixels of a thumbnail."""
_COLOURS: Mapping[Status, Colour] = {
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
    rows = gallery(seen, side=_SIDE)
    strengths = {policy.policy: (policy, row[-1]) for policy, row in zip(seen.policies, rows[2:], strict=True)}
    blank = [
        f"{policy.policy} leaves {percent(policy.flat)} of the views blank."
        for policy in seen.policies
        if search.best is not None and policy.policy == search.best.policy and policy.flat >= FLAT_WARN
    ]
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
        "notes": [*notes(search), *blank],
        "start": _score(search.start),
        "rows": [
            (trial, _score(trial), _beside(trial, search), *strengths.get(trial.policy, (None, [])))
            for trial in search.ranked
        ],
        "control": NONE,
        "colours": _COLOURS,
        "examples": rows[:2],
        "sample": seen.measured,
        "reference": REFERENCE,
        "command": command,
    }
    return page.render("tune.html", title=f"Heavy policies for {config.data}", context=context)


def answer(search: Search) -> str:
    """The result in a sentence or two."""
    best, control = search.best, search.control
    if best is None and control is not None and search.trials == (control,):
        return (
            f"No heavy policy was tried: a trial takes {duration(control.seconds)} here, and the minutes are over. "
            f"Rerun the command with --minutes {search.minutes_for_more}: the search resumes."
        )
    if best is None:
        return "No heavy policy can be recommended: every trial collapsed or diverged."
    which = "only heavy policy tried" if search.only else "best heavy policy"
    text = f"The {which} is {best.policy}: {_score(best)}."
    if search.as_good:
        names = ", ".join(trial.policy for trial in search.as_good)
        text += f" Not significantly different: {names}. Choose by their views, the milder one if in doubt."
    if control is not None:
        text += (
            f" Two standard pairs, equal compute without heavy views: {_score(control)}, {_beside(control, search)}."
        )
    return text


def notes(search: Search) -> list[str]:
    """What to know before relying on the result."""
    texts = []
    if len(search.trials) < search.wanted:
        count = f"{len(search.trials)} of {search.wanted} trials"
        texts.append(f"{count} fit into the minutes; rerun the command with more --minutes to add trials.")
    if bad := [trial.policy for trial in search.trials if not trial.healthy]:
        texts.append(f"Not recommended whatever their score, because the run was not healthy: {', '.join(bad)}.")
    return texts


def summary(search: Search, *, line: str | None) -> str:
    """The page's numbers for a terminal."""
    rows = [("policy", "score", "beside the best", "rotation", "rank", "verdict", "seconds")]
    for trial in search.ranked:
        numbers = (percent(trial.rotation), f"{trial.rank:.1f}", trial.verdict, f"{trial.seconds:.0f}")
        rows.append((trial.policy, _score(trial), _beside(trial, search), *numbers))
    lines = [*columns(rows, align="<><>><>"), "", answer(search), *notes(search)]
    if search.best is not None and line is not None:
        lines += ["", f"recommended: {search.best.policy}{', the only one tried' if search.only else ''}", line]
    return "\n".join(lines)


def _beside(trial: Trial, search: Search) -> str:
    """How a policy stands beside the best one."""
    best = search.best
    if best is None or not trial.healthy:
        return ""
    if trial is best:
        return "best"
    return (
        "not significantly different"
        if not best.differs_from(trial)
        else "above"
        if trial.retrieval > best.retrieval
        else "below"
    )


def _score(trial: Trial) -> str:
    return f"{100 * trial.retrieval:.1f} ± {100 * trial.error:.1f}"
