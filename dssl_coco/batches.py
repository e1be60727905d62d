"""Training images with their boxes and masks: order, size and mirroring are functions of (seed, epoch, image) alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from dssl import rng
from dssl.data.decode import read_image
from dssl.data.pipeline import Piped, Pipeline, default_threads
from dssl.errors import DsslError
from dssl_coco.annotations import CocoImage, Segmentation
from dssl_coco.config import CocoConfig

_AHEAD = 2
Size = tuple[int, int]
"""Height and width in pixels, as torchvision and pycocotools order them."""
Shown = tuple[int, int, bool]
"""An image's index, its shorter side, and whether it is mirrored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training image as the detector receives it."""

    pixels: Tensor
    """3 x height x width, uint8."""
    boxes: Tensor
    """left, top, right, bottom."""
    labels: Tensor
    masks: Tensor
    """Objects x height x width, 0 or 1."""

    def to(self, device: torch.device) -> "Sample":
        return self._each(lambda value: value.to(device, non_blocking=True))

    def pinned(self) -> "Sample":
        """In memory that a GPU reads by itself; torch keeps it until the GPU has done so."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        pixels, boxes, labels, masks = map(change, (self.pixels, self.boxes, self.labels, self.masks))
        return Sample(pixels=pixels, boxes=boxes, labels=labels, masks=masks)


def scaled_size(size: Size, *, shorter: int, longest: int) -> Size:
    """The size with its shorter side scaled to ``shorter``, or less where the longer side would exceed ``longest``."""
    # torchvision's own rule truncates the longer side; Detectron's, which this follows, rounds it
    scale = min(shorter / min(size), longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def read_scaled(image: CocoImage, size: Size) -> Tensor:
    """Decode and resize (bilinear, antialiased) to 3 x height x width, uint8; a picture that is not as annotated is refused."""
    pixels = read_image(str(image.path))
    if pixels.shape[:2] != image.size:
        raise DsslError(
            f"{image.path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, its annotations are for "
            f"{image.size[1]} x {image.size[0]}: boxes and masks would not fit"
        )
    scaled: Tensor = functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), list(size))
    return scaled


def draw_mask(segmentation: Segmentation, *, before: Size, after: Size) -> Tensor:
    """An object's pixels (height x width, 0 or 1) in an image that was scaled.

    Polygons are scaled as coordinates and drawn at the new size; run lengths are drawn and then scaled.
    """
    from pycocotools import mask

    drawn: Tensor
    if isinstance(segmentation, dict):
        plain = isinstance(segmentation["counts"], list)
        runs = mask.frPyObjects(segmentation, *before) if plain else segmentation
        drawn = functional.resize(tv_tensors.Mask(mask.decode(runs)), list(after))
    else:
        scale = [after[1] / before[1], after[0] / before[0]]
        polygons = [(np.reshape(polygon, (-1, 2)) * scale).ravel().tolist() for polygon in segmentation]
        drawn = tv_tensors.Mask(mask.decode(mask.merge(mask.frPyObjects(polygons, *after))))
    return drawn


def make_sample(image: CocoImage, *, shorter: int, longest: int, mirror: bool) -> Sample:
    """Read an image with at least one object, scale it with its boxes and masks, and mirror all of it or nothing."""
    size = scaled_size(image.size, shorter=shorter, longest=longest)
    corners = functional.convert_bounding_box_format(
        tv_tensors.BoundingBoxes(
            [one.box for one in image.objects], format="XYWH", canvas_size=image.size, dtype=torch.float32
        ),
        new_format="XYXY",
    )
    parts = (
        tv_tensors.Image(read_scaled(image, size)),
        functional.clamp_bounding_boxes(functional.resize(corners, list(size))),
        tv_tensors.Mask(
            torch.stack([draw_mask(one.segmentation, before=image.size, after=size) for one in image.objects])
        ),
    )
    if mirror:
        parts = tuple(functional.horizontal_flip(part) for part in parts)
    pixels, boxes, masks = (part.as_subclass(Tensor) for part in parts)
    labels = torch.tensor([one.label for one in image.objects], dtype=torch.int64)
    return Sample(pixels=pixels, boxes=boxes, labels=labels, masks=masks)


class Choices:
    """Which image comes when, and how it is shown."""

    def __init__(self, count: int, config: CocoConfig) -> None:
        self.count, self.config = count, config
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def at(self, step: int, rows: range) -> list[Shown]:
        """What rows of a global batch show; epochs follow each other without a cut.

        For one thread at a time: the order of the current epoch is computed once and kept.
        """
        return [self._one(*divmod(step * self.config.batch_size + row, self.count)) for row in rows]

    def _one(self, epoch: int, place: int) -> Shown:
        config = self.config
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, rng.permutation(rng.key(config.seed, "coco order", epoch), self.count)
        index = int(self._order[1][place])
        draws = rng.uniforms(rng.key(config.seed, "coco view", epoch), np.array([index]), 2)[0]
        return index, config.sizes[int(draws[0] * len(config.sizes))], config.flip and bool(draws[1] < 0.5)


class CocoBatches(Piped):
    """The batches of a run from any step on, made by threads ahead of it."""

    def __init__(
        self,
        images: Sequence[CocoImage],
        config: CocoConfig,
        *,
        start: int,
        rank: int = 0,
        world_size: int = 1,
        pinned: bool = False,
    ) -> None:
        count = config.batch_size // world_size
        choices = Choices(len(images), config)

        def begin(
            step: int,
        ) -> tuple[tuple[list[Shown], list[Sample | None]], int]:  # the pipeline calls it under its lock
            return (choices.at(step, range(rank * count, (rank + 1) * count)), [None] * count), count

        def fill(content: tuple[list[Shown], list[Sample | None]], rows: range, is_stopped: Callable[[], bool]) -> None:
            shown, samples = content
            for row in rows:
                if is_stopped():
                    return
                index, shorter, mirror = shown[row]
                made = make_sample(images[index], shorter=shorter, longest=config.max_size, mirror=mirror)
                samples[row] = made.pinned() if pinned else made

        threads = config.threads or default_threads()
        self._pipeline = Pipeline(
            begin, fill, first=start, steps=config.total, threads=threads, ahead=_AHEAD, chunk=1
        )  # fmt: skip

    def at(self, step: int) -> tuple[Sample, ...]:
        """One rank's part of a global batch."""
        _, samples = self._pipeline.take(step)
        return tuple(one for one in samples if one is not None)
