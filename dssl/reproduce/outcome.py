"""The result of one job as a small JSON file that can be committed: what was run, what came out, and by which protocol."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dssl.errors import DsslError
from dssl.report import page

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One accuracy in percent, with its 95 % interval and its protocol."""

    accuracy: float
    interval: tuple[float, float]
    protocol: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a finished job leaves."""

    name: str
    scale: str
    seed: int
    fingerprint: str
    """Of the settings; a result of other settings does not count."""
    config: dict[str, Any]
    training: dict[str, Any] | None
    verdict: str
    """Of the watch over the run; "supervised" where there is none."""
    reason: str
    spread: float | None
    """Of the worst view at the end: 1 is healthy, 0 is one point."""
    accuracies: dict[str, Measured]
    """By kind: knn, linear, supervised; none for a run that diverged."""
    steps: int
    seconds: float
    """Of training, over all sessions."""
    versions: dict[str, str]
    data: dict[str, Any]
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(epoch, value) of kNN accuracy and of the worst view's spread."""

    @property
    def collapsed(self) -> bool:
        return self.verdict in ("collapsed", "partial collapse")

    def write(self, path: Path) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1, sort_keys=True)
        # a pair of numbers on one line: hundreds of points would bury the rest
        text = re.sub(r"\[\s+([-\d.e]+),\s+([-\d.e]+)\s+\]", r"[\1, \2]", text)
        page.write(path, text + "\n")


def read(path: Path) -> Outcome:
    """A result from its file; one that is damaged or of another format is refused by name."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        if plain.pop("format_version") != FORMAT_VERSION:
            raise DsslError(f"{path} has another format: delete it, and the cell is run again")
        measured = {kind: _measured(one) for kind, one in plain.pop("accuracies").items()}
        curves = {name: [(x, y) for x, y in points] for name, points in plain.pop("curves").items()}
        return Outcome(**plain, accuracies=measured, curves=curves)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DsslError(
            f"{path} is no result of dssl reproduce ({error}): delete it, and the cell is run again"
        ) from None


def _measured(plain: Mapping[str, Any]) -> Measured:
    low, high = plain["interval"]
    return Measured(accuracy=plain["accuracy"], interval=(low, high), protocol=dict(plain["protocol"]))
