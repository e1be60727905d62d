"""A run as its folder describes it: configuration, curves and verdict, even while it is running."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dssl import config_io
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.graph import named_graph
from dssl.run import EVALUATION_PAGE, RunFolder
from dssl.state import Verdict
from dssl.training.health import WINDOW, lower_spread

logger = logging.getLogger("dssl")
Curve = Literal["loss", "knn", "spread", "rank"]
_Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class RunData:
    """One run."""

    name: str
    """What distinguishes it from the others on the page."""
    path: Path
    config: RunConfig
    images: int
    """How many images it trains on."""
    precision: str
    checks: tuple[dict[str, Any], ...]
    """Records of metrics.jsonl with the state of the embeddings, by step."""
    knns: tuple[dict[str, Any], ...]
    starts: tuple[dict[str, Any], ...] = ()
    """Records of where the run stands beside the weights that it started from; empty where it started from none."""

    @property
    def method(self) -> str:
        return self.config.method.name

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.checks[-1]["step"]) if self.checks else 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.images // self.config.batch_size * self.config.epochs

    @property
    def finished(self) -> bool:
        return self.total > 0 and self.steps >= self.total

    def curve(self, name: Curve) -> _Curve:
        """(epoch, value) where the value is finite; the lowest of the views, because one collapsed view is enough."""
        records = self.knns if name == "knn" else self.checks
        points = [(float(record["epoch"]), self._value(record, name)) for record in records]
        return [(epoch, value) for epoch, value in points if math.isfinite(value)]

    def since_start(self, name: str) -> _Curve:
        """(epoch, value) beside the weights that the run started from: drift, feature_rank, or kNN and probe where measured."""
        records = [(float(record["epoch"]), record["start"]) for record in self.starts]
        points = [(epoch, now[name] if name in now else now["held_out"].get(name)) for epoch, now in records]
        return [(epoch, value) for epoch, value in points if value is not None]

    def thinned(self, name: Curve, count: int) -> _Curve:
        """At most ``count`` points of a curve, the last one included."""
        points = self.curve(name)
        every = max(1, math.ceil(len(points) / count))
        return points[::-1][::every][::-1]

    @property
    def knn(self) -> float | None:
        """The last kNN accuracy in percent."""
        points = self.curve("knn")
        return points[-1][1] if points else None

    @property
    def knn_images(self) -> int | None:
        """How many test images the accuracy was measured on."""
        return int(self.knns[-1]["knn_protocol"]["queries"]) if self.knns else None

    @property
    def spread(self) -> float | None:
        """Spread of the worst view, the median of the last checks, as the verdict sees it."""
        return self._recent("spread")

    @property
    def rank(self) -> float | None:
        """Effective rank of the worst view as a share of the largest possible, the median of the last checks."""
        return self._recent("rank")

    @property
    def images_per_second(self) -> float | None:
        """The median over the run without the first check, which includes compilation."""
        rates = [float(check["images_per_second"]) for check in self.checks[1:] or self.checks]
        return median(rates) if rates else None

    @property
    def views_per_second(self) -> float | None:
        rate = self.images_per_second
        return None if rate is None else rate * len(named_graph(self.config.graph).made)

    @property
    def data_share(self) -> float | None:
        """The share of the time in which steps waited for images."""
        shares = [float(check["data_share"]) for check in self.checks[1:] or self.checks]
        return sum(shares) / len(shares) if shares else None

    @property
    def seconds(self) -> float:
        """Training time over all sessions, from the logged rates."""
        total, before = 0.0, 0
        for check in self.checks:
            images = (int(check["step"]) - before) * self.config.batch_size
            total += images / max(float(check["images_per_second"]), 1e-9)
            before = int(check["step"])
        return total

    @property
    def verdict(self) -> Verdict:
        """The run's verdict; its reason was logged when its status became what it is."""
        if not self.checks:
            return Verdict("too early", 0)
        last = self.checks[-1]
        status, step = last["verdict"], int(last["step"])
        fine = status in ("healthy", "too early", "below where it started")
        if fine and self.starts and (below := self.starts[-1]["start"].get("below")):
            reason, remedies = below["reason"], tuple(below["remedies"])
            return Verdict("below where it started", int(self.starts[-1]["step"]), reason=reason, remedies=remedies)
        if fine and self.starts and int(self.starts[-1]["step"]) >= step:
            # a check at the end of an epoch comes before the comparison with the start: the run is no longer below it
            status = "healthy" if status == "below where it started" else status
        if status in ("healthy", "too early"):
            return Verdict(status, step)
        logged = [check for check in self.checks if check["verdict"] == status and "reason" in check]
        changed: dict[str, Any] = logged[-1] if logged else {}
        return Verdict(
            status,
            int(changed.get("step", step)),
            reason=changed.get("reason", "the reason is not recorded"),
            remedies=tuple(changed.get("remedies", ())),
        )

    def _recent(self, name: Literal["spread", "rank"]) -> float | None:
        by_view: dict[str, list[float]] = {}
        for check in self.checks[-WINDOW:]:
            for view, value in self._by_view(check, name).items():
                by_view.setdefault(view, []).append(value)
        medians = [median(values) for values in by_view.values()]
        finite = [value for value in medians if math.isfinite(value)]
        return min(finite) if finite else None

    def _value(self, record: Mapping[str, Any], name: Curve) -> float:
        if name in ("spread", "rank"):
            finite = [value for value in self._by_view(record, name).values() if math.isfinite(value)]
            return min(finite) if finite else math.nan
        return float(record[name])

    def _by_view(self, record: Mapping[str, Any], name: str) -> dict[str, float]:
        """By view; the lower of the spreads of projection and prediction where the health check judges both."""
        judged_from = self.config.method.predictions_checked_from
        if name == "spread" and judged_from is not None and int(record["step"]) > judged_from:
            return lower_spread(named_graph(self.config.graph), record["spread"], record["source"])
        return {view: float(value) for view, value in record[name].items()}


def read_run(path: Path, *, name: str | None = None) -> RunData:
    """A run from its folder; a last line that was cut short by a kill is skipped."""
    folder = RunFolder(path)
    if not folder.has_run:
        raise DsslError(f"{path} holds no run (no {folder.config_file.name}): expected the --out of dssl train")
    about = folder.read_config()
    if (task := about.get("task")) is not None:
        command, page = {"tune": ("tune", "tune.html")}.get(task, ("evaluate-coco", EVALUATION_PAGE))
        raise DsslError(f"{path} is a run of dssl {command}: its page is {path / page}")
    config = config_io.from_dict(about["config"], where=str(folder.config_file))
    try:
        images, precision = int(about["images"]), str(about["precision"])
    except (KeyError, TypeError, ValueError) as error:
        raise DsslError(f"{folder.config_file} is not the configuration of a dssl run ({error})") from None
    records = [record for record in folder.metrics() if "epoch" in record]
    checks = tuple(record for record in records if "loss" in record and "spread" in record)
    knns = tuple(record for record in records if "knn" in record)
    starts = tuple(record for record in records if "start" in record)
    return RunData(name or path.name, path, config, images, precision, checks, knns, starts)


def find_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs of the folders: each is a run, or holds runs. Runs of the same name are distinguished by their parents' names."""
    paths: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise DsslError(f"{folder} is not a folder: expected the folder of a run, or one that holds runs")
        # a glob, because it skips folders that may not be read
        one = RunFolder(folder)
        inside = [folder] if one.has_run else sorted(path.parent for path in folder.glob(f"*/{one.config_file.name}"))
        if folder not in inside:
            inside = [path for path in inside if _is_readable(path)]
        if not inside:
            raise DsslError(f"{folder} holds no run (no {one.config_file.name} in it or one level below)")
        known = {path.resolve() for path in paths}
        paths += [path for path in inside if path.resolve() not in known]
    return [read_run(path, name=name) for path, name in zip(paths, _names(paths), strict=True)]


def _is_readable(path: Path) -> bool:
    """Whether a folder beside runs is one, too: searches and detectors have pages of their own, and others are named."""
    file = RunFolder(path).config_file
    try:
        about = RunFolder(path).read_config()
        if "task" in about:
            return False
        config_io.from_dict(about["config"], where=str(file))
    except (DsslError, KeyError) as error:
        logger.warning(f"{file} is left out: {error}")
        return False
    return True


def _names(paths: Sequence[Path]) -> list[str]:
    absolute = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in absolute), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in absolute]
