"""The result of one job as a small JSON file to commit: what was run, what came out, and by which protocol."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dssl.errors import DsslError
from dssl.files import write_text

_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One accuracy in percent, with its 95 % interval and its protocol."""

    accuracy: float
    interval: tuple[float, float]
    protocol: dict[str, Any]


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
    reason: str
    spread: float | None
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
        text = json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=1, sort_keys=True)
        # one line per point: curves have hundreds
        text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", text)
        write_text(path, text + "\n")


def read(path: Path) -> Outcome:
    """A result from its file; a damaged file, or one of another format, is refused by name."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format_version") != _FORMAT_VERSION:
            raise DsslError(f"{path} has another format: delete it and the cell is run again")
        measured = {
            kind: Measured(accuracy=one["accuracy"], interval=(low, high), protocol=one["protocol"])
            for kind, one in plain.pop("accuracies").items()
            for low, high in [one["interval"]]
        }
        curves = {name: [(x, y) for x, y in points] for name, points in plain.pop("curves").items()}
        return Outcome(**plain, accuracies=measured, curves=curves)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DsslError(
            f"{path} is not a result of dssl reproduce ({error}): delete it and the cell is run again"
        ) from None
