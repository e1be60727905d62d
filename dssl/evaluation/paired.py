"""Two sets of predictions of the same images, compared image by image: which is better, by how much, and where."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl import rng
from dssl.errors import DsslError

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 6
"""Images that must change sides before a difference can be shown: five tosses of a coin fall on one side in 6 % of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassChange:
    """What changed for the images of one class; counts are summed over the draws of labels."""

    name: str
    images: int
    before: float
    """Accuracy in percent."""
    after: float
    won: int
    """Wrong before, right after."""
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """After minus before, on the same images."""

    images: int
    draws: int
    """Predictions per image: more than one where the labels that a probe learns from were drawn several times."""
    before: float
    """Accuracy in percent, the mean over draws."""
    after: float
    interval: tuple[float, float]
    """95 % interval of the difference in points, from resampling the images; (0, 0) where no image changed sides."""
    p_value: float | None
    """McNemar's exact test, two-sided; None with several draws, which are not independent."""
    won: int
    lost: int
    classes: tuple[ClassChange, ...]
    won_rows: tuple[int, ...]
    """Images that more draws got right after than before, the largest gain first."""
    lost_rows: tuple[int, ...]

    @property
    def difference(self) -> float:
        """In points."""
        return self.after - self.before

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` where neither the interval nor McNemar's test allows for zero, else ``no difference shown``."""
        low, high = self.interval
        # resampled, a few images that changed the same way exclude zero, which proves nothing yet
        changed = len(self.won_rows) + len(self.lost_rows)
        if changed < FEWEST or (self.p_value is not None and self.p_value >= 1 - LEVEL):
            return "no difference shown"
        return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def mcnemar(won: int, lost: int) -> float:
    """The two-sided exact p-value: how often a fair coin, tossed once per image that changed, is at least this uneven."""
    if won < 0 or lost < 0:
        raise DsslError(f"{won} won and {lost} lost: expected counts of images, 0 or more")
    changed, fewer = won + lost, min(won, lost)
    if won == lost:
        return 1.0
    # in logarithms: the binomial coefficients of a few thousand images exceed any float
    logs = [
        math.lgamma(changed + 1) - math.lgamma(heads + 1) - math.lgamma(changed - heads + 1)
        for heads in range(fewer + 1)
    ]
    largest = logs[-1]
    tail = largest + math.log(math.fsum(math.exp(value - largest) for value in logs)) - changed * math.log(2)
    return min(1.0, 2 * math.exp(tail))


def bootstrap_interval(
    differences: NDArray[np.float64], *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 % percentile interval of the mean when the images are drawn again, with replacement."""
    if differences.ndim != 1 or len(differences) == 0:
        raise DsslError(f"differences of shape {differences.shape}: expected one number for each of at least one image")
    # images with the same difference are interchangeable, so how many of each value are drawn is multinomial: exact, and
    # the cost does not grow with the images
    values, counts = np.unique(differences, return_counts=True)
    generator = np.random.Generator(np.random.Philox(rng.key(seed, "paired", "bootstrap")))
    drawn = generator.multinomial(len(differences), counts / len(differences), size=resamples)
    low, high = np.quantile(drawn @ values / len(differences), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def compare(
    labels: NDArray[np.int64],
    *,
    before: NDArray[np.int64],
    after: NDArray[np.int64],
    classes: tuple[str, ...],
    seed: int = 0,
) -> Comparison:
    """Compare predictions of the same images, one row for each draw of labels (or none: one prediction per image).

    With several draws an image counts with the mean over them: the interval is about other images, not about other draws.
    """
    labels = np.asarray(labels)
    was_right = _right(labels, before, name="before")
    is_right = _right(labels, after, name="after")
    if was_right.shape != is_right.shape:
        raise DsslError(f"{len(was_right)} draws before and {len(is_right)} after: expected the same draws in both")
    change = is_right.astype(np.int64) - was_right.astype(np.int64)
    draws, images = change.shape
    won, lost = int((change > 0).sum()), int((change < 0).sum())
    low, high = bootstrap_interval(change.sum(axis=0) / draws, seed=seed)
    return Comparison(
        images=images,
        draws=draws,
        before=_percent(was_right),
        after=_percent(is_right),
        interval=(100 * low, 100 * high),
        p_value=mcnemar(won, lost) if draws == 1 else None,
        won=won,
        lost=lost,
        classes=tuple(
            _class_change(name, was_right[:, labels == number], is_right[:, labels == number])
            for number, name in enumerate(classes)
            if (labels == number).any()
        ),
        won_rows=_largest(change.sum(axis=0)),
        lost_rows=_largest(-change.sum(axis=0)),
    )


def _right(labels: NDArray[np.int64], predicted: NDArray[Any], *, name: str) -> NDArray[np.bool_]:
    rows = np.atleast_2d(np.asarray(predicted))
    if labels.ndim != 1 or len(labels) == 0 or rows.ndim != 2 or rows.shape[1] != len(labels) or len(rows) == 0:
        raise DsslError(
            f"predictions {name} of shape {np.shape(predicted)} for labels of shape {labels.shape}: expected one for each image"
        )
    right: NDArray[np.bool_] = rows == labels
    return right


def _percent(right: NDArray[np.bool_]) -> float:
    return 100 * int(right.sum()) / right.size


def _class_change(name: str, was_right: NDArray[np.bool_], is_right: NDArray[np.bool_]) -> ClassChange:
    return ClassChange(
        name=name,
        images=was_right.shape[1],
        before=_percent(was_right),
        after=_percent(is_right),
        won=int((is_right & ~was_right).sum()),
        lost=int((was_right & ~is_right).sum()),
    )


def _largest(gains: NDArray[np.int64]) -> tuple[int, ...]:
    """Rows with a gain above zero, the largest first, ties in their order."""
    order = np.argsort(-gains, kind="stable")
    return tuple(int(row) for row in order if gains[row] > 0)
