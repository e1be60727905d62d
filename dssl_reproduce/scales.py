"""From an experiment of the paper to a job: the settings of each scale, the rows that ours adds, and the jobs of a table."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dssl import config_io, recipes
from dssl.config import OptimizerConfig, RunConfig
from dssl.errors import DsslError, choices
from dssl.evaluation.classifier import SUPERVISED, Training
from dssl.graph import named_graph
from dssl.methods import (
    BarlowTwinsConfig,
    BYOLConfig,
    DINOConfig,
    LeJEPAConfig,
    MethodSettings,
    MoCoConfig,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
    VICRegConfig,
)  # fmt: skip
from dssl.recipes import PAPER_HEAVY
from dssl_reproduce import BASELINES, EQUAL_COMPUTE, Experiment, PaperCell, Target, our_cell

NO_HEAVY = "ra(2,5)"
"""The heavy policy of a graph without heavy views: a single value, so that equal runs have equal settings."""
HEAVY_WEIGHT = 0.5
"""The weight of the heavy edges in the second DSSL row: the best below 1 on held-out images (docs/results/tuning.md)."""
WEIGHTED = f"s1<->s2, h1->s1:{HEAVY_WEIGHT:g}, h2->s2:{HEAVY_WEIGHT:g}"
_UNDIRECTED = ("", "standard", "standard2", "heavy", "heavy2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One setting for a whole table: what is trained on what, for how long, and how the result is measured."""

    name: str
    differs: tuple[str, ...]
    """Why the numbers differ from the paper's even if everything is right."""
    settings: Callable[[str, str], RunConfig]
    """From a data set and a method."""
    training: Callable[[str], Training]
    """Of the supervised rows, from a data set."""
    linear: Callable[[str, str], str]
    """The protocol of dssl.evaluation that gives the linear accuracy, from a data set and a method."""
    labels: int | None = None
    """Training images with labels for kNN and the probe; all by default."""
    adds_rows: bool = False
    """Whether its tables have the rows of ``with_our_rows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run to train and measure."""

    name: str
    """Of its run folder and its result; equal settings have equal names on every machine."""
    scale: str
    kind: str
    """``pretrained``, or one of ``BASELINES``."""
    config: RunConfig
    """Its data is the data set's bare name. A baseline uses only data, size, encoder, limit and seed."""
    training: Training | None
    """Of a supervised job."""
    protocols: tuple[str, ...]
    labels: int | None
    fingerprint: str
    corruptions: bool = False
    """Whether accuracy under corruption is measured, too; it changes neither name nor fingerprint."""


def config_of(experiment: Experiment, scale: Scale, *, seed: int) -> RunConfig:
    """The configuration of a run; its data is the data set's bare name, since a recipe does not say where images are."""
    # a baseline uses none of a method's settings: it has SimCLR's, so that tuning another method leaves its results valid
    method = "simclr" if experiment.method in BASELINES else experiment.method
    config = dataclasses.replace(scale.settings(experiment.data, method), data=experiment.data, seed=seed)
    if experiment.method in BASELINES:
        return dataclasses.replace(config, graph="standard", heavy=NO_HEAVY)
    heavy = any(view.policy == "heavy" for view in named_graph(experiment.graph).made)
    epochs = config.epochs * experiment.epochs
    if not epochs.is_integer():
        raise DsslError(
            f"{experiment.epochs:g} times the {config.epochs} epochs of scale {scale.name} is not a whole number: "
            "choose a scale with more epochs, such as cpu-few"
        )
    warmup = config.optimizer.warmup_epochs * experiment.epochs
    config = dataclasses.replace(
        config, epochs=int(epochs), optimizer=dataclasses.replace(config.optimizer, warmup_epochs=warmup),
        graph=experiment.graph, heavy=experiment.heavy if heavy else NO_HEAVY,
        standard=experiment.standard or config.standard,
    )  # fmt: skip
    changes: dict[str, dict[str, Any]] = {}
    for name, value in experiment.settings:
        section, _, setting = name.rpartition(".")
        changes.setdefault(section or "method", {})[setting] = value
    return config_io.build(RunConfig, changes, base=vars(config), where="experiment")


def job_of(experiment: Experiment, scale: Scale, *, seed: int, corruptions: bool = False) -> Job:
    """The job of an experiment."""
    config = config_of(experiment, scale, seed=seed)
    kind = experiment.method if experiment.method in BASELINES else "pretrained"
    training = scale.training(experiment.data) if kind == "supervised" else None
    protocols = ("supervised",) if training else ("knn", scale.linear(experiment.data, experiment.method))
    plain: dict[str, Any] = {"run": config_io.fingerprint(config), "protocols": protocols}
    if training is not None:
        plain["training"] = dataclasses.asdict(training)
    elif kind != "pretrained":
        plain["kind"] = kind
    fingerprint = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
    words = [experiment.data, experiment.method, experiment.graph]
    if any(view.policy == "heavy" for view in named_graph(config.graph).made):
        words.append("heavy" if config.heavy == PAPER_HEAVY else config.heavy)
    words += [f"{name} {value}" for name, value in experiment.settings]
    words += [f"{config.epochs} epochs"] if experiment.epochs != 1 else []
    slug = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")
    return Job(
        name=f"{slug}-seed{seed}-{fingerprint[:6]}", scale=scale.name, kind=kind, config=config, training=training,
        protocols=protocols, labels=scale.labels, fingerprint=fingerprint, corruptions=corruptions,
    )  # fmt: skip


def jobs_of(targets: Iterable[Target], scale: Scale, *, seeds: Sequence[int], rows: Sequence[str] = ()) -> list[Job]:
    """Every different job of the targets, or of these rows of them, however many entries it serves.

    The first seed of all of them comes first.
    """
    cells = [cell for target in targets for cell in with_our_rows(target, scale).cells]
    for row in rows:
        if row not in (names := dict.fromkeys(cell.row for cell in cells)):
            raise choices("row", row, names)
    cells = [cell for cell in cells if not rows or cell.row in rows]
    experiments: dict[Experiment, bool] = {}
    """With whether an entry needs its accuracy under corruption."""
    for cell in cells:
        if (one := cell.experiment) is not None:
            experiments[one] = experiments.get(one, False) or cell.measure is not None
    jobs = [job_of(one, scale, seed=seed, corruptions=needed) for seed in seeds for one, needed in experiments.items()]
    # different experiments may be the same run
    return list({job.name: job for job in (*jobs, *(job for job in jobs if job.corruptions))}.values())


def with_our_rows(target: Target, scale: Scale) -> Target:
    """The target with the rows that the paper lacks, if the scale adds them.

    First raw pixels, the untrained encoder and, where there is DSSL, two standard pairs: equal compute in as many steps. After a
    plain DSSL row with the paper's heavy policy, the same with ``HEAVY_WEIGHT``. Last the encoder trained with labels.
    """
    if not scale.adds_rows or target.complete or target.measure != "linear accuracy, %":
        return target
    columns: dict[str, Experiment] = {}
    """An experiment of each column: the first directed one where there is one."""
    pretrained = [
        (cell.column, one) for cell in target.cells if (one := cell.experiment) and one.method not in BASELINES
    ]
    for column, one in pretrained:
        if column not in columns or (columns[column].graph in _UNDIRECTED and one.graph not in _UNDIRECTED):
            columns[column] = one

    def baseline(row: str, kind: str) -> list[PaperCell]:
        return [our_cell(row, name, Experiment(data=one.data, method=kind)) for name, one in columns.items()]

    cells = baseline("raw pixels", "pixels") + baseline("untrained encoder", "untrained")
    directed = [(name, one) for name, one in columns.items() if one.graph not in _UNDIRECTED]
    cells += [our_cell(EQUAL_COMPUTE, name, one, graph="standard2", heavy="") for name, one in directed]
    compared: list[tuple[str, str]] = []
    for cell in target.cells:
        cells.append(cell)
        one = cell.experiment
        if one is None or one.graph not in ("dssl", "ablation-j"):
            continue
        compared.append((cell.row, EQUAL_COMPUTE))
        if one.heavy == PAPER_HEAVY and not one.settings:  # one thing at a time
            row = f"{cell.row}, heavy edges {HEAVY_WEIGHT:g}"
            cells.append(our_cell(row, cell.column, one, graph=WEIGHTED))
            compared.append((row, EQUAL_COMPUTE))
    cells += baseline("supervised, equal compute", "supervised")
    pairs = tuple(dict.fromkeys((*target.compare_rows, *compared)))
    return dataclasses.replace(target, cells=tuple(cells), compare_rows=pairs)


_SGD = OptimizerConfig(weight_decay=5e-4)
_ADAMW = OptimizerConfig(name="adamw", weight_decay=0.05, fixed_predictor_rate=True)
_DINO = DINOConfig(
    hidden=512, output=128, prototypes=256, momentum=0.95, balance="sinkhorn", target_temperature=0.025,
    final_target_temperature=0.025,
)  # fmt: skip
_TUNED: Mapping[str, tuple[int, float, OptimizerConfig, MethodSettings]] = {
    # batch size, peak rate, optimiser, heads: each chosen on the method's own standard pair (docs/results/tuning.md)
    "simclr": (128, 0.1, _SGD, SimCLRConfig(output=128, temperature=0.2)),
    "simsiam": (32, 0.002, _ADAMW, SimSiamConfig(hidden=512, output=512, bottleneck=128)),
    "byol": (32, 0.002, _ADAMW, BYOLConfig(hidden=512, output=128, momentum=0.95)),
    "vicreg": (128, 0.002, _ADAMW, VICRegConfig(hidden=512, output=512)),
    "barlowtwins": (128, 0.004, _ADAMW, BarlowTwinsConfig(hidden=512, output=512)),
    "lejepa": (128, 0.002, _ADAMW, LeJEPAConfig(hidden=512)),
    "moco": (128, 0.002, _ADAMW, MoCoConfig(hidden=512, output=128, momentum=0.95)),
    "swav": (128, 0.004, _ADAMW, SwAVConfig(hidden=512, prototypes=256)),
    "dino": (128, 0.002, _ADAMW, _DINO),
}
_ALL, _FEW, _FEWEST = 50_000, 5_000, 1_000
"""Images of the regimes; with a tenth and a fiftieth of them, as many steps in ten and fifty times as many epochs."""
_EPOCHS = 2
"""Of ``cpu``; ``hour`` has ten times as many. DSSL then makes 400,000 views: about 430 CPU-seconds on one core."""


def _settings(data: str, method: str, *, encoder: str, images: int, epochs: int) -> RunConfig:
    batch_size, peak, optimizer, heads = _TUNED[method]
    optimizer = dataclasses.replace(optimizer, rate=peak * 256 / batch_size, warmup_epochs=0.05 * epochs)
    return RunConfig(
        data=data, normalization=data, limit=images, encoder=encoder, method=heads, epochs=epochs,
        batch_size=batch_size, knn_every=max(1, epochs // 5), optimizer=optimizer,
    )  # fmt: skip


def _small_scale(name: str, *, images: int, epochs: int, encoder: str = "whitened") -> Scale:
    return Scale(
        name=name,
        differs=(
            f"{images:,} images and {epochs} epochs (the paper: 50,000 and 800; ImageNet: all and 100)",
            f"the encoder `{encoder}` with narrow heads instead of ResNet-18",
            "one optimiser, batch size, rate and heads per method; BYOL's moving average starts at 0.95",
            "ImageNet's images at 32 px",
            "the linear accuracy is a logistic regression solved to its optimum on features of 50,000 unaugmented images",
        ),
        settings=lambda data, method: _settings(data, method, encoder=encoder, images=images, epochs=epochs),
        # one view of an image where DSSL has four
        training=lambda data: dataclasses.replace(SUPERVISED, epochs=4 * epochs),
        linear=lambda data, method: "probe",
        labels=_ALL,
        adds_rows=True,
    )


def _paper_training(data: str) -> Training:
    if data == "cifar10":
        return SUPERVISED
    # the usual ImageNet schedule: the paper quotes the result and states no settings
    return dataclasses.replace(SUPERVISED, epochs=90, weight_decay=1e-4, policy="crop(0.08,1) > flip")


SCALES: dict[str, Scale] = {
    scale.name: scale
    for scale in (
        _small_scale("cpu", images=_ALL, epochs=_EPOCHS),
        _small_scale("cpu-few", images=_FEW, epochs=10 * _EPOCHS),
        _small_scale("cpu-1000", images=_FEWEST, epochs=50 * _EPOCHS),
        _small_scale("hour", images=_ALL, epochs=10 * _EPOCHS, encoder="whitened-quadrants"),
        _small_scale("hour-few", images=_FEW, epochs=100 * _EPOCHS, encoder="whitened-quadrants"),
        Scale(
            name="paper",
            differs=(
                "the last epoch on the whole test set; the published code picks the best epoch on the test set and "
                "drops its last batch",
            ),
            settings=lambda data, method: recipes.recipe(data, method=method),
            training=_paper_training,
            linear=lambda data, method: "linear-sgd" if data == "cifar10" or method == "simclr" else "linear-lars",
        ),
    )
}  # fmt: skip
