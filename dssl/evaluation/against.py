"""Encoders compared on the same images, image by image: is A better than B, by how much, and where?"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dssl.data import Source
from dssl.errors import DsslError, memory_for
from dssl.evaluation.paired import Comparison, compare
from dssl.evaluation.protocols import PROTOCOLS, Task, supervised, untrained
from dssl.evaluation.result import Result, frozen
from dssl.evaluation.store import FeatureStore
from dssl.models.for_cpus import WhitenedEncoder
from dssl.run import RunFolder
from dssl.weights.checkpoint import content_hash
from dssl.weights.load import LoadedEncoder, open_weights
from dssl.weights.match import MatchReport
from dssl.weights.pretrained import WORD, is_imagenet, load_imagenet
from dssl.weights.published import imagenet_normalization

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


def open_other(word: str, like: LoadedEncoder, *, seed: int) -> LoadedEncoder | None:
    """The encoder that a word or a path names, at A's size of images; None for training from scratch, which has none yet."""
    path = Path(word)
    if word == SUPERVISED and not path.exists():
        return None
    if word == "start" and not path.exists():
        folder = next(
            (one for one in (like.path, like.path.parent.parent) if RunFolder(one).start_file.is_file()), None
        )
        if folder is None:
            raise DsslError(
                f"--against start: {like.path} is not a run that started from weights; name them, or imagenet"
            )
        return open_weights(RunFolder(folder).start_file, image_size=like.image_size)
    if is_imagenet(path) or (word == "untrained" and not path.exists()):
        return _made(word, like, seed=seed)
    if not path.exists():
        raise DsslError(f"--against {word}: not a file or folder, and not one of {', '.join(WORDS)}")
    return open_weights(path, image_size=like.image_size, fallback=like)


def _made(word: str, like: LoadedEncoder, *, seed: int) -> LoadedEncoder:
    encoder = untrained(like, seed=seed, purpose="untrained")
    note = f"random weights of seed {seed}"
    if isinstance(encoder, WhitenedEncoder):
        note += ", the filters of its first layer as in the other"
    normalization = like.normalization
    if word == WORD:
        note = load_imagenet(encoder, like.name, image_size=like.image_size, channels=like.channels)
        # of another number of channels nothing is known
        normalization = (
            imagenet_normalization(like.name, channels=like.channels) if like.channels in (1, 3) else normalization
        )
    count = len(encoder.state_dict())
    return dataclasses.replace(
        like,
        encoder=encoder.eval(),
        normalization=normalization,
        path=Path(word),
        sha256=content_hash(word, encoder.state_dict()),
        report=MatchReport(path=Path(word), prefix="", names=note, loaded=count, total=count, ignored=()),
        header={},
    )


def evaluate_against(
    task: Task,
    others: Sequence[tuple[str, LoadedEncoder | None]],
    protocols: Sequence[str],
    *,
    reopen: Callable[[LoadedEncoder], tuple[Source, Source]] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Against]:
    """Run every protocol on A, and on each B with the same labels, the same seed and the same budget.

    ``reopen`` gives both splits as a B reads them whose channels or range of values are not A's.
    """
    told = say or (lambda _: None)
    draws = {name: 1 if any(other is None for _, other in others) else DRAWS.get(name, 1) for name in protocols}
    needed = f"image_size {task.loaded.image_size} and {len(task.train):,} training images"
    found = []
    with memory_for(needed, "take a smaller image size or fewer images"):
        ours = {name: _predictions(task, name, draws[name], told) for name in protocols}
        for word, other in others:
            told(f"against {word}")
            theirs = {}
            if other is None:
                shares = {name: float(ours[name][0].protocol.get("labels_share", 1.0)) for name in protocols}
                by_share = {share: supervised(task, share)[0] for share in sorted(set(shares.values()))}
                theirs = {name: [by_share[share]] for name, share in shares.items()}
                about = next(iter(theirs.values()))[0].name
            else:
                one = dataclasses.replace(_as_read_by(other, task, reopen), store=_store(task.store, other))
                theirs = {name: _predictions(one, name, draws[name], told) for name in protocols}
                about = other.report.text()
            rows = tuple(_row(task, ours[name], theirs[name]) for name in protocols)
            found.append(Against(name=word, weights=about, rows=rows))
    task.forget_trainings()
    return found


def _as_read_by(
    other: LoadedEncoder, task: Task, reopen: Callable[[LoadedEncoder], tuple[Source, Source]] | None
) -> Task:
    """The task with the images as this encoder was trained on them: scaled from its range, with its channels."""
    own = task.loaded
    if (other.channels, other.value_range) == (own.channels, own.value_range):
        return task
    if reopen is None:
        raise DsslError(
            f"{other.path} was trained on images of other channels or another range of values than {own.path}: "
            "give evaluate_against a reopen that opens both splits for it"
        )
    train, test = reopen(other)
    if (train.fingerprint, test.fingerprint) != (task.train.fingerprint, task.test.fingerprint):
        raise DsslError(
            f"{other.path} and {own.path} read different files of {task.test.name}: they cannot be compared"
        )
    return dataclasses.replace(task, train=train, test=test)


def _store(store: FeatureStore, loaded: LoadedEncoder) -> FeatureStore:
    device = next(store.loaded.encoder.parameters(), torch.zeros(())).device
    loaded.encoder.to(device)
    return FeatureStore(
        loaded, folder=store.folder, crop_ratio=store.crop_ratio, autocast=store.autocast, threads=store.threads,
        progress=store.progress,
    )  # fmt: skip


def _predictions(task: Task, name: str, draws: int, say: Callable[[str], None]) -> list[Result]:
    """One result for each draw of labels; of kNN the first."""
    say(f"{name}: {task.loaded.path}")
    with frozen(task.loaded.encoder):
        return [PROTOCOLS[name](dataclasses.replace(task, seed=task.seed + draw))[0] for draw in range(draws)]


def _row(task: Task, ours: Sequence[Result], theirs: Sequence[Result]) -> Row:
    after, before = (
        np.stack([one.predicted.numpy() for one in results if one.predicted is not None]) for results in (ours, theirs)
    )
    comparison = compare(task.test_labels, before=before, after=after, classes=task.classes, seed=task.seed)
    return Row(
        name=ours[0].name, comparison=comparison, before=before, after=after, protocol=ours[0].protocol,
        other_protocol=theirs[0].protocol,
    )  # fmt: skip
