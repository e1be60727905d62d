"""From an encoder to box and mask AP on COCO: fine-tuning for the training loop, then detections and scores."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dssl import config_io, loop
from dssl.config import OptimizerConfig, Precision
from dssl.data.pipeline import in_threads
from dssl.distributed import World, batchnorm_across_ranks
from dssl.errors import DsslError
from dssl.files import write_text
from dssl.loop import Ending
from dssl.optim import build_optimizer
from dssl.precision import autocast, precision_of
from dssl.run import EVALUATION_FILE, EVALUATION_PAGE, Run
from dssl.state import LossMonitor, RunLength
from dssl.version import VERSION
from dssl.weights import checkpoint
from dssl_coco import CocoConfig
from dssl_coco.data import CocoBatches, CocoData, CocoImage, Sample, read_scaled, read_split, scaled_size
from dssl_coco.detector import Detector, Origin, build_detector
from dssl_coco.results import Detection, Scores, require_pycocotools, score, to_results, write_page

TASK = "coco"
_MEASURED_SIZE = 224
"""Side in pixels of the images on which the precision is measured."""
_AHEAD = 16
"""Scored images in memory at a time."""
COMPARABLE = (
    "this is torchvision's Mask R-CNN, not Detectron's, which the paper used: heads, initialisation, anchors and resampling "
    "differ in detail, so these numbers are not strictly comparable with the paper's table; compare runs of this command."
)
_REMEDIES = (
    "lower --rate by half or more, or lengthen --warmup",
    "set --clip 10",
    "use --norm sync where the frozen statistics do not fit the weights, and --precision fp32",
)


def finetune(config: CocoConfig, out: Path | str, *, command: str = "") -> tuple[Ending, Scores | None]:
    """Fine-tune Mask R-CNN in the folder ``out``, or resume there, then score the last weights on the test split.

    There are scores only after the last step, on the first process. Their page shows the ``command``.
    """
    require_pycocotools()
    with Run.open(Path(out), config, task=TASK) as opened:
        return _run(config, opened, command)


def _run(config: CocoConfig, opened: Run, command: str) -> tuple[Ending, Scores | None]:
    folder, world, kept, resumed = opened.folder, opened.world, opened.kept, opened.resumed
    assert folder is not None
    train, test = _data(config)
    begun = Origin.of(kept["origin"]) if kept is not None and resumed is not None else None
    detector, origin = build_detector(config, classes=len(train.category_ids), origin=begun)
    precision, why = precision_of(
        config.precision, kept, world,
        # part of an image is enough: which precision is faster hardly depends on the size
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
    opened.describe(header | {"precision": precision, "images": len(images), "test_fingerprint": test.fingerprint})
    task = Finetuning(config, images, detector, world=world, header=header, precision=precision)
    ending = loop.run(task, opened, intro=[origin.text, *_intro(config, train, test, world, why), COMPARABLE])
    if ending.step < ending.total or ending.signal is not None or ending.verdict.status == "diverged":
        return ending, None
    with autocast(world.device, precision):
        results = detect_all(detector, test, config, world=world)
    if not world.first:
        return ending, None
    scores = score(test, results)
    assert ending.checkpoint is not None
    protocol = {
        "detector": "torchvision Mask R-CNN with a feature pyramid on all four stages",
        "note": COMPARABLE,
        "weights": origin.plain(),
        "config": config_io.to_dict(config),
        "precision": precision,
        "processes": world.size,
        "steps": config.total,
        "rate drops at": list(config.drops),
        "batchnorm": "frozen" if config.frozen else "trained over the global batch",
        "train": {"name": train.name, "images": len(images), "fingerprint": train.fingerprint},
        "test": {"name": test.name, "images": len(test.images), "fingerprint": test.fingerprint},
        "left out": [*train.notes, *test.notes],
        "checkpoint": {"file": ending.checkpoint.name, "sha256": checkpoint.read(ending.checkpoint).header["sha256"]},
        "scored": "the weights of the last step, once",
    }
    write_text(folder.path / "results.json", json.dumps(results) + "\n")
    written = {"scores": scores.plain(), "protocol": protocol}
    write_text(folder.path / EVALUATION_FILE, json.dumps(written, indent=2) + "\n")
    write_page(folder.path / EVALUATION_PAGE, test, scores, results, protocol=protocol, command=command)
    return ending, scores


class Finetuning(loop.Task[tuple[Sample, ...]]):
    """Mask R-CNN as the loop trains it. Only the last weights are scored: choosing a checkpoint would use the test split."""

    name = "detector"

    def __init__(
        self, config: CocoConfig, images: Sequence[CocoImage], detector: Detector, *, world: World,
        header: Mapping[str, Any], precision: Precision,
    ) -> None:  # fmt: skip
        self.config, self.images, self.world, self.header = config, images, world, header
        self.module = self.objective = detector.to(world.device).train()
        per_epoch = len(images) / config.batch_size
        self.length = RunLength(total=config.total, steps_per_epoch=per_epoch, round=config.round, counted="step")
        self.batch_size, self.precision, self.seed = config.batch_size, precision, config.seed
        self.checkpoint, self.check_every, self.clip = config.checkpoint, config.health_every, config.clip
        if world.size > 1 and not config.frozen:
            batchnorm_across_ranks(detector)
        optimizer = OptimizerConfig(rate=config.rate, momentum=config.momentum, weight_decay=config.weight_decay)
        self.optimizer = build_optimizer(detector, optimizer)
        self.monitor = LossMonitor(remedies=_REMEDIES)

    def batches(self, start: int) -> AbstractContextManager[CocoBatches]:
        world, pinned = self.world, self.world.device.type == "cuda"
        return CocoBatches(self.images, self.config, start=start, rank=world.rank, world_size=world.size, pinned=pinned)

    def to_device(self, batch: tuple[Sample, ...]) -> list[Sample]:
        return [sample.to(self.world.device) for sample in batch]

    def rate(self, step: int) -> float:
        return self.config.rate_at(step)


def detect_all(detector: Detector, data: CocoData, config: CocoConfig, *, world: World) -> list[Detection]:
    """Detections in every image of the split, shared out among the processes, all of which receive them all."""
    mine = data.images[world.rank :: world.size]

    def prepared(index: int) -> torch.Tensor:
        size = scaled_size(mine[index].size, shorter=config.test_size, longest=config.max_size)
        return read_scaled(mine[index], size)

    detector.eval()
    results: list[Detection] = []
    for begin in range(0, len(mine), _AHEAD):
        indices = range(begin, min(begin + _AHEAD, len(mine)))
        for index, pixels in zip(indices, in_threads(prepared, indices, threads=config.threads), strict=True):
            found = detector.detect(pixels.to(world.device), size=mine[index].size)
            results += to_results(mine[index], found, data.category_ids)
    detector.train()
    if world.size == 1:
        return results
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, results)
    return sorted((one for part in parts for one in part), key=lambda one: (one["image_id"], -one["score"]))


def _data(config: CocoConfig) -> tuple[CocoData, CocoData]:
    train = read_split(config.data, config.train, limit=config.train_images)
    test = read_split(config.data, config.test, limit=config.test_images)
    for split, purpose in ((train, "train on"), (test, "score")):
        if not split.trainable():
            raise DsslError(f"{split.name} has no image with an object: there is nothing to {purpose}")
    if (train.category_ids, train.category_names) != (test.category_ids, test.category_names):
        raise DsslError(f"{train.name} and {test.name} have different categories: expected the same ids and names")
    return train, test


def _intro(config: CocoConfig, train: CocoData, test: CocoData, world: World, why: str) -> list[str]:
    norm = "frozen" if config.frozen else "trained, over all processes" if world.size > 1 else "trained"
    processes = f"{world.size} processes on " if world.size > 1 else ""
    objects = [len(image.objects) for image in train.trainable()]
    return [
        f"{train.name}: {len(objects):,} images with {sum(objects):,} objects of {len(train.category_ids)} categories; "
        f"{config.total:,} steps of {config.batch_size} on {processes}{world.device}; BatchNorm {norm}; {why}",
        *(f"{train.name}: {note}" for note in train.notes),
        *(f"{test.name}: {note}" for note in test.notes if test.name != train.name),
    ]
