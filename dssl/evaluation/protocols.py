"""Every protocol by name: what it does with one encoder and two labelled splits, and `evaluate`, which runs any of them."""

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl import rng
from dssl.data import Source, Subset, require_labels
from dssl.data.loader import CROP_RATIO
from dssl.errors import DsslError, choices, memory_for
from dssl.evaluation import Result, classifier, frozen
from dssl.evaluation.classifier import Training
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.probe import Choice, Probe, fit, share_of_classes
from dssl.evaluation.quality import Quality, quality
from dssl.files import printable
from dssl.models import PYTHON, build_encoder
from dssl.models.for_cpus import WhitenedEncoder
from dssl.version import VERSION
from dssl.weights.checkpoint import content_hash
from dssl.weights.encoder import Encoder, FeatureStore, Origin
from dssl.weights.formats import evaluation_of

NEIGHBOURS, TEMPERATURE = (20, 200), 0.1
REFERENCE_IMAGES, PIXELS = 50_000, 16
"""Of the rows for reference: training images at most, and the side to which images are averaged for raw pixels (16 to 31)."""


def aligned_labels(train: Source, test: Source) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Labels of both splits under the training split's classes; an error if that cannot be done."""
    train_labels, classes = require_labels(train)
    if test.labels is None or test.classes is None:
        raise DsslError(f"{test.name}: no labels: a test set needs a folder for each class, or a list with labels")
    if len(test) == 0:
        raise DsslError(f"{test.name}: the test set is empty")
    position = {name: number for number, name in enumerate(classes)}
    used = [test.classes[number] for number in np.unique(test.labels)]
    unknown = [name for name in used if name not in position]
    if unknown:
        examples = ", ".join(repr(name) for name in unknown[:3]) + (" and more" if len(unknown) > 3 else "")
        raise DsslError(
            f"the test set has {len(unknown)} of {len(used)} classes that the training set lacks ({examples}): "
            f"expected classes of {train.name}"
        )
    absent = [name for name in used if not (train_labels == position[name]).any()]
    if absent:
        raise DsslError(f"no training image has the class {absent[0]!r} of the test set: it cannot be learned")
    of_test = np.array([position.get(name, -1) for name in test.classes], np.int64)
    return train_labels, of_test[test.labels], classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One encoder, a labelled training split and a labelled test split with the same classes."""

    store: FeatureStore
    train: Source
    test: Source
    train_labels: NDArray[np.int64]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]
    seed: int
    epochs: int | None = None
    """Overrides a protocol's number of epochs, for quick trials."""
    folder: Path | None = None
    """Where a killed training resumes; without a folder it starts over."""
    trainings: list[Path] = field(default_factory=list)
    """Folders of trainings that have ended: they go once all numbers are known, else a later failure would cost them."""
    _probes: dict[float, tuple[Probe, Choice, int]] = field(default_factory=dict, init=False)
    """By share of the labels: clean accuracy and accuracy under corruption use the same one."""

    @classmethod
    def of(
        cls, store: FeatureStore, train: Source, test: Source, *, seed: int, epochs: int | None = None,
        folder: Path | None = None,
    ) -> "Benchmark":  # fmt: skip
        """With the labels of both splits under the training split's classes; an error if that cannot be done."""
        train_labels, test_labels, classes = aligned_labels(train, test)
        return cls(
            store=store, train=train, test=test, train_labels=train_labels, test_labels=test_labels, classes=classes,
            seed=seed, epochs=epochs, folder=folder,
        )  # fmt: skip

    def features(self) -> tuple[Tensor, Tensor, Tensor]:
        """Training features and labels, and test features; unreadable training images are left out."""
        train = self.store.of(self.train, allow_unreadable=True)
        test = self.store.of(self.test, allow_unreadable=False)
        return train.values, torch.from_numpy(self.train_labels[train.rows]), test.values

    def labelled(self, labels: NDArray[np.int64], share: float) -> NDArray[np.int64]:
        """Rows of this share of each class, at least one of each; a larger share contains a smaller one of the same seed."""
        return share_of_classes(labels, share, stream=rng.key(self.seed, "labels"))

    def fitted_probe(self, share: float = 1.0) -> tuple[Probe, Choice, int]:
        """The linear probe of this share of the labels, how its strength was chosen, and its number of images."""
        if share not in self._probes:
            train = self.store.of(self.train, allow_unreadable=True)
            values, labels = train.values, torch.from_numpy(self.train_labels[train.rows])
            if share < 1:
                rows = self.labelled(labels.numpy(), share)
                values, labels = values[rows], labels[rows]
            solved, choice = fit(values, labels, classes=len(self.classes), seed=self.seed, device=self.device)
            self._probes[share] = solved, choice, len(labels)
        return self._probes[share]

    @property
    def device(self) -> torch.device:
        """Where kNN and the probe compute: on the encoder's GPU, else on the CPU (Apple's GPU has no doubles)."""
        device = self.encoder.device
        return device if device.type == "cuda" else torch.device("cpu")

    @property
    def encoder(self) -> Encoder:
        return self.store.encoder

    def forget_trainings(self) -> None:
        """Delete what ended trainings have saved."""
        while self.trainings:
            shutil.rmtree(self.trainings.pop(), ignore_errors=True)

    def result(self, name: str, predicted: Tensor, *, used: int, protocol: dict[str, Any]) -> Result:
        """The number with everything it depends on; ``predicted`` covers the whole test set, in order."""
        cropped = self.store.of(self.test, allow_unreadable=False).cropped
        about = {
            "train_images": used,
            "test_images": len(self.test),
            "train_data": self.train.name,
            "test_data": self.test.name,
            "train_fingerprint": self.train.fingerprint,
            "test_fingerprint": self.test.fingerprint,
            "classes": len(self.classes),
            "seed": self.seed,
            "checkpoint": self.encoder.protocol(),
            "crop_ratio": CROP_RATIO if cropped else 1.0,
            "cropped_test_images": cropped,
            "precision": self.encoder.precision,
        }
        predicted = predicted.cpu()
        correct = int((predicted == torch.from_numpy(self.test_labels)).sum())
        return Result(name=name, correct=correct, total=len(self.test), protocol=about | protocol, predicted=predicted)


_FROZEN = {"backbone": "frozen"}  # `evaluate` verifies it by hash, and only then says so


def _knn(benchmark: Benchmark) -> list[Result]:
    train, train_labels, test = benchmark.features()
    predictions = knn_predict(
        train,
        train_labels,
        test,
        k=NEIGHBOURS,
        temperature=TEMPERATURE,
        classes=len(benchmark.classes),
        device=benchmark.device,
    )
    results: dict[int, Result] = {}
    for k, predicted in zip(NEIGHBOURS, predictions, strict=True):
        k = min(k, len(train))  # with fewer training images all of them vote
        protocol = {"kind": "knn", "k": k, "temperature": TEMPERATURE, "similarity": "cosine", **_FROZEN}
        results[k] = benchmark.result(f"knn k={k}", predicted, used=len(train), protocol=protocol)
    return list(results.values())


def _probe(benchmark: Benchmark, share: float) -> list[Result]:
    test = benchmark.store.of(benchmark.test, allow_unreadable=False).values  # first: it may not be readable
    solved, choice, used = benchmark.fitted_probe(share)
    protocol = {
        "kind": "linear",
        "solver": "L-BFGS to the optimum, on features of unaugmented images",
        "labels_share": share,
        "regularisation": choice.strength,
        "chosen_on": f"{choice.held_out} held-out training images" if choice.held_out else "default: too few images",
        "regularisation_tried": [list(pair) for pair in choice.accuracies],
        "objective": solved.objective,
        "largest_gradient": solved.gradient,
        **_FROZEN,
    }
    name = "linear probe" if share == 1 else f"linear probe, {share:.0%} of the labels"
    return [benchmark.result(name, solved.predict(test), used=used, protocol=protocol)]


def _linear(benchmark: Benchmark, optimizer: str) -> list[Result]:
    small = benchmark.encoder.image_size <= 64  # CIFAR's settings, and ImageNet's for the rest
    sgd = classifier.LINEAR_CIFAR_SGD if small else classifier.LINEAR_IMAGENET_SGD
    training = sgd if optimizer == "sgd" else classifier.LINEAR_LARS
    name = f"linear, {optimizer.upper()}, augmented"
    return _trained(benchmark, benchmark.encoder.network, training, name=name, kind="linear", freeze=True)


def _finetune(benchmark: Benchmark, share: float) -> list[Result]:
    network = deepcopy(benchmark.encoder.network)  # the next protocol gets the weights as they were
    training = classifier.FINETUNE if share > 0.01 else dataclasses.replace(classifier.FINETUNE, epochs=60)
    name = "fine-tuned" if share == 1 else f"fine-tuned, {share:.0%} of the labels"
    return _trained(benchmark, network, training, name=name, kind="fine-tuned", share=share)


def untrained(like: Encoder, *, seed: int, purpose: str) -> Encoder:
    """The same encoder with random weights, or a module of Python as it was given; ``purpose`` tells apart what is drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(seed, purpose) % 2**63)
        network = build_encoder(like.name, image_size=like.image_size, channels=like.channels)
    given = like.name.startswith(PYTHON)
    note = f"{purpose}: {'the module as it was given' if given else f'random weights of seed {seed}'}"
    if isinstance(network, WhitenedEncoder) and isinstance(like.network, WhitenedEncoder):
        # measured before the first step and never trained: with others it would not be what the run began with
        network.filters.copy_(like.network.filters)
        network.shift.copy_(like.network.shift)
        note += ", the filters of its first layer as in the other"
    origin = Origin(path=Path(purpose), sha256=content_hash(purpose, network.state_dict()), report=note)
    return dataclasses.replace(like, network=network.to(like.device).eval(), origin=origin)


def supervised(
    benchmark: Benchmark,
    share: float = 1.0,
    *,
    network: nn.Module | None = None,
    training: Training = classifier.SUPERVISED,
) -> list[Result]:
    """The encoder trained with this share of the labels, from random weights: new ones, or those of ``network``."""
    if network is None:
        network = untrained(benchmark.encoder, seed=benchmark.seed, purpose="supervised").network
    name = "supervised from scratch (no pretraining)"
    return _trained(benchmark, network, training, name=name, kind="supervised", share=share)


def _trained(
    benchmark: Benchmark,
    network: nn.Module,
    training: Training,
    *,
    name: str,
    kind: str,
    share: float = 1.0,
    freeze: bool = False,
) -> list[Result]:
    """Train a classifier on augmented images, of its head alone (``freeze``) or of everything, and measure it once."""
    source, labels = benchmark.train, benchmark.train_labels
    if share < 1:
        rows = benchmark.labelled(labels, share)
        source, labels = Subset(source, rows), labels[rows]
    if benchmark.epochs is not None:
        training = dataclasses.replace(training, epochs=benchmark.epochs)
    # first, so that a test image that cannot be read is known before the training
    test = benchmark.store.of(benchmark.test, allow_unreadable=False).values
    head = classifier.new_head(test.shape[1], len(benchmark.classes), seed=benchmark.seed)
    encoder = dataclasses.replace(benchmark.encoder, network=network)
    used = classifier.train_classifier(
        encoder, head, source, labels=labels, training=training, seed=benchmark.seed, freeze=freeze,
        folder=benchmark.folder, ended=benchmark.trainings.append,
    )  # fmt: skip
    if not freeze:  # else they are those that every other protocol uses
        test = encoder.features(benchmark.test).values
    predicted = classifier.predict_features(head, test)
    protocol = {"kind": kind, "labels_share": share, "training": dataclasses.asdict(used)}
    about = protocol | (_FROZEN if freeze else {"backbone": "trained"})
    return [benchmark.result(name, predicted, used=len(source), protocol=about)]


PROTOCOLS: dict[str, Callable[[Benchmark], list[Result]]] = {
    "knn": _knn,
    "probe": partial(_probe, share=1.0),
    "probe-1": partial(_probe, share=0.01),
    "probe-10": partial(_probe, share=0.1),
    "linear-sgd": partial(_linear, optimizer="sgd"),
    "linear-lars": partial(_linear, optimizer="lars"),
    "finetune-1": partial(_finetune, share=0.01),
    "finetune-10": partial(_finetune, share=0.1),
    "finetune": partial(_finetune, share=1.0),
    "supervised": supervised,
}
"""The first four need only features; the others train on augmented images, which takes a GPU or patience."""

QUICK = ("knn", "probe", "probe-1", "probe-10")


def chosen_protocols(names: Sequence[str]) -> tuple[str, ...]:
    """Names of protocols in the order of the table; ``quick`` and ``all`` stand for several."""
    wanted: set[str] = set()
    for name in names:
        if name not in (*PROTOCOLS, "quick", "all"):
            raise choices("protocol", name, (*PROTOCOLS, "quick", "all"))
        wanted |= set({"quick": QUICK, "all": tuple(PROTOCOLS)}.get(name, (name,)))
    if not wanted:
        raise DsslError("--protocols is empty: expected names such as knn probe, or quick, or all")
    return tuple(name for name in PROTOCOLS if name in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that was measured."""

    results: tuple[Result, ...]
    quality: Quality
    notes: tuple[str, ...]
    checkpoint: dict[str, Any] = field(default_factory=dict)
    reference_rows: tuple[Result, ...] = ()
    """Of ``reference_rows``, where they were asked for."""

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "dssl_version": VERSION,
            "checkpoint": self.checkpoint,
            "results": [result.plain() for result in self.results],
            "reference_rows": [result.plain() for result in self.reference_rows],
            "quality": dataclasses.asdict(self.quality),
            "notes": list(self.notes),
        }


def evaluate(
    benchmark: Benchmark,
    protocols: Sequence[str],
    *,
    policy: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Run the protocols one after the other; the encoder is the same before and after each, or the number is invalid.

    ``policy`` makes the views by which alignment is measured.
    """
    encoder = benchmark.encoder
    needed = f"image_size {encoder.image_size}, the encoder {encoder.name} and {len(benchmark.train):,} training images"
    results: list[Result] = []
    with memory_for(needed, "use a smaller image size or fewer images"):
        for name in protocols:
            say(name)
            with frozen(encoder.network) as digest:
                measured = PROTOCOLS[name](benchmark)
            results += [_verified(result, digest) for result in measured]
        with frozen(encoder.network):
            unlabelled = quality(benchmark.store, benchmark.test, seed=benchmark.seed, policy=policy)
    benchmark.forget_trainings()
    return Evaluation(
        results=tuple(results),
        quality=unlabelled,
        notes=tuple(_notes(benchmark)),
        checkpoint=encoder.protocol(),
    )


def with_earlier(evaluation: Evaluation, benchmark: Benchmark, written: Path) -> tuple[Evaluation, Path | None]:
    """The evaluation, with what other protocols had measured before of the same weights, images and seed.

    A file about anything else is set aside; where it is now comes second.
    """
    if not written.exists():
        return evaluation, None
    here = {
        "train_fingerprint": benchmark.train.fingerprint, "test_fingerprint": benchmark.test.fingerprint, "seed": benchmark.seed,
    }  # fmt: skip
    try:
        content = evaluation_of(benchmark.encoder, written) or {"results": [{}]}
        earlier, references = (
            [
                Result(**{key: row[key] for key in ("name", "correct", "total", "protocol")})
                for row in content.get(kind, ())
            ]
            for kind in ("results", "reference_rows")
        )
        same = all(result.protocol[name] == value for result in earlier for name, value in here.items())
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
    names = ", ".join(result.name for result in earlier if result.name not in measured)
    return dataclasses.replace(
        evaluation,
        results=tuple({result.name: result for result in (*earlier, *evaluation.results)}.values()),
        reference_rows=tuple({row.name: row for row in (*references, *evaluation.reference_rows)}.values()),
        notes=(*evaluation.notes, f"measured earlier: {names}") if names else evaluation.notes,
    ), None


def reference_rows(benchmark: Benchmark, protocols: Sequence[str]) -> tuple[Result, ...]:
    """What the same test images give without learning: the largest class, and of raw pixels and untrained kNN and probe."""
    largest = int(np.bincount(benchmark.train_labels).argmax())
    predicted = torch.full((len(benchmark.test),), largest)
    about = {"kind": "largest class", "backbone": "none"}
    rows = [benchmark.result("largest class", predicted, used=len(benchmark.train), protocol=about)]
    wanted = [name for name in ("knn", "probe") if name in protocols]
    if not wanted:
        return tuple(rows)
    if len(benchmark.train) > REFERENCE_IMAGES:
        chosen = rng.sample(rng.key(benchmark.seed, "reference"), len(benchmark.train), REFERENCE_IMAGES)
        train, labels = Subset(benchmark.train, chosen), benchmark.train_labels[chosen]
        benchmark = dataclasses.replace(benchmark, train=train, train_labels=labels)
    size = benchmark.encoder.image_size
    width = max(1, size // PIXELS)
    averaged = nn.Sequential(nn.AvgPool2d(width), nn.Flatten())
    encoders = {
        "raw pixels": dataclasses.replace(
            benchmark.encoder.raw_pixels(), network=averaged, name=f"raw pixels, averaged to {size // width} px"
        ),
        "untrained": untrained(benchmark.encoder, seed=benchmark.seed, purpose="untrained"),
    }
    for label, encoder in encoders.items():
        part = dataclasses.replace(benchmark, store=FeatureStore(encoder, folder=benchmark.store.folder))
        for name in wanted:
            rows += [
                dataclasses.replace(
                    result, name=f"{result.name}, {label}", protocol=result.protocol | {"backbone": label}
                )
                for result in PROTOCOLS[name](part)
            ]
    return tuple(rows)


def _verified(result: Result, digest: str) -> Result:
    """The result with what the hashes have shown, if its protocol freezes the backbone."""
    if result.protocol["backbone"] != "frozen":
        return result
    about = {"backbone": "frozen: verified", "backbone_sha256": digest}
    return dataclasses.replace(result, protocol=result.protocol | about)


def _notes(benchmark: Benchmark) -> list[str]:
    """What a reader of the numbers should know."""
    notes = []
    if len(benchmark.test) < 100:
        count = "only 1 image" if len(benchmark.test) == 1 else f"only {len(benchmark.test)} images"
        notes.append(f"the test set has {count}: check the width of the intervals before trusting any number")
    if len(np.unique(benchmark.test_labels)) == 1:
        only = printable(benchmark.classes[int(benchmark.test_labels[0])])
        notes.append(f"every test image is of the class {only!r}: the accuracy is that class's recall")
    train = benchmark.store.of(benchmark.train, allow_unreadable=True)
    if unreadable := train.unreadable + len(benchmark.train.skipped):
        notes.append(f"{unreadable} training images could not be read and were left out")
    verdict = benchmark.encoder.header.get("verdict")
    if verdict is not None and "collapse" in str(verdict).lower():
        notes.append(f"the run's own verdict is: {verdict}")
    return notes
