"""Accuracy under corruption: what is learned from clean images, measured on corrupted test images, the same for every encoder."""

import base64
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dssl import rng
from dssl.augment import KINDS, SEVERITIES, corrupt_images, kinds_seen, meanings_of, parse, show
from dssl.augment.corruptions import Familiarity
from dssl.data.loader import CROP_RATIO, DeviceTransfer, EvaluationBatches, centre_crop
from dssl.data.pipeline import thread_count
from dssl.errors import DsslError, memory_for, one_line
from dssl.evaluation import frozen
from dssl.evaluation.comparison import paired_verdict, percentile_interval
from dssl.evaluation.knn import knn_predict
from dssl.evaluation.protocols import NEIGHBOURS, TEMPERATURE, Benchmark
from dssl.graph import named_graph
from dssl.models import evaluating, forward
from dssl.weights.encoder import Encoder

IMAGES, RESAMPLES = 2_000, 1_000
KNN_IMAGES = 10_000
"""Training images among which neighbours are searched: with all of CIFAR-10's the search costs more than everything else."""
SEED = 0
"""Of the choice of images, the corruptions and the resampling: fixed, so that all encoders are measured on the same pixels."""
OFFICIAL = "cifar10c:"
GROUPS = ("noise", "blur", "weather", "digital", "geometry")
FAMILIARITIES = {"seen": ("seen",), "similar": ("similar",), "unseen": ("unseen",), "not seen": ("similar", "unseen")}
"""Sets of kinds by what the run's policies have of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The accuracy over a set of conditions in percent, and how much of the clean accuracy above chance it keeps."""

    accuracy: float
    interval: tuple[float, float]
    """95%, from resampling the images."""
    retention: float | None
    """(corrupted - random) / (clean - random), where random is 1 / classes; None if clean images are not above random."""
    retention_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """This encoder minus another over a set of conditions, on the same images, in points."""

    before: float
    """The other's accuracy in percent."""
    after: float
    interval: tuple[float, float]
    changed: int
    """Images that differ in at least one condition."""

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        return paired_verdict(self.interval, changed=self.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """Which test images an encoder gets right, clean and in every condition (a kind of corruption at a severity)."""

    right: Mapping[str, NDArray[np.bool_]]
    """By protocol: conditions x images; the first row is clean, then come the severities of each kind in turn."""
    images: NDArray[np.int64]
    """Which images of the test set."""
    classes: int
    familiarity: Mapping[str, Familiarity]
    """For each kind that was measured: was it in the policies of the run?"""
    official: tuple[str, ...] = ()
    """Kinds whose images are CIFAR-10-C's own."""
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.familiarity)

    def row(self, kind: str, severity: int) -> int:
        """The row of a condition."""
        return 1 + len(SEVERITIES) * self.kinds.index(kind) + severity - 1

    def sets(self) -> dict[str, list[int]]:
        """The rows of clean images and of every set of conditions by name; geometry is in no mean but its own."""

        def rows(kinds: Iterable[str]) -> list[int]:
            return [self.row(kind, severity) for kind in kinds for severity in SEVERITIES]

        counted = [kind for kind in self.kinds if KINDS[kind].group != "geometry"]
        sets = {"clean": [0], "corrupted": rows(counted)}
        for group in GROUPS:
            sets[group] = rows(kind for kind in self.kinds if KINDS[kind].group == group)
        for name, states in FAMILIARITIES.items():
            sets[name] = rows(kind for kind in counted if self.familiarity[kind] in states)
        for severity in SEVERITIES:
            sets[f"severity {severity}"] = [self.row(kind, severity) for kind in counted]
        sets |= {kind: rows([kind]) for kind in self.kinds}
        return {name: conditions for name, conditions in sets.items() if conditions}

    def scores(self, protocol: str, sets: Iterable[Sequence[int]]) -> NDArray[np.float64]:
        """Images x sets: the share of a set's conditions in which an image is right, in percent."""
        return np.stack([100 * self.right[protocol][rows].mean(axis=0) for rows in sets], axis=1)

    def measures(self, protocol: str) -> dict[str, Measure]:
        """Every set with its intervals."""
        sets, chance = self.sets(), 100 / self.classes
        scores = self.scores(protocol, sets.values())
        accuracies, drawn = scores.mean(axis=0), resampled(scores)
        kept, above = accuracies[0] - chance, drawn[:, :1] - chance
        retentions = (drawn - chance) / above if (above > 0).all() else None
        return {
            name: Measure(
                accuracy=float(accuracies[place]),
                interval=percentile_interval(drawn[:, place]),
                retention=float((accuracies[place] - chance) / kept) if kept > 0 else None,
                retention_interval=None if retentions is None else percentile_interval(retentions[:, place]),
            )
            for place, name in enumerate(sets)
        }

    def against(self, other: "Robustness", protocol: str) -> dict[str, Difference]:
        """Every set beside the other's, image by image: the same images are drawn for both."""
        same = all(self.protocol.get(name) == other.protocol.get(name) for name in ("test_fingerprint", "knn_images"))
        if not same or not np.array_equal(self.images, other.images) or self.kinds != other.kinds:
            raise DsslError(
                f"{len(self.images)} and {len(other.images)} test images under {len(self.kinds)} and {len(other.kinds)} kinds "
                "of corruption: expected the same images and kinds; measure both with the same --data, settings and dssl"
            )
        if protocol not in other.right:
            raise DsslError(f"{protocol} was not measured of both encoders, only {', '.join(other.right)} of the other")
        sets = self.sets()
        after, before = (encoder.scores(protocol, sets.values()) for encoder in (self, other))
        drawn = resampled(after - before)
        return {
            name: Difference(
                before=float(before[:, place].mean()),
                after=float(after[:, place].mean()),
                interval=percentile_interval(drawn[:, place]),
                changed=int((after[:, place] != before[:, place]).sum()),
            )
            for place, name in enumerate(sets)
        }

    def plain(self) -> dict[str, Any]:
        """As JSON holds it, with the right answers as bits for later comparisons: ``of`` reads them."""
        return {
            "protocol": self.protocol,
            "classes": self.classes,
            "kinds": {
                kind: {
                    "group": KINDS[kind].group,
                    "familiarity": familiarity,
                    "pixels": "CIFAR-10-C" if kind in self.official else "dssl",
                }
                for kind, familiarity in self.familiarity.items()
            },
            "results": {
                name: {
                    "measures": {key: dataclasses.asdict(measure) for key, measure in self.measures(name).items()},
                    "accuracies": {
                        kind: [100 * float(right[self.row(kind, severity)].mean()) for severity in SEVERITIES]
                        for kind in self.kinds
                    },
                    "right": base64.b64encode(np.packbits(right, axis=1).tobytes()).decode("ascii"),
                }
                for name, right in self.right.items()
            },
            "images": self.images.tolist(),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Robustness":
        """From what ``plain`` gave."""
        images = np.array(plain["images"], np.int64)
        conditions = 1 + len(SEVERITIES) * len(plain["kinds"])
        bits = {
            name: np.frombuffer(base64.b64decode(result["right"]), np.uint8).reshape(conditions, -1)
            for name, result in plain["results"].items()
        }
        return cls(
            right={name: np.unpackbits(rows, axis=1, count=len(images)).astype(bool) for name, rows in bits.items()},
            images=images,
            classes=plain["classes"],
            familiarity={kind: about["familiarity"] for kind, about in plain["kinds"].items()},
            official=tuple(kind for kind, about in plain["kinds"].items() if about["pixels"] != "dssl"),
            protocol=plain["protocol"],
        )


def resampled(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of the columns when the rows (images) are drawn again with replacement: one row for each resample."""
    generator = np.random.Generator(np.random.Philox(rng.key(SEED, "robustness", "bootstrap")))
    count = len(scores)
    means = np.empty((RESAMPLES, scores.shape[1]))
    for mean in means:
        mean[:] = np.bincount(generator.integers(count, size=count), minlength=count) @ scores / count
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptedImages:
    """Test images under corruption: made here from the encoder's own square images, or read from CIFAR-10-C's files."""

    files: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    """By kind: five severities of the whole test set, one after the other."""
    threads: int | None = None

    @classmethod
    def open(cls, text: str | None, benchmark: Benchmark) -> "CorruptedImages":
        """From ``cifar10c:FOLDER``, for the kinds that it has; all are made here if the text is None."""
        if text is None:
            return cls(threads=benchmark.encoder.threads)
        if not text.startswith(OFFICIAL):
            raise DsslError(f"--corrupted {text}: expected cifar10c:FOLDER, the folder of CIFAR-10-C's .npy files")
        folder = Path(text.removeprefix(OFFICIAL)).expanduser()
        names = {kind: folder / f"{about.official}.npy" for kind, about in KINDS.items()}
        paths = {kind: path for kind, path in names.items() if path.is_file()}
        if not paths or not (folder / "labels.npy").is_file():
            raise DsslError(f"{folder} has no labels.npy with files such as gaussian_noise.npy: expected CIFAR-10-C")
        count = len(SEVERITIES) * len(benchmark.test)
        if not np.array_equal(_mapped(folder / "labels.npy"), np.tile(benchmark.test_labels, len(SEVERITIES))):
            raise DsslError(
                f"{folder / 'labels.npy'} has other labels than five times {benchmark.test.name}: "
                "expected the test images of CIFAR-10, as in --data cifar10:FOLDER"
            )
        files = {kind: _mapped(path) for kind, path in paths.items()}
        for kind, images in files.items():
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[::3] != (count, benchmark.encoder.channels):
                raise DsslError(
                    f"{paths[kind]} contains {images.dtype} of shape {images.shape}: expected uint8 of "
                    f"{count:,} x side x side x {benchmark.encoder.channels}"
                )
        return cls(files=files, threads=benchmark.encoder.threads)

    def of(self, images: NDArray[np.uint8], indices: NDArray[np.int64], kind: str, severity: int) -> NDArray[np.uint8]:
        """The images (N x side x side x channels) with these indices in the test set under one condition."""
        if kind not in self.files:
            threads = thread_count(self.threads)
            return corrupt_images(images, kind, severity, seed=SEED, indices=indices, threads=threads)
        stored = self.files[kind]
        rows = (severity - 1) * (len(stored) // len(SEVERITIES)) + indices
        return np.stack([centre_crop(image, size=images.shape[1]) for image in stored[rows]])


def _mapped(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DsslError(f"{path} cannot be read as an array of NumPy: {one_line(error)}") from None
    return array


def familiarity_of(encoder: Encoder) -> dict[str, Familiarity]:
    """Which kinds of corruption the views of the encoder's run have shown; none if its weights are not of a run."""
    config = encoder.header.get("config") or {}
    if "graph" not in config:
        return kinds_seen([])
    meanings = meanings_of({name: config[name] for name in ("standard", "heavy")})
    return kinds_seen([show(parse(view.policy, names=meanings)) for view in named_graph(config["graph"]).made])


def robustness(
    benchmark: Benchmark,
    *,
    images: int = IMAGES,
    corrupted: CorruptedImages | None = None,
    familiarity: Mapping[str, Familiarity] | None = None,
) -> Robustness:
    """Measure an encoder under every kind and severity: a probe and kNN learn from clean training features.

    At most so many test ``images``, always the same ones, are decoded once and go through the encoder in every condition, batch
    by batch; nothing but right and wrong is kept. kNN knows at most ``KNN_IMAGES`` training images, always the same ones.
    ``familiarity`` is by default that of the encoder's run.
    """
    encoder = benchmark.encoder
    corrupted = corrupted or CorruptedImages(threads=encoder.threads)
    familiarity = familiarity_of(encoder) if familiarity is None else familiarity
    kinds = {
        kind: familiarity[kind] for kind, about in KINDS.items() if encoder.channels in (1, 3) or not about.needs_colour
    }
    chosen = rng.sample(rng.key(SEED, "robustness", "images"), len(benchmark.test), images)
    conditions = [(kind, severity) for kind in kinds for severity in SEVERITIES]
    needed = f"image_size {encoder.image_size}, the encoder {encoder.name} and {len(benchmark.train):,} training images"
    with memory_for(needed, "use a smaller image size or fewer images"), frozen(encoder.network) as weights:
        classifiers = _Classifiers(benchmark)
        transfer = DeviceTransfer(encoder.device, normalization=encoder.normalization)
        scale, offset = encoder.normalization.scale_and_offset()
        digests = [hashlib.sha256() for _ in (None, *conditions)]
        parts: list[dict[str, NDArray[np.bool_]]] = []
        done = 0

        def features(pixels: NDArray[np.uint8], condition: int) -> Tensor:
            nonlocal done
            digests[condition].update(pixels.data)
            ready = torch.from_numpy(pixels if transfer.as_bytes else pixels * scale + offset).permute(0, 3, 1, 2)
            values = forward(encoder.network, transfer.plain(ready), autocast=encoder.autocast)
            done += len(pixels)
            if encoder.progress is not None:
                encoder.progress(done, len(chosen) * len(digests))
            return values

        batches = EvaluationBatches(
            benchmark.test, size=encoder.image_size, batch_size=encoder.batch_size, channels=encoder.channels,
            indices=chosen, threads=encoder.threads,
        )  # fmt: skip
        with batches, evaluating(encoder.network):
            for batch in batches:
                clean = batch.images.permute(0, 2, 3, 1).numpy()
                values = [features(clean, 0)]
                for number, (kind, severity) in enumerate(conditions, start=1):
                    values.append(features(corrupted.of(clean, batch.indices, kind, severity), number))
                labels = benchmark.test_labels[batch.indices]
                predictions = classifiers.predict(torch.cat(values))
                parts.append({name: rows.reshape(-1, len(labels)) == labels for name, rows in predictions.items()})
    protocol = {
        "train_data": benchmark.train.name,
        "test_data": benchmark.test.name,
        "train_fingerprint": benchmark.train.fingerprint,
        "test_fingerprint": benchmark.test.fingerprint,
        "train_images": classifiers.images,
        "knn_images": classifiers.knn_images,
        "test_images": len(chosen),
        "seed": benchmark.seed,
        "corruption_seed": SEED,
        "crop_ratio": CROP_RATIO if batches.cropped else 1.0,
        "precision": encoder.precision,
        "checkpoint": encoder.protocol(),
        "regularisation": classifiers.strength,
        "backbone": "frozen: verified",
        "backbone_sha256": weights,
        "pixels_sha256": hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest(),
    }
    return Robustness(
        right={name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]},
        images=chosen,
        classes=len(benchmark.classes),
        familiarity=kinds,
        official=tuple(kind for kind in kinds if kind in corrupted.files),
        protocol=protocol,
    )


class _Classifiers:
    """The probe of the protocols and kNN, learned from clean training images."""

    def __init__(self, benchmark: Benchmark) -> None:
        train = benchmark.store.of(benchmark.train, allow_unreadable=True)
        labels = torch.from_numpy(benchmark.train_labels[train.rows])
        self._classes, self._device = len(benchmark.classes), benchmark.device
        self._probe, _, self.images = benchmark.fitted_probe()
        rows = rng.sample(rng.key(SEED, "robustness", "neighbours"), len(labels), KNN_IMAGES)
        self._features, self._labels = train.values[rows], labels[rows]
        self.knn_images, self.strength = len(rows), self._probe.strength

    def predict(self, features: Tensor) -> dict[str, NDArray[np.int64]]:
        k = min(NEIGHBOURS[0], self.knn_images)
        (neighbours,) = knn_predict(
            self._features, self._labels, features, k=[k], temperature=TEMPERATURE, classes=self._classes,
            device=self._device,
        )  # fmt: skip
        return {"linear probe": self._probe.predict(features).numpy(), f"knn k={k}": neighbours.numpy()}
