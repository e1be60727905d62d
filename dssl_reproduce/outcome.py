"""The result of one job as a small JSON file to commit: what was run, what came out, and by which protocol."""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.files import write_text
from dssl_reproduce.scales import Job

_FORMAT_VERSION = 1
_NORMAL_95 = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Locations: images by data set, run folders, results."""

    data: Mapping[str, str]
    """From the name of a data set to what ``open_source`` takes; jobs on other data sets are not run."""
    runs: Path
    cells: Path

    def located(self, job: Job) -> RunConfig:
        """The job's configuration with the location of its images."""
        return replace(job.config, data=self.data[job.config.data])

    def result(self, job: Job) -> Path:
        return self.cells / f"{job.name}.json"

    def log(self, job: Job) -> Path:
        return self.runs / f"{job.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One accuracy in percent, with its 95% interval and its protocol."""

    accuracy: float
    interval: tuple[float, float]
    protocol: dict[str, Any]
    right: str | None = None
    """Which test images it got right, a bit for each (``pack``); None in results of before these were kept."""

    def bits(self) -> NDArray[np.bool_] | None:
        """Whether each test image is right, in order."""
        if self.right is None:
            return None
        packed = np.frombuffer(base64.b64decode(self.right), dtype=np.uint8)
        return np.unpackbits(packed, count=int(self.protocol["test_images"])).astype(bool)

    def score(self) -> "Score":
        bits = self.bits()
        return Score(
            accuracy=self.accuracy,
            error=(self.interval[1] - self.interval[0]) / 2,
            by_image=None if bits is None else 100 * bits.astype(np.float64),
            images=self.protocol.get("test_fingerprint"),
        )


def pack(right: NDArray[np.bool_]) -> str:
    """A bit for each image, as text: 1.7 kB for 10,000."""
    return base64.b64encode(np.packbits(right).tobytes()).decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupted:
    """What a classifier, learned from clean images, reaches on corrupted ones."""

    accuracies: dict[str, list[float]]
    """By kind of corruption: percent at each severity."""
    conditions: dict[str, int]
    """Of each set of conditions: how many it has."""
    right: dict[str, str]
    """Of each set: in how many of its conditions each image is right, as text (``pack_counts``)."""
    protocol: dict[str, Any]

    def counts(self, conditions: str) -> NDArray[np.uint8]:
        """In how many conditions of a set each image is right, in order."""
        return np.frombuffer(base64.b64decode(self.right[conditions]), dtype=np.uint8)

    def score(self, conditions: str) -> "Score":
        by_image = 100 * self.counts(conditions).astype(np.float64) / self.conditions[conditions]
        return Score(
            accuracy=float(by_image.mean()),
            error=mean_error(by_image),
            by_image=by_image,
            images=self.protocol.get("test_fingerprint"),
        )


def pack_counts(counts: NDArray[np.int64]) -> str:
    """A byte for each image, as text."""
    return base64.b64encode(counts.astype(np.uint8).tobytes()).decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """What one run reached in one measure, in percent."""

    accuracy: float
    error: float
    """Half of its 95% interval, from the choice of test images."""
    by_image: NDArray[np.float64] | None
    """Of each test image, in order; None in results of before this was kept."""
    images: str | None
    """The fingerprint of the test images."""


def mean_error(values: NDArray[np.float64]) -> float:
    """Half of the 95% interval of a mean."""
    return _NORMAL_95 * float(values.std(ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a finished job."""

    name: str
    scale: str
    seed: int
    fingerprint: str
    """Of the settings; a result of other settings is not this job's."""
    config: dict[str, Any]
    training: dict[str, Any] | None
    verdict: str
    """Of the run's health watch; a baseline's kind, such as "supervised"."""
    reason: str = ""
    spread: float | None = None
    """Of the worst view at the end: 1 is healthy, 0 is a single point."""
    accuracies: dict[str, Measured]
    """By kind: knn, linear, supervised; empty for a run that diverged."""
    corruptions: dict[str, Corrupted] | None = None
    """By kind: knn, linear; empty for a run that diverged, None if it was not measured."""
    steps: int
    seconds: float
    """Of training, over all sessions."""
    versions: dict[str, str]
    """Of the software, with the Git commit where dssl runs from a checkout."""
    data: dict[str, Any]
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(epoch, value) of kNN accuracy and of the worst view's spread."""

    @property
    def collapsed(self) -> bool:
        return self.verdict in ("collapsed", "partial collapse")

    def score(self, measure: tuple[str, str] | None) -> Score | None:
        """In the measure of an entry: the accuracy that most tables show, or a kind with a set of corruptions."""
        if measure is None:
            main = self.accuracies.get("linear" if self.training is None else "supervised")
            return None if main is None else main.score()
        found = (self.corruptions or {}).get(measure[0])
        return None if found is None else found.score(measure[1])

    def write(self, path: Path) -> None:
        plain = asdict(self)
        for measured in plain["accuracies"].values():
            if measured["right"] is None:
                del measured["right"]
        if self.corruptions is None:
            del plain["corruptions"]
        text = json.dumps({"format_version": _FORMAT_VERSION, **plain}, indent=1, sort_keys=True)
        # one line per point and per list of numbers: curves have hundreds
        text = re.sub(r"\[\s+[-\d.e]+(,\s+[-\d.e]+)+\s+\]", lambda match: f"[{' '.join(match[0][1:-1].split())}]", text)
        write_text(path, text + "\n")


def read(path: Path) -> Outcome:
    """A result from its file; a damaged file, or one of another format, is an error that names it."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format_version") != _FORMAT_VERSION:
            raise DsslError(f"{path} has another format: delete it, and the run is repeated")
        for kind, entry in plain["accuracies"].items():
            low, high = entry.pop("interval")
            plain["accuracies"][kind] = Measured(interval=(low, high), **entry)
        if "corruptions" in plain:
            plain["corruptions"] = {kind: Corrupted(**entry) for kind, entry in plain["corruptions"].items()}
        curves = {name: [(x, y) for x, y in points] for name, points in plain.pop("curves").items()}
        return Outcome(curves=curves, **plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DsslError(
            f"{path} is not a result of dssl reproduce ({error}): delete it, and the run is repeated"
        ) from None


def finished(jobs: Sequence[Job], place: Place) -> dict[str, Outcome]:
    """The results that exist, have exactly the settings of these jobs and all that is to be measured."""
    results = [(job, read(place.result(job))) for job in jobs if place.result(job).is_file()]
    return {
        job.name: result
        for job, result in results
        if result.fingerprint == job.fingerprint and (result.corruptions is not None or not job.corruptions)
    }
