"""The demo: three runs on built-in images that show in minutes what directions in the loss are good for.

All of its settings are in ``settings``; they were chosen so that the three runs take about four minutes on two idle cores.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dssl.config import RunConfig
from dssl.recipes import recipe
from dssl.report.run_data import RunData

IMAGES, EPOCHS = 5_000, 10
HEAVY = "ra(2,5)"
RUNS: dict[str, str] = {"standard pair": "standard", "heavy pair": "heavy", "DSSL": "dssl"}
"""From the name of a run to its view graph."""
_BROKEN = ("collapsed", "partial collapse", "diverged")


def settings(graph: str, *, seed: int = 0) -> RunConfig:
    """The configuration of one of the three runs; they differ in the graph alone."""
    return dataclasses.replace(
        recipe("shapes", method="simsiam"),
        data=f"shapes:{IMAGES}",
        graph=graph,
        heavy=HEAVY,
        epochs=EPOCHS,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What came out of one run."""

    verdict: str
    spread: float | None
    knn: float | None
    images: int
    """Test images that the kNN accuracy is of."""

    @property
    def broken(self) -> bool:
        return self.verdict in _BROKEN

    @classmethod
    def of(cls, run: RunData) -> "Ended":
        return cls(verdict=run.opinion.verdict, spread=run.spread, knn=run.knn, images=run.knn_images or 0)


def sentences(ended: Mapping[str, Ended]) -> list[str]:
    """Three sentences about what one sees; each says what came out, whether it is what the paper leads one to expect or not."""
    standard, heavy, dssl = (ended[name] for name in RUNS)
    if any(one.verdict == "too early" for one in ended.values()):
        spreads = ", ".join(f"{name} {_state(one)}" for name, one in ended.items())
        return [
            "The runs were too short for a verdict on each of them.",
            f"At their end: {spreads}.",
            _third(standard, heavy, dssl),
        ]
    return [_first(standard, heavy), _second(dssl, heavy), _third(standard, heavy, dssl)]


def _first(standard: Ended, heavy: Ended) -> str:
    if heavy.broken and not standard.broken:
        return (
            f"Pulling heavy views towards each other broke the heavy pair ({_state(heavy)}), while the same network with the "
            f"standard pair is fine ({_state(standard)})."
        )
    if heavy.broken:
        return (
            f"The heavy pair broke ({_state(heavy)}), but so did the standard pair ({_state(standard)}): "
            "this run does not show that the heavy views are to blame."
        )
    return (
        f"The heavy pair did not break in this run ({_state(heavy)}; standard pair: {_state(standard)}), "
        "unlike what the paper reports."
    )


def _second(dssl: Ended, heavy: Ended) -> str:
    if not dssl.broken and heavy.broken:
        return (
            f"DSSL learns from the same heavy views and is {_state(dssl)}: "
            "they are pulled towards their standard views and never pull."
        )
    if not dssl.broken:
        return f"DSSL, which lets heavy views be pulled and never pull, is {_state(dssl)} as well: here it had nothing to cure."
    return f"DSSL broke too in this run ({_state(dssl)}), which is not what the paper leads one to expect."


def _third(standard: Ended, heavy: Ended, dssl: Ended) -> str:
    if standard.knn is None or heavy.knn is None or dssl.knn is None:
        return "The kNN accuracy was not measured for all three."
    gain, chance = dssl.knn - standard.knn, _chance(dssl, standard)
    if abs(gain) <= chance:
        compared = (
            f"level with the standard pair ({standard.knn:.1f} %; chance alone moves the difference by up to "
            f"{chance:.1f} points)"
        )
    else:
        compared = f"{abs(gain):.1f} points {'above' if gain > 0 else 'below'} the standard pair ({standard.knn:.1f} %)"
    lead, least = dssl.knn - heavy.knn, _chance(dssl, heavy)
    if abs(lead) <= least:
        other = f"level with the heavy pair ({heavy.knn:.1f} %)"
    else:
        other = f"{abs(lead):.1f} points {'above' if lead > 0 else 'below'} the heavy pair ({heavy.knn:.1f} %)"
    return f"In kNN accuracy DSSL has {dssl.knn:.1f} %: {compared}, and {other}."


def _state(ended: Ended) -> str:
    return ended.verdict if ended.spread is None else f"{ended.verdict}, spread {ended.spread:.2f}"


def _chance(first: Ended, second: Ended) -> float:
    """Half of the 95 % interval of the difference of two accuracies, as if they were of different test images: cautious."""
    total = 0.0
    for one in (first, second):
        share = (one.knn or 0.0) / 100
        total += share * (1 - share) / max(1, one.images)
    return 196 * math.sqrt(total)
