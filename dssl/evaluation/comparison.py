"""Encoders compared on the same images, image by image: is A better than B, by how much, and where?"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dssl import rng
from dssl.data import Source
from dssl.errors import DsslError, memory_for
from dssl.evaluation import Result, frozen
from dssl.evaluation.protocols import PROTOCOLS, Benchmark, supervised, untrained
from dssl.run import RunFolder
from dssl.weights.checkpoint import content_hash
from dssl.weights.encoder import Encoder, FeatureStore, Origin
from dssl.weights.load import HUB_PREFIX, WORD, imagenet_normalization, is_imagenet, load_imagenet, open_weights

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 6
"""Images that must change sides before a difference can be shown: five tosses of a coin fall on one side in 6% of cases."""
SUPERVISED = "supervised"
WORDS = {
    WORD: "the ImageNet weights of the same encoder",
    "start": "the weights that the run started from",
    "untrained": "the same encoder with random weights",
    SUPERVISED: "the same encoder trained with the labels from scratch",
}
"""What may stand for an encoder to compare with."""
DRAWS = {"probe-1": 20, "probe-10": 10}
"""How often a part of the labels is drawn: with a few labels one draw decides more than the encoder does."""


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
    """95% interval of the difference in points, from resampling the images; (0, 0) where no image changed sides."""
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
        if self.p_value is not None and self.p_value >= 1 - LEVEL:
            return "no difference shown"
        return paired_verdict(self.interval, changed=len(self.won_rows) + len(self.lost_rows))


def paired_verdict(interval: tuple[float, float], *, changed: int) -> str:
    """``better`` or ``worse`` where the interval of a difference excludes zero and enough images have ``changed``."""
    low, high = interval
    # resampled, a few images that changed the same way exclude zero, which proves nothing yet
    if changed < FEWEST or low <= 0 <= high:
        return "no difference shown"
    return "better" if low > 0 else "worse"


def mcnemar(won: int, lost: int) -> float:
    """The two-sided exact p-value: how often a fair coin, tossed once per image that changed, is at least this uneven."""
    heads = torch.arange(min(won, lost) + 1, dtype=torch.float64)
    tails = won + lost - heads
    # in logarithms: the binomial coefficients of a few thousand images exceed any float
    ways = math.lgamma(won + lost + 1) - torch.lgamma(heads + 1) - torch.lgamma(tails + 1)
    return min(1.0, 2 * math.exp(float(ways.logsumexp(0)) - (won + lost) * math.log(2)))


def percentile_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """What 95% of the values lie between."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap_interval(differences: NDArray[np.float64], *, seed: int) -> tuple[float, float]:
    """The 95% percentile interval of the mean when the images are drawn again, with replacement."""
    # images with the same difference are interchangeable, so how many of each value are drawn is multinomial: exact, and
    # the cost does not grow with the images
    values, counts = np.unique(differences, return_counts=True)
    generator = np.random.Generator(np.random.Philox(rng.key(seed, "paired", "bootstrap")))
    drawn = generator.multinomial(len(differences), counts / len(differences), size=RESAMPLES)
    return percentile_interval(drawn @ values / len(differences))


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
    was_right, is_right = (np.atleast_2d(predicted) == labels for predicted in (before, after))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One protocol on both encoders."""

    name: str
    comparison: Comparison
    before: NDArray[np.int64]
    """What B said of every test image, by draw."""
    after: NDArray[np.int64]
    protocol: dict[str, Any]
    """Of A."""
    other_protocol: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A compared with one B."""

    name: str
    """What B was called."""
    weights: str
    """What is known of B's weights, in a line."""
    rows: tuple[Row, ...]

    def plain(self, test: Source) -> dict[str, Any]:
        """As JSON holds it, with the names of the images that changed sides."""
        return {
            "against": self.name,
            "weights": self.weights,
            "protocols": [
                {
                    "name": row.name,
                    **dataclasses.asdict(row.comparison),
                    "difference": row.comparison.difference,
                    "verdict": row.comparison.verdict,
                    "won_images": [test.label_of(index) for index in row.comparison.won_rows],
                    "lost_images": [test.label_of(index) for index in row.comparison.lost_rows],
                    "protocol": row.protocol,
                    "other_protocol": row.other_protocol,
                }
                for row in self.rows
            ],
        }


def open_other(word: str, like: Encoder, *, seed: int, image_size: int | None = None) -> Encoder | None:
    """The encoder that a word or a path names; None for training from scratch, which has none yet.

    A word stands for weights that are run as A is. A run or a file is run at its own size unless another ``image_size`` is
    asked for; ``FILE@NAME`` says which encoder a file holds that does not say it.
    """
    path, name = Path(word), None
    if not path.exists() and "@" in word:
        place, _, name = word.rpartition("@")
        path = Path(place)
    if is_imagenet(path):
        return _imagenet(like, seed=seed)
    meaning = "a path" if path.exists() else word
    if meaning == SUPERVISED:
        return None
    if meaning == "untrained":
        return untrained(like, seed=seed, purpose=word)
    if meaning == "start":
        run = Path(like.place)
        starts = [RunFolder(folder).start_file for folder in (run, run.parent.parent)]
        if not any(start.is_file() for start in starts):
            raise DsslError(f"--against start: {run} is not a run that started from weights; name them, or imagenet")
        other = open_weights(next(start for start in starts if start.is_file()), image_size=like.image_size)
    elif path.exists() or word.startswith(HUB_PREFIX):
        other = open_weights(path, encoder=name, image_size=image_size, fallback=like)
    else:
        raise DsslError(f"--against {word}: not a file or folder, and not one of {', '.join(WORDS)}")
    return dataclasses.replace(
        like, network=other.network.to(like.device), name=other.name, image_size=other.image_size,
        channels=other.channels, normalization=other.normalization, value_range=other.value_range, origin=other.origin,
    )  # fmt: skip


def _imagenet(like: Encoder, *, seed: int) -> Encoder:
    other = untrained(like, seed=seed, purpose=WORD)
    report = load_imagenet(other.network, like.name, image_size=like.image_size, channels=like.channels)
    normalization = like.normalization
    if like.channels in (1, 3):  # of another number of channels nothing is known
        normalization = imagenet_normalization(like.name, channels=like.channels)
    origin = Origin(path=Path(WORD), sha256=content_hash(WORD, other.network.state_dict()), report=report)
    return dataclasses.replace(other, normalization=normalization, origin=origin)


def evaluate_against(
    benchmark: Benchmark,
    others: Sequence[tuple[str, Encoder | None]],
    protocols: Sequence[str],
    *,
    reopen: Callable[[Encoder], tuple[Source, Source]],
    say: Callable[[str], None] = lambda _: None,
) -> list[Against]:
    """Run every protocol on A, and on each B with the same labels, the same seed and the same budget.

    ``reopen`` gives both splits as a B reads them whose channels or range of values are not A's.
    """
    draws = {name: 1 if any(other is None for _, other in others) else DRAWS.get(name, 1) for name in protocols}
    needed = f"image_size {benchmark.encoder.image_size} and {len(benchmark.train):,} training images"
    comparisons = []
    with memory_for(needed, "take a smaller image size or fewer images"):
        ours = {name: _results(benchmark, name, draws[name], say) for name in protocols}
        for word, other in others:
            say(f"against {word}")
            if other is None:
                shares = {name: float(ours[name][0].protocol.get("labels_share", 1.0)) for name in protocols}
                by_share = {share: supervised(benchmark, share) for share in sorted(set(shares.values()))}
                theirs = {name: by_share[share] for name, share in shares.items()}
                weights = next(iter(theirs.values()))[0].name
            else:
                same = as_read_by(other, benchmark, reopen)
                theirs = {name: _results(same, name, draws[name], say) for name in protocols}
                weights = other.report
            rows = tuple(_row(benchmark, ours[name], theirs[name]) for name in protocols)
            comparisons.append(Against(name=word, weights=weights, rows=rows))
    benchmark.forget_trainings()
    return comparisons


def as_read_by(other: Encoder, benchmark: Benchmark, reopen: Callable[[Encoder], tuple[Source, Source]]) -> Benchmark:
    """The benchmark of B, with the images as it was trained on them: scaled from its range, with its channels."""
    own, train, test = benchmark.encoder, benchmark.train, benchmark.test
    if (other.channels, other.value_range) != (own.channels, own.value_range):
        train, test = reopen(other)
        if (train.fingerprint, test.fingerprint) != (benchmark.train.fingerprint, benchmark.test.fingerprint):
            raise DsslError(
                f"{other.place} and {own.place} read different files of {test.name}: they cannot be compared"
            )
    return dataclasses.replace(
        benchmark, store=FeatureStore(other, folder=benchmark.store.folder), train=train, test=test
    )


def _results(benchmark: Benchmark, name: str, draws: int, say: Callable[[str], None]) -> list[Result]:
    """One result for each draw of labels; of kNN the first."""
    say(f"{name}: {benchmark.encoder.place}")
    with frozen(benchmark.encoder.network):
        return [PROTOCOLS[name](dataclasses.replace(benchmark, seed=benchmark.seed + draw))[0] for draw in range(draws)]


def _row(benchmark: Benchmark, ours: Sequence[Result], theirs: Sequence[Result]) -> Row:
    after, before = (
        np.stack([result.predicted.numpy() for result in results if result.predicted is not None])
        for results in (ours, theirs)
    )
    comparison = compare(
        benchmark.test_labels, before=before, after=after, classes=benchmark.classes, seed=benchmark.seed
    )
    return Row(
        name=ours[0].name, comparison=comparison, before=before, after=after, protocol=ours[0].protocol,
        other_protocol=theirs[0].protocol,
    )  # fmt: skip
