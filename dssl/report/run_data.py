"""What a run's folder tells about the run: its configuration, its curves and its verdict, also while it is still running."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dssl import config_io
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.methods import declaration_of
from dssl.presets import named_graph
from dssl.state import Opinion
from dssl.train.health import WINDOW, Health, Look

Curve = Literal["loss", "knn", "spread", "rank"]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunData:
    """One run."""

    name: str
    """What tells it apart from the others on the page."""
    path: Path
    config: RunConfig
    images: int
    """How many images it trains on."""
    precision: str
    looks: tuple[dict[str, Any], ...]
    """Records of metrics.jsonl with the state of the embeddings, by step."""
    knns: tuple[dict[str, Any], ...]

    @property
    def method(self) -> str:
        return declaration_of(self.config.method).name

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return int(self.looks[-1]["step"]) if self.looks else 0

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.images // self.config.batch_size * self.config.epochs

    @property
    def finished(self) -> bool:
        return self.total > 0 and self.steps >= self.total

    def curve(self, name: Curve) -> Points:
        """(epoch, value) of what is a number; of the values by view the lowest, since one collapsed view is enough."""
        records = self.knns if name == "knn" else self.looks
        points = [(float(record["epoch"]), self._value(record, name)) for record in records]
        return [(epoch, value) for epoch, value in points if math.isfinite(value)]

    def thinned(self, name: Curve, count: int) -> Points:
        """At most so many points of a curve, the last among them."""
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
        """How many test images the accuracy is of."""
        return int(self.knns[-1]["knn_protocol"]["queries"]) if self.knns else None

    @property
    def spread(self) -> float | None:
        """Of the worst view, the median of the last looks, as the verdict sees it."""
        return self._recent("spread")

    @property
    def rank(self) -> float | None:
        """Effective rank of the worst view as a share of the largest possible, the median of the last looks."""
        return self._recent("rank")

    @property
    def images_per_second(self) -> float | None:
        """The median over the run: the first look, which also waits for compilation, does not count."""
        rates = [float(look["images_per_second"]) for look in self.looks[1:] or self.looks]
        return median(rates) if rates else None

    @property
    def views_per_second(self) -> float | None:
        rate = self.images_per_second
        return None if rate is None else rate * len(named_graph(self.config.graph).made)

    @property
    def data_share(self) -> float | None:
        """The share of the time for which the step waited for images."""
        shares = [float(look["data_share"]) for look in self.looks[1:] or self.looks]
        return sum(shares) / len(shares) if shares else None

    @property
    def seconds(self) -> float:
        """Of training over all sessions, from the rates that were written down."""
        total, before = 0.0, 0
        for look in self.looks:
            images = (int(look["step"]) - before) * self.config.batch_size
            total += images / max(float(look["images_per_second"]), 1e-9)
            before = int(look["step"])
        return total

    @cached_property
    def opinion(self) -> Opinion:
        """The run's verdict with its reasons in words; they are not written down, so the watch looks again."""
        if not self.looks:
            return Opinion("too early", 0)
        last = self.looks[-1]
        if last["verdict"] in ("healthy", "too early"):
            return Opinion(last["verdict"], int(last["step"]))
        judged = declaration_of(self.config.method).judges_predictions
        health = Health(named_graph(self.config.graph), patience=1, predictions=judged)
        for record in self.looks[-WINDOW:]:
            opinion = health.judge(_look(record))
        if last["verdict"] == "diverged":
            opinion = health.divergence(_look(last), first=-1)
        return opinion if opinion.verdict == last["verdict"] else Opinion(last["verdict"], int(last["step"]))

    def _recent(self, name: Literal["spread", "rank"]) -> float | None:
        by_view: dict[str, list[float]] = {}
        for look in self.looks[-WINDOW:]:
            for view, value in self._by_view(look, name).items():
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
        """Of the spreads of projection and prediction the lower one where the watch judges both."""
        both = name == "spread" and declaration_of(self.config.method).judges_predictions
        others = record["source"] if both else {}
        return {view: min(float(value), float(others.get(view, value))) for view, value in record[name].items()}


def read_run(folder: Path, *, name: str | None = None) -> RunData:
    """A run from its folder; a last line that a kill has cut short is left out."""
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if "task" in about:
            raise DsslError(f"{folder} is a run of dssl evaluate-coco: its page is {folder / 'evaluation.html'}")
        config = config_io.from_dict(about["config"], where=str(folder / "config.json"))
        images, precision = int(about["images"]), str(about["precision"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DsslError(f"{folder / 'config.json'} is no configuration of a dssl run ({error})") from None
    except FileNotFoundError:
        raise DsslError(f"{folder} holds no run (no config.json): expected the --out of dssl train") from None
    looks, knns = [], []
    for record in _records(folder / "metrics.jsonl"):
        if "loss" in record and "spread" in record:
            looks.append(record)
        elif "knn" in record:
            knns.append(record)
    return RunData(name or folder.name, folder, config, images, precision, tuple(looks), tuple(knns))


def find_runs(folders: Sequence[Path]) -> list[RunData]:
    """The runs of the folders: each is a run, or holds runs. Names that would be equal get their parents' before them."""
    paths: list[Path] = []
    for folder in folders:
        if (folder / "config.json").is_file():
            inside = [folder]
        elif folder.is_dir():
            inside = sorted(path.parent for path in folder.glob("*/config.json"))
        else:
            raise DsslError(f"{folder} is no folder: expected the folder of a run, or one that holds runs")
        if not inside:
            raise DsslError(f"{folder} holds no run (no config.json in it or one level below)")
        paths += [path for path in inside if path not in paths]
    return [read_run(path, name=name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    absolute = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in absolute), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in absolute]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in absolute]


def _records(path: Path) -> Iterable[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "epoch" in record and "step" in record:
            yield {name: _numbers(value) for name, value in record.items()}


def _numbers(value: Any) -> Any:
    """The log writes null for what is no number; earlier versions wrote NaN."""
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    return math.nan if value is None else value


def _look(record: Mapping[str, Any]) -> Look:
    return Look(
        step=int(record["step"]) - 1,
        loss=record["loss"],
        edges=record["edges"],
        spread=record["spread"],
        rank=record["rank"],
        source=record["source"],
        target=record["target"],
    )
