"""The verbs for Python: what the commands do, by the same code, with the same defaults, errors and run folders."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from markupsafe import escape
from numpy.typing import NDArray
from torch import nn

from dssl import cli
from dssl.commands import evaluate as evaluate_command
from dssl.commands import export as export_command
from dssl.commands import train as train_command
from dssl.commands import views as views_command
from dssl.commands.arguments import with_home
from dssl.config import AdaptConfig, CheckpointConfig, HealthConfig, OptimizerConfig, Precision, RunConfig
from dssl.data import Quarantine, open_source
from dssl.data.source import Split
from dssl.distributed import pick_device
from dssl.errors import DsslError, choices
from dssl.methods import MethodSettings
from dssl.report import run_report
from dssl.report.run_report import RunData, read_run
from dssl.run import EVALUATION_FILE, RunFolder
from dssl.state import Verdict
from dssl.weights.load import load_encoder, open_weights

Table = Mapping[str, Any]
"""Some settings of a group by name, such as ``{"rate": 0.1}``."""


class TrainSettings(TypedDict, total=False):
    """The settings of a run by keyword: the fields of ``RunConfig``, which says what each of them means."""

    limit: int | None
    minutes: float | None
    shuffle: Literal["images", "shards"] | None
    window: int | None
    image_size: int
    channels: int
    range: str | None
    normalization: str
    bad_share: float
    encoder: str
    init: str | Path | None
    teacher: str | Path | None
    teacher_encoder: str | None
    method: str | MethodSettings | Table
    graph: str
    standard: str
    heavy: str
    epochs: int
    batch_size: int
    seed: int
    optimizer: OptimizerConfig | Table
    precision: Precision
    checkpoint_activations: bool
    compile: bool
    tf32: bool
    device: Literal["auto", "cuda", "mps", "cpu"]
    threads: int | None
    torch_threads: int | None
    batchnorm_across_ranks: bool
    knn_every: int
    checkpoint: CheckpointConfig | Table
    health: HealthConfig | Table
    adapt: AdaptConfig | Table


@dataclass(frozen=True)
class Run:
    """A run of ``dssl train`` in its folder, finished or not."""

    path: Path

    @property
    def data(self) -> RunData:
        """Its configuration, curves and records, read again at each call."""
        return read_run(self.path)

    @property
    def config(self) -> RunConfig:
        return self.data.config

    @property
    def verdict(self) -> Verdict:
        """Its health, with reason and remedies."""
        return self.data.verdict

    @property
    def finished(self) -> bool:
        return self.data.finished

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return list(RunFolder(self.path).metrics())

    def encoder(self) -> nn.Module:
        """The encoder of its newest checkpoint, in evaluation mode."""
        return load_encoder(self.path)

    def __repr__(self) -> str:
        return run_report.summary([self.data])

    def _repr_html_(self) -> str:
        page = run_report.html([self.data], command=f"dssl report {self.path}")
        return f'<iframe srcdoc="{escape(page)}" width="100%" height="700" style="border: 0"></iframe>'


Weights = str | Path | Run
"""A run, its folder, a checkpoint, an export or a file of foreign weights."""


def train(
    recipe: str,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    keep_head: bool = False,
    log: Sequence[str] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Pretrain or adapt an encoder, as ``dssl train RECIPE`` does; the same call resumes a run that was stopped.

    ``data`` is what ``--data`` takes. ``out`` is the run's folder, by default ``runs/RECIPE``. ``keep_head`` is for the recipe
    ``robust``. ``log`` names trackers, such as ``["wandb"]``; by default those that a resumed run had. A group of settings is a
    table or a whole configuration: ``optimizer={"rate": 0.1}``. Ctrl-C saves the run and returns it.
    """
    words = [recipe, *(["--keep-head"] if keep_head else [])]
    for name, value in {"data": data, "out": out}.items():
        words += [] if value is None else [f"--{name}={value}"]
    words += [*_words(settings), *([] if log is None else ["--log", *log])]
    default, rest = train_command.defaults(words)
    arguments = with_home(cli.parse(train_command.Arguments, "dssl train", rest, default))
    train_command.run(arguments)
    return Run(arguments.out)


def open_run(path: str | Path) -> Run:
    """A run by its folder, which ``dssl train`` or ``dssl.train`` has written."""
    return Run(read_run(Path(path)).path)


def evaluate(
    weights: Weights,
    *,
    data: str | Path | None = None,
    test: str | Path | None = None,
    against: Sequence[str | Path] | str | Path | None = None,
    corruptions: bool = False,
    protocols: Sequence[str] = ("quick",),
    encoder: str | None = None,
    image_size: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto",
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure an encoder on labelled images, as ``dssl evaluate`` does; what it writes as JSON is also returned.

    ``against`` names one or more encoders to compare with, ``corruptions`` measures on corrupted test images instead.
    """
    others = [against] if isinstance(against, str | Path) else against
    arguments = evaluate_command.Arguments(
        weights=_path(weights), data=None if data is None else str(data), test=None if test is None else str(test),
        against=None if others is None else tuple(map(str, others)), corruptions=corruptions,
        protocols=tuple(protocols), encoder=encoder, image_size=image_size, out=None if out is None else Path(out),
        seed=seed, device=device, threads=threads,
    )  # fmt: skip
    evaluate_command.run(with_home(arguments))
    name = "robustness.json" if corruptions else "comparison.json" if others is not None else EVALUATION_FILE
    content: dict[str, Any] = json.loads((evaluate_command.folder_of(arguments) / name).read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Embeddings:
    """Vectors of images, in their order."""

    vectors: NDArray[np.float32]
    names: tuple[str, ...]
    labels: NDArray[np.int64] | None
    """Classes by number, where the images have any."""


def embed(
    weights: Weights,
    data: str | Path,
    *,
    split: Split = "train",
    encoder: str | None = None,
    image_size: int | None = None,
    batch_size: int = 256,
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto",
    threads: int | None = None,
) -> Embeddings:
    """The encoder's vectors of images, in memory; ``dssl embed`` writes them to files of any size."""
    loaded = open_weights(_path(weights), encoder=encoder, image_size=image_size)
    network = loaded.network.to(pick_device(device))
    loaded = replace(loaded, network=network, batch_size=batch_size, threads=threads)
    source = open_source(str(data), split=split, channels=loaded.channels, value_range=loaded.value_range)
    features = loaded.features(source, quarantine=Quarantine(source, max_share=1.0))
    names = tuple(source.label_of(row) for row in features.rows.tolist())
    labels = None if source.labels is None else np.asarray(source.labels)[features.rows]
    return Embeddings(features.values.numpy(), names, labels)


def export(
    weights: Weights,
    *,
    formats: Sequence[str] = ("safetensors",),
    out: str | Path | None = None,
    encoder: str | None = None,
    image_size: int | None = None,
) -> Path:
    """Write an encoder for other programs, each file verified by loading it back, as ``dssl export``; the folder of the files."""
    arguments = export_command.Arguments(
        weights=_path(weights), formats=tuple(formats), out=None if out is None else Path(out), encoder=encoder,
        image_size=image_size,
    )  # fmt: skip
    arguments = with_home(arguments)
    export_command.run(arguments)
    return export_command.folder_of(arguments)


def views(
    data: str | Path,
    *,
    policies: Sequence[str] = views_command.Arguments.policies,
    out: str | Path = "views.html",
    standard: str | None = None,
    size: int | None = None,
    seed: int = 0,
) -> Path:
    """Draw what policies make of images, with the measured strength of each, as ``dssl views`` does; the page."""
    arguments = views_command.Arguments(
        source=str(data), policies=tuple(policies), out=Path(out), standard=standard, size=size, seed=seed
    )
    arguments = with_home(arguments)
    views_command.run(arguments)
    return arguments.out


def _path(weights: Weights) -> Path:
    return weights.path if isinstance(weights, Run) else Path(weights)


def _words(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings as the words of a command line, so that they are checked where flags are."""
    names = [field.name for field in fields(RunConfig)]
    for name, value in settings.items():
        if not prefix and name not in names:
            raise DsslError(f"dssl.train: {choices('setting', name, names)}")
        if isinstance(value, MethodSettings):
            value = {"name": value.name, **vars(value)}
        elif is_dataclass(value) and not isinstance(value, type):
            value = vars(value)
        flag = f"--{prefix}{name}".replace("_", "-")
        if isinstance(value, Mapping):
            given = dict(value)
            if name == "method" and "name" in given:
                yield f"--method={given.pop('name')}"
            yield from _words(given, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield flag if value else f"--{prefix}no-{name}".replace("_", "-")
        else:
            yield f"{flag}={value}"
