"""The result of one job as a small JSON file to commit: what was run, what came out, and by which protocol."""

import base64
import json
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
    """One accuracy in percent, with its 95 % interval and its protocol."""

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


def pack(right: NDArray[np.bool_]) -> str:
    """A bit for each image, as text: 1.7 kB for 10,000."""
    return base64.b64encode(np.packbits(right).tobytes()).decode("ascii")


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

    @property
    def main(self) -> Measured | None:
        """The accuracy that the tables show."""
        return self.accuracies.get("linear" if self.training is None else "supervised")

    def write(self, path: Path) -> None:
        plain = asdict(self)
        for measured in plain["accuracies"].values():
            if measured["right"] is None:
                del measured["right"]
        text = json.dumps({"format_version": _FORMAT_VERSION, **plain}, indent=1, sort_keys=True)
        # one line per point: curves have hundreds
        text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", text)
        write_text(path, text + "\n")


def read(path: Path) -> Outcome:
    """A result from its file; a damaged file, or one of another format, is an error that names it."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format_version") != _FORMAT_VERSION:
            raise DsslError(f"{path} has another format: delete it and the run is done again")
        for kind, entry in plain["accuracies"].items():
            low, high = entry.pop("interval")
            plain["accuracies"][kind] = Measured(interval=(low, high), **entry)
        curves = {name: [(x, y) for x, y in points] for name, points in plain.pop("curves").items()}
        return Outcome(curves=curves, **plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DsslError(
            f"{path} is not a result of dssl reproduce ({error}): delete it and the run is done again"
        ) from None


def finished(jobs: Sequence[Job], place: Place) -> dict[str, Outcome]:
    """The results that exist and have exactly the settings of these jobs."""
    results = [(job, read(place.result(job))) for job in jobs if place.result(job).is_file()]
    return {job.name: result for job, result in results if result.fingerprint == job.fingerprint}
