"""Training images with their boxes and masks: order, size and mirroring are functions of (seed, step, index) alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from dssl import rng
from dssl.coco.annotations import CocoImage
from dssl.coco.config import CocoConfig
from dssl.coco.masks import draw_mask
from dssl.data.decode import read_image
from dssl.data.pipeline import Pipeline
from dssl.data.sources import default_threads
from dssl.errors import DsslError
from dssl.types import Image

_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training image as the detector gets it."""

    pixels: Tensor
    """3 x height x width, uint8."""
    boxes: Tensor
    """left, top, right, bottom."""
    labels: Tensor
    masks: Tensor
    """Objects x height x width, 0 or 1."""
    key: int
    """Where the random choices about this image come from, in this step."""

    def to(self, device: torch.device) -> "Sample":
        boxes, labels, masks = (value.to(device, non_blocking=True) for value in (self.boxes, self.labels, self.masks))
        return Sample(
            pixels=self.pixels.to(device, non_blocking=True), boxes=boxes, labels=labels, masks=masks, key=self.key
        )


def scaled_size(width: int, height: int, *, shorter: int, longest: int) -> tuple[int, int]:
    """Width and height after the shorter side is brought to ``shorter``, or less where the longer one would pass ``longest``."""
    scale = min(shorter / min(width, height), longest / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def read_pixels(image: CocoImage) -> Image:
    """Decode; a picture of another size than its annotations speak of is refused."""
    pixels = read_image(str(image.path))
    if pixels.shape[:2] != (image.height, image.width):
        raise DsslError(
            f"{image.path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, its annotations are for "
            f"{image.width} x {image.height}: boxes and masks would not fit"
        )
    return pixels


def resize(pixels: Image, size: tuple[int, int]) -> Image:
    """To width and height; bilinear, over all pixels that fall together when it shrinks."""
    if (pixels.shape[1], pixels.shape[0]) == size:
        return pixels
    return np.array(Pillow.fromarray(pixels).resize(size, Pillow.Resampling.BILINEAR))


def to_tensor(pixels: Image) -> Tensor:
    """3 x height x width."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def make_sample(image: CocoImage, *, shorter: int, longest: int, mirror: bool, key: int) -> Sample:
    """Read an image, scale it with its boxes and masks, and mirror all of it or nothing."""
    width, height = scaled_size(image.width, image.height, shorter=shorter, longest=longest)
    pixels = resize(read_pixels(image), (width, height))
    objects = image.objects
    boxes = np.array([one.box for one in objects], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes *= np.array([width / image.width, height / image.height] * 2)
    boxes = boxes.clip(0, [width, height, width, height])
    before = (image.width, image.height)
    masks = [draw_mask(one.segmentation, before=before, after=(width, height)) for one in objects]
    stacked = np.stack(masks) if masks else np.zeros((0, height, width), dtype=np.uint8)
    if mirror:
        pixels, stacked = pixels[:, ::-1], stacked[:, :, ::-1]
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    return Sample(
        pixels=to_tensor(pixels),
        boxes=torch.from_numpy(boxes).float(),
        labels=torch.tensor([one.label for one in objects], dtype=torch.int64),
        masks=torch.from_numpy(np.ascontiguousarray(stacked)),
        key=key,
    )


class Choices:
    """Which image stands where in the run, and how it is shown there."""

    def __init__(self, count: int, config: CocoConfig) -> None:
        self.count, self.config = count, config

    def at(self, step: int, row: int) -> tuple[int, int, bool, int]:
        """Index of the image, its shorter side, whether it is mirrored, and its key; epochs follow each other without a cut."""
        config = self.config
        epoch, place = divmod(step * config.batch_size + row, self.count)
        index = int(rng.permutation(rng.key(config.seed, "coco order", epoch), self.count)[place])
        draws = rng.uniforms(rng.key(config.seed, "coco view", epoch), np.array([index]), 2)[0]
        shorter = config.sizes[int(draws[0] * len(config.sizes))]
        return index, shorter, config.flip and bool(draws[1] < 0.5), rng.key(config.seed, "coco sample", epoch, index)


class CocoBatches:
    """The batches of a run from any step on, made by threads ahead of it."""

    def __init__(
        self, images: Sequence[CocoImage], config: CocoConfig, *, start: int, rank: int = 0, world_size: int = 1
    ) -> None:
        count = config.batch_size // world_size
        choices = Choices(len(images), config)

        def begin(step: int) -> tuple[tuple[int, list[Sample | None]], int]:
            return (step, [None] * count), count

        def fill(content: tuple[int, list[Sample | None]], rows: range, is_stopped: Callable[[], bool]) -> None:
            step, samples = content
            for row in rows:
                if is_stopped():
                    return
                index, shorter, mirror, key = choices.at(step, rank * count + row)
                samples[row] = make_sample(
                    images[index], shorter=shorter, longest=config.max_size, mirror=mirror, key=key
                )

        self._pipeline = Pipeline(
            begin,
            fill,
            first=start,
            steps=config.total,
            threads=config.threads or default_threads(),
            ahead=_AHEAD,
            chunk=1,
        )

    def at(self, step: int) -> tuple[Sample, ...]:
        """One rank's part of a global batch."""
        _, samples = self._pipeline.take(step)
        return tuple(one for one in samples if one is not None)

    def __enter__(self) -> "CocoBatches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipeline.close()
