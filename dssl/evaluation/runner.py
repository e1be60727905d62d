"""One encoder, two splits, any number of protocols: `evaluate` runs them all and returns what was measured."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl.data import Source, require_labels
from dssl.errors import DsslError, memory_for
from dssl.evaluation.protocols import PROTOCOLS, Task
from dssl.evaluation.quality import Quality, quality
from dssl.evaluation.references import Reference, references_for
from dssl.evaluation.result import Result, frozen
from dssl.files import printable
from dssl.version import VERSION
from dssl.weights.card import evaluation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that was measured."""

    results: tuple[Result, ...]
    quality: Quality
    references: tuple[Reference, ...]
    notes: tuple[str, ...]
    checkpoint: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "dssl_version": VERSION,
            "checkpoint": self.checkpoint,
            "results": [result.plain() for result in self.results],
            "quality": dataclasses.asdict(self.quality),
            "references": [dataclasses.asdict(one) for one in self.references],
            "notes": list(self.notes),
        }


def aligned_labels(train: Source, test: Source) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Labels of both splits under the training split's classes; raises where that cannot be done."""
    train_labels, classes = require_labels(train)
    if test.labels is None or test.classes is None:
        raise DsslError(f"{test.name}: no labels: a test set needs a folder for each class, or a list with labels")
    if len(test) == 0:
        raise DsslError(f"{test.name}: the test set is empty")
    position = {name: number for number, name in enumerate(classes)}
    used = [test.classes[number] for number in np.unique(test.labels)]
    unknown = [name for name in used if name not in position]
    if unknown:
        shown = ", ".join(repr(name) for name in unknown[:3]) + (" and more" if len(unknown) > 3 else "")
        raise DsslError(
            f"the test set has {len(unknown)} of {len(used)} classes that the training set lacks ({shown}): "
            f"expected classes of {train.name}"
        )
    absent = [name for name in used if not (train_labels == position[name]).any()]
    if absent:
        raise DsslError(f"no training image has the class {absent[0]!r} of the test set: it cannot be learned")
    of_test = np.array([position.get(name, -1) for name in test.classes], np.int64)
    return train_labels, of_test[test.labels], classes


def evaluate(
    task: Task,
    protocols: Sequence[str],
    *,
    data: str = "",
    policy: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Run the protocols one after the other; the encoder is the same before and after each, or the number is refused.

    ``data`` (cifar10, imagenet) picks the published references, ``policy`` the views by which alignment is measured.
    """
    needed = (
        f"image_size {task.loaded.image_size}, the encoder {task.loaded.name} and {len(task.train):,} training images"
    )
    results: list[Result] = []
    with memory_for(needed, "use a smaller image size or fewer images"):
        for name in protocols:
            if say is not None:
                say(name)
            with frozen(task.loaded.encoder) as digest:
                found = PROTOCOLS[name](task)
            results += [_verified(result, digest) for result in found]
        with frozen(task.loaded.encoder):
            measured = quality(task, policy=policy)
    task.forget_trainings()
    kinds = {str(result.protocol["kind"]) for result in results}
    return Evaluation(
        results=tuple(results),
        quality=measured,
        references=tuple(references_for(data=data, kinds=kinds)),
        notes=tuple(_notes(task)),
        checkpoint=task.loaded.protocol(),
    )


def with_earlier(evaluation: Evaluation, task: Task, written: Path) -> tuple[Evaluation, Path | None]:
    """The evaluation, with what other protocols had measured before of the same weights, images and seed.

    A file about anything else is set aside; where it is now comes second.
    """
    if not written.exists():
        return evaluation, None
    here = {
        "train_fingerprint": task.train.fingerprint, "test_fingerprint": task.test.fingerprint, "seed": task.seed,
    }  # fmt: skip
    try:
        found = evaluation_of(task.loaded, written) or {"results": [{}]}
        earlier = [
            Result(name=one["name"], correct=one["correct"], total=one["total"], protocol=one["protocol"])
            for one in found["results"]
        ]
        same = all(one.protocol[name] == value for one in earlier for name, value in here.items())
    except (KeyError, TypeError):
        same = False
    if not same:
        aside = next(
            path
            for number in itertools.count(1)
            if not (path := written.with_stem(f"{written.stem}-{number}")).exists()
        )
        written.rename(aside)
        return evaluation, aside
    measured = {result.name for result in evaluation.results}
    kept = ", ".join(one.name for one in earlier if one.name not in measured)
    return dataclasses.replace(
        evaluation,
        results=tuple({one.name: one for one in (*earlier, *evaluation.results)}.values()),
        notes=(*evaluation.notes, f"measured earlier: {kept}") if kept else evaluation.notes,
    ), None


def _verified(result: Result, digest: str) -> Result:
    """The result with what the hashes have shown, if its protocol freezes the backbone."""
    if result.protocol["backbone"] != "frozen":
        return result
    about = {"backbone": "frozen: verified", "backbone_sha256": digest}
    return dataclasses.replace(result, protocol=result.protocol | about)


def _notes(task: Task) -> list[str]:
    """What a reader of the numbers should know."""
    notes = []
    if len(task.test) < 100:
        count = "only 1 image" if len(task.test) == 1 else f"only {len(task.test)} images"
        notes.append(f"the test set has {count}: check the width of the intervals before trusting any number")
    if len(np.unique(task.test_labels)) == 1:
        only = printable(task.classes[int(task.test_labels[0])])
        notes.append(f"every test image is of the class {only!r}: the accuracy is that class's recall")
    train = task.store.of(task.train, allow_unreadable=True)
    if unreadable := train.unreadable + len(task.train.skipped):
        notes.append(f"{unreadable} training images could not be read and were left out")
    verdict = task.loaded.header.get("verdict")
    if verdict is not None and "collapse" in str(verdict).lower():
        notes.append(f"the run's own verdict is: {verdict}")
    return notes
