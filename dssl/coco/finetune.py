"""From an encoder to box and mask AP on COCO: the task for the training engine, then detections, scores and the page."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dssl import config_io, loop
from dssl.coco.annotations import CocoData, CocoImage, read_split
from dssl.coco.batches import CocoBatches, Sample, read_pixels, resize, scaled_size, to_tensor
from dssl.coco.config import CocoConfig
from dssl.coco.detector import Detector, Origin, build_detector
from dssl.coco.results import Result, Scores, require_pycocotools, score, to_results
from dssl.coco.watch import LossWatch
from dssl.data.parallel import in_threads
from dssl.distributed import batchnorm_across_ranks
from dssl.errors import DsslError
from dssl.files import write_atomically
from dssl.log import Log
from dssl.precision import autocast
from dssl.run import RunFolder
from dssl.state import Pace
from dssl.version import VERSION
from dssl.world import World

TASK = "coco"
_MEASURED_SIZE = 224
"""Pixels of the images on which the precision is measured."""
_AHEAD = 16
"""Scored images in memory at a time."""
COMPARABLE = (
    "torchvision's Mask R-CNN, not Detectron's, which the paper used: heads, initialisation, anchors and resampling differ in "
    "detail, so that these numbers are not strictly comparable with the paper's table; compare runs of this command."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a page about a scored run shows."""

    test: CocoData
    results: list[Result]
    protocol: dict[str, Any]
    losses: list[tuple[int, float, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoResult:
    """How a fine-tuning ended; scores only where it reached its last step, on the first process."""

    ending: loop.Ending
    scores: Scores | None
    origin: Origin
    findings: Findings | None = None


def finetune(config: CocoConfig, out: Path | str) -> CocoResult:
    """Fine-tune Mask R-CNN in the folder ``out`` or continue there, then score the last weights on the test split."""
    require_pycocotools()
    folder = RunFolder(Path(out))

    def changes(kept: dict[str, Any]) -> list[str]:
        if kept.get("task") != TASK:
            raise DsslError(f"{folder.path} holds a run of another kind (pretraining); name another --out")
        return config_io.difference(
            config_io.read(kept["config"], default=config, where=str(folder.config_file)), config
        )

    with loop.open_run(folder, changes=changes, device=config.device, batch_size=config.batch_size) as world:
        return _run(config, folder, world)


def _run(config: CocoConfig, folder: RunFolder, world: World) -> CocoResult:
    kept, resumed = loop.what_is_there(folder, world)
    train, test = _data(config)
    known = Origin.of(kept["origin"]) if kept is not None and resumed is not None else None
    detector, origin = build_detector(config, classes=len(train.category_ids), origin=known)
    precision, why = loop.precision_of(
        config.precision, kept, world,
        # a part of an image is enough: what is compared hardly depends on the size
        encoder=detector.network.backbone, image_size=min(config.test_size, _MEASURED_SIZE), channels=3,
    )  # fmt: skip
    header = {
        "task": TASK,
        "dssl_version": VERSION,
        "config": config_io.to_dict(config),
        "origin": origin.plain(),
        "categories": dict(zip(map(str, train.category_ids), train.category_names, strict=True)),
        "fingerprint": train.fingerprint,
    }
    images = train.trainable()
    loop.describe(
        folder, world, header | {"precision": precision, "images": len(images), "test_fingerprint": test.fingerprint}
    )
    settings = loop.Settings(
        pace=Pace(
            total=config.total, steps_per_epoch=len(images) / config.batch_size, round=config.round, counted="step"
        ),
        batch_size=config.batch_size,
        data=f"{config.data} {config.train}",
        precision=precision,
        seed=config.seed,
        checkpoint=config.checkpoint,
        look_every=config.look_every,
        clip=config.clip,
    )
    task = Finetuning(config, images, detector, world=world, header=header)
    greeting = [origin.text, *_greeting(config, train, test, images, world, why), COMPARABLE]
    ending = loop.run(task, settings, folder=folder, world=world, resumed=resumed, greeting=greeting)
    if ending.step < ending.total or ending.signal is not None or ending.opinion.verdict == "diverged":
        return CocoResult(ending=ending, scores=None, origin=origin)
    with autocast(world.device, precision):
        results = detect_all(detector, test, config, world=world)
    if not world.first:
        return CocoResult(ending=ending, scores=None, origin=origin)
    scores = score(test, results)
    return CocoResult(
        ending=ending,
        scores=scores,
        origin=origin,
        findings=_write(config, folder, train, test, results, scores, origin, ending),
    )


class Finetuning:
    """Mask R-CNN on annotated images: ``loop.Task`` for ``dssl evaluate-coco``."""

    name = "detector"

    def __init__(
        self,
        config: CocoConfig,
        images: Sequence[CocoImage],
        detector: Detector,
        *,
        world: World,
        header: Mapping[str, Any],
    ) -> None:
        self.config, self.images, self.world, self.header = config, images, world, header
        if world.size > 1 and not config.frozen:
            batchnorm_across_ranks(detector)
        self.module = self.objective = detector.to(world.device).train()
        self.fixed_rate = config.rate_at(0)  # no group of the optimiser is fixed
        self.optimizer = torch.optim.SGD(
            [parameter for parameter in detector.parameters() if parameter.requires_grad],
            lr=config.rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        self.watch = LossWatch()

    def batches(self, start: int) -> AbstractContextManager[CocoBatches]:
        return CocoBatches(self.images, self.config, start=start, rank=self.world.rank, world_size=self.world.size)

    def place(self, batch: tuple[Sample, ...]) -> list[Sample]:
        return [sample.to(self.world.device) for sample in batch]

    def rate(self, step: int) -> float:
        return self.config.rate_at(step)

    def after_step(self, step: int) -> None:
        """The weights need nothing more."""

    def begin(self, log: Log) -> None:
        """Nothing is drawn before the first step."""

    def after_round(self, step: int, log: Log) -> None:
        """Scores are taken once, from the last weights: a checkpoint chosen on the test split would flatter."""


def detect_all(detector: Detector, data: CocoData, config: CocoConfig, *, world: World) -> list[Result]:
    """COCO results for every image of the split, shared out among the processes; the first one gets all of them."""
    mine = data.images[world.rank :: world.size]

    def prepared(index: int) -> torch.Tensor:
        image = mine[index]
        size = scaled_size(image.width, image.height, shorter=config.test_size, longest=config.max_size)
        return to_tensor(resize(read_pixels(image), size))

    detector.eval()
    results: list[Result] = []
    for begin in range(0, len(mine), _AHEAD):
        indices = range(begin, min(begin + _AHEAD, len(mine)))
        for index, pixels in zip(indices, in_threads(prepared, indices, threads=config.threads), strict=True):
            image = mine[index]
            found = detector.detect([pixels.to(world.device)], sizes=[(image.height, image.width)])
            results += to_results(image, found[0], data.category_ids)
    detector.train()
    if world.size == 1:
        return results
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, results)
    return sorted((one for part in parts for one in part), key=lambda one: (one["image_id"], -one["score"]))


def _data(config: CocoConfig) -> tuple[CocoData, CocoData]:
    train = read_split(config.data, config.train, limit=config.train_images)
    test = read_split(config.data, config.test, limit=config.test_images)
    if not train.trainable():
        raise DsslError(f"{train.name} has no image with an object: there is nothing to train on")
    if not test.trainable():
        raise DsslError(f"{test.name} has no image with an object: there is nothing to score")
    if (train.category_ids, train.category_names) != (test.category_ids, test.category_names):
        raise DsslError(f"{train.name} and {test.name} have different categories: expected the same ids and names")
    return train, test


def _greeting(
    config: CocoConfig, train: CocoData, test: CocoData, images: Sequence[CocoImage], world: World, why: str
) -> list[str]:
    norm = "frozen" if config.frozen else "trained, over all processes" if world.size > 1 else "trained"
    processes = f"{world.size} processes on " if world.size > 1 else ""
    objects = sum(len(image.objects) for image in images)
    return [
        f"{train.name}: {len(images):,} images with {objects:,} objects of {len(train.category_ids)} categories; "
        f"{config.total:,} steps of {config.batch_size} on {processes}{world.device}; BatchNorm {norm}; {why}",
        *(f"{train.name}: {note}" for note in train.notes),
        *(f"{test.name}: {note}" for note in test.notes if test.name != train.name),
    ]


def _write(
    config: CocoConfig,
    folder: RunFolder,
    train: CocoData,
    test: CocoData,
    results: list[Result],
    scores: Scores,
    origin: Origin,
    ending: loop.Ending,
) -> Findings:
    """results.json as COCO's tools read it, and evaluation.json with the protocol."""
    from dssl.weights import checkpoint

    assert ending.checkpoint is not None
    protocol = {
        "detector": "torchvision Mask R-CNN with a feature pyramid on all four stages",
        "note": COMPARABLE,
        "weights": origin.plain(),
        "config": config_io.to_dict(config),
        "steps": config.total,
        "rate drops at": list(config.drops),
        "batchnorm": "frozen" if config.frozen else "trained over the global batch",
        "train": {"name": train.name, "images": len(train.trainable()), "fingerprint": train.fingerprint},
        "test": {"name": test.name, "images": len(test.images), "fingerprint": test.fingerprint},
        "left out": [*train.notes, *test.notes],
        "checkpoint": {"file": ending.checkpoint.name, "sha256": checkpoint.read(ending.checkpoint).header["sha256"]},
        "scored": "the weights of the last step, once",
    }
    write_atomically(folder.path / "results.json", [json.dumps(results).encode(), b"\n"])
    record = {"scores": scores.plain(), "protocol": protocol}
    write_atomically(folder.path / "evaluation.json", [json.dumps(record, indent=2).encode(), b"\n"])
    return Findings(test=test, results=results, protocol=protocol, losses=_losses(folder))


def _losses(folder: RunFolder) -> list[tuple[int, float, dict[str, float]]]:
    """Step, loss and its parts, from the run's own record."""
    lines = [json.loads(line) for line in folder.metrics_file.read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["loss"], line["parts"]) for line in lines if "parts" in line]
