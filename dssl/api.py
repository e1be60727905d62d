"""The verbs for Python: what the commands do, by the same code, with the same defaults, errors and run folders."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from markupsafe import escape
from numpy.typing import NDArray
from torch import nn

from dssl.commands import evaluate as evaluate_command
from dssl.commands import export as export_command
from dssl.commands import train as train_command
from dssl.commands import views as views_command
from dssl.commands.options import parse
from dssl.config import AdaptConfig, CheckpointConfig, HealthConfig, OptimizerConfig, Precision, RunConfig
from dssl.config_io import flat, path_of
from dssl.data import Quarantine, open_source
from dssl.data.objects import Data, named
from dssl.data.source import Split
from dssl.distributed import pick_device
from dssl.errors import DsslError, Stopped, choices
from dssl.methods import MethodSettings, RelationConfig
from dssl.models import build_encoder, named_encoder
from dssl.recipes import RECIPES
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
    encoder: str | nn.Module
    init: str | Path | None
    teacher: str | Path | None
    teacher_encoder: str | None
    method: str | MethodSettings | Table
    relation: RelationConfig | Table
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
    """A run of ``dssl train`` in its folder, finished or not; a notebook shows its verdict, curves, views and next steps."""

    path: Path
    """The run's folder."""

    @property
    def data(self) -> RunData:
        """Its configuration, curves and records, read again at each call."""
        return read_run(self.path)

    @property
    def config(self) -> RunConfig:
        """The settings that it was started with."""
        return self.data.config

    @property
    def verdict(self) -> Verdict:
        """Its health, with reason and remedies."""
        return self.data.verdict

    @property
    def finished(self) -> bool:
        """Whether all its epochs are done."""
        return self.data.finished

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return list(RunFolder(self.path).metrics())

    def encoder(self, module: nn.Module | None = None) -> nn.Module:
        """The encoder of its newest checkpoint, in evaluation mode.

        Args:
            module: Of a run with an encoder of your own: a module of the same structure, whose copy gets the weights.
        """
        return load_encoder(self.path, encoder=module)

    def next_steps(self) -> list[str]:
        """Calls that follow: resume a run that was stopped; measure and export one that is finished."""
        config = self.config
        objects = {name: f", {name}=..." for name in config.python_objects}
        if not self.finished:
            command = shlex.join(["dssl", "train", "--resume", str(self.path)])
            return [f"the same call of dssl.train resumes it{'' if objects else f', and so does: {command}'}"]
        against = "untrained" if config.init is None else "start"
        return [
            f'dssl.evaluate("{self.path}"{"".join(objects.values())}, against="{against}")',
            f'dssl.export("{self.path}"{objects.get("encoder", "")})',
        ]

    def __repr__(self) -> str:
        return "\n".join([run_report.summary([self.data]), *(f"next: {step}" for step in self.next_steps())])

    def _repr_html_(self) -> str:
        steps = [f"Next: {step}" for step in self.next_steps()]
        page = run_report.html([self.data], command=f"dssl report {self.path}", notes=steps)
        return f'<iframe srcdoc="{escape(page)}" width="100%" height="700" style="border: 0"></iframe>'


Weights = str | Path | Run
"""A run, its folder, a checkpoint, an export or a file of foreign weights."""


def train(
    recipe: str,
    *,
    data: Data | None = None,
    out: str | Path | None = None,
    keep_head: bool = False,
    log: Sequence[str] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Pretrain or adapt an encoder, as ``dssl train RECIPE`` does; the same call resumes a run that was stopped.

    Ctrl-C saves the run and returns it.

    Args:
        recipe: ``shapes``, ``cifar10``, ``imagenet``, ``folder``, ``adapt`` or ``robust``.
        data: What ``--data`` takes, or images that are Python objects: anything that ``dssl.as_source`` takes.
        out: The run's folder, by default ``runs/RECIPE``.
        keep_head: With ``robust``: so gently that a classifier on the old features stays in use.
        log: Trackers that get the curves, such as ``["wandb"]``; by default those that a resumed run had.
        **settings: The fields of ``RunConfig``. A group of them is a table or a whole configuration: ``optimizer={"rate": 0.1}``.
            ``encoder`` is a name, or a module from images to vectors or feature maps, of which a copy is trained: its own weights
            are the start. ``adapt`` and ``robust`` compare the result with it.
    """
    given: dict[str, Any] = {**settings}
    words = [recipe, *(["--keep-head"] if keep_head else [])]
    with ExitStack() as held:
        module = given.get("encoder")
        if isinstance(module, nn.Module):
            given["encoder"] = held.enter_context(named_encoder(module))
            if recipe in RECIPES and "init" in RECIPES[recipe]():
                given.setdefault("init", given["encoder"])
        for name, value in {"data": held.enter_context(named(data)), "out": out}.items():
            words += [] if value is None else [f"--{name}={value}"]
        words += [*_words(given), *([] if log is None else ["--log", *log])]
        arguments = parse(train_command.Arguments, words, base=train_command.base)
        if isinstance(module, nn.Module) and "adapt.evaluation_size" not in arguments.typed:
            arguments = replace(arguments, settings=_at_its_size(arguments.settings))
        try:
            train_command.run(arguments)
        except Stopped:  # before its first step
            if not RunFolder(arguments.out).has_run:
                raise KeyboardInterrupt from None
    return Run(arguments.out)


def open_run(path: str | Path) -> Run:
    """A run by its folder, which ``dssl train`` or ``dssl.train`` has written.

    Args:
        path: The folder.
    """
    return Run(read_run(Path(path)).path)


def evaluate(
    weights: Weights,
    *,
    data: Data | None = None,
    test: Data | None = None,
    against: Sequence[Weights] | Weights | None = None,
    corruptions: bool = False,
    protocols: Sequence[str] = ("quick",),
    encoder: str | nn.Module | None = None,
    image_size: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto",
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure an encoder on labelled images, as ``dssl evaluate`` does; what it writes as JSON is also returned.

    Args:
        weights: A run, its folder, a checkpoint, an export or a file of foreign weights.
        data: Labelled images, by name or as Python objects; by default those of the run, if they have a name.
        test: Test images, if the data has no test split; by default a fifth of each class is set aside.
        against: Encoders to compare with, image by image: ``start``, ``untrained``, ``imagenet``, ``supervised``, runs or files.
        corruptions: Measure on corrupted test images instead.
        protocols: Any of ``knn``, ``probe``, ``linear-sgd``, ``finetune`` and the others that ``dssl evaluate --help`` lists.
        encoder: Its name, where the file does not say it, or a module for an encoder of your own.
        image_size: In pixels, where the file does not say it or another one is wanted.
        out: The folder for the results, by default ``evaluation`` in the run's folder.
        seed: Of splits and of protocols that train.
        device: Where it computes; ``auto`` takes a GPU if there is one.
        threads: Threads that decode images, by default one per core.
    """
    others = [against] if isinstance(against, str | Path | Run) else against
    with ExitStack() as held:
        arguments = evaluate_command.Arguments(
            weights=_path(weights), data=held.enter_context(named(data)), test=held.enter_context(named(test)),
            against=None if others is None else tuple(str(_path(other)) for other in others), corruptions=corruptions,
            protocols=tuple(protocols), encoder=held.enter_context(named_encoder(encoder)), image_size=image_size,
            out=None if out is None else path_of(out), seed=seed, device=device, threads=threads,
        )  # fmt: skip
        evaluate_command.run(arguments)
    name = "robustness.json" if corruptions else "comparison.json" if others is not None else EVALUATION_FILE
    content: dict[str, Any] = json.loads((evaluate_command.folder_of(arguments) / name).read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Embeddings:
    """Vectors of images, in their order."""

    vectors: NDArray[np.float32]
    """One row per image that could be read."""
    names: tuple[str, ...]
    """Paths, or what else tells the images apart."""
    labels: NDArray[np.int64] | None
    """Classes by number, where the images have any."""


def embed(
    weights: Weights,
    data: Data,
    *,
    split: Split = "train",
    encoder: str | nn.Module | None = None,
    image_size: int | None = None,
    batch_size: int = 256,
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto",
    threads: int | None = None,
) -> Embeddings:
    """The encoder's vectors of images, in memory; ``dssl embed`` writes them to files of any size.

    Args:
        weights: A run, its folder, a checkpoint, an export or a file of foreign weights.
        data: Images, by name or as Python objects.
        split: ``train`` or ``test``, of data that has both.
        encoder: Its name, where the file does not say it, or a module for an encoder of your own.
        image_size: In pixels, where the file does not say it or another one is wanted.
        batch_size: Images that go through the encoder at a time.
        device: Where it computes; ``auto`` takes a GPU if there is one.
        threads: Threads that decode images, by default one per core.
    """
    with named_encoder(encoder) as name, named(data) as text:
        assert text is not None
        loaded = open_weights(_path(weights), encoder=name, image_size=image_size)
        network = loaded.network.to(pick_device(device))
        loaded = replace(loaded, network=network, batch_size=batch_size, threads=threads)
        source = open_source(text, split=split, channels=loaded.channels, value_range=loaded.value_range)
        features = loaded.features(source, quarantine=Quarantine(source, max_share=1.0))
    names = tuple(source.label_of(row) for row in features.rows.tolist())
    labels = None if source.labels is None else np.asarray(source.labels)[features.rows]
    return Embeddings(features.values.numpy(), names, labels)


def export(
    weights: Weights,
    *,
    formats: Sequence[str] = ("safetensors",),
    out: str | Path | None = None,
    encoder: str | nn.Module | None = None,
    image_size: int | None = None,
) -> Path:
    """Write an encoder for other programs, each file verified by loading it back, as ``dssl export``; the folder of the files.

    Args:
        weights: A run, its folder, a checkpoint, an export or a file of foreign weights.
        formats: Any of ``safetensors``, ``torchvision``, ``timm``, ``detectron2``, ``onnx``, ``torch`` and ``hub``.
        out: The folder for the files, by default ``export`` in the run's folder.
        encoder: Its name, where the file does not say it, or a module for an encoder of your own.
        image_size: In pixels, where the file does not say it or another one is wanted.
    """
    with named_encoder(encoder) as name:
        arguments = export_command.Arguments(
            weights=_path(weights), formats=tuple(formats), out=None if out is None else path_of(out), encoder=name,
            image_size=image_size,
        )  # fmt: skip
        export_command.run(arguments)
    return export_command.folder_of(arguments)


def views(
    data: Data,
    *,
    policies: Sequence[str] = views_command.Arguments.heavy,
    out: str | Path = "views.html",
    standard: str | None = None,
    size: int | None = None,
    seed: int = 0,
) -> Path:
    """Draw what policies make of images, with the measured strength of each, as ``dssl views`` does; the page.

    Args:
        data: Images, by name or as Python objects.
        policies: Heavy policies, one row each, such as ``ra(2,5)``.
        out: The page to write; the contact sheet has the same name with .png.
        standard: The standard policy; by default that of ``dssl.train`` for these images.
        size: Side of a view in pixels; by default that of ``dssl.train`` for these images.
        seed: Selects the images and their views.
    """
    with named(data) as text:
        assert text is not None
        arguments = views_command.Arguments(
            data=text, heavy=tuple(policies), out=path_of(out), standard=standard, image_size=size, seed=seed
        )
        views_command.run(arguments)
    return arguments.out


def _at_its_size(config: RunConfig) -> RunConfig:
    """A module that is built for one size, such as a transformer, is measured at that of its views."""
    if config.adapt is None:
        return config
    try:
        build_encoder(config.encoder, image_size=config.adapt.evaluation_size, channels=config.channels)
    except DsslError:
        return replace(config, adapt=replace(config.adapt, evaluation_size=config.image_size))
    return config


def _path(weights: Weights) -> Path:
    return weights.path if isinstance(weights, Run) else path_of(weights)


def _words(settings: Mapping[str, Any]) -> Iterator[str]:
    """The settings as the words of a command line, so that they are checked where flags are."""
    names = [field.name for field in fields(RunConfig)]
    plain: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in names:
            raise DsslError(f"dssl.train: {choices('setting', name, names)}")
        if isinstance(value, MethodSettings):
            value = {"name": value.name, **vars(value)}
        plain[name] = vars(value) if is_dataclass(value) and not isinstance(value, type) else value
    for name, value in flat(plain).items():
        flag = name.replace("_", "-")
        yield f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}"
