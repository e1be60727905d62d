"""Plain batches for evaluation: every image once, in order, nothing dropped, padded or random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor

from dssl.data.decode import UnreadableImage
from dssl.data.pipeline import Pipeline
from dssl.data.quarantine import Quarantine
from dssl.data.sources import Source, thread_count
from dssl.errors import DsslError
from dssl.types import Image

if TYPE_CHECKING:
    from typing import Self

_LONG = 16  # times its shorter side: longer images are not resized whole
CROP_RATIO = 0.875  # of the shorter side: 224 pixels out of 256, as is usual


class MeanAndStd(Protocol):
    """`dssl.augment.Normalization`, or something with the same attributes."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Of each channel, in units of 0 .. 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel, in units of 0 .. 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBatch:
    """Images as they are, and where they stand in the source."""

    indices: NDArray[np.int64]
    images: Tensor
    """N x C x H x W in channels_last memory; float32 and normalised, or uint8 without a normalisation."""


@dataclass(slots=True)
class _Content:
    indices: NDArray[np.int64]
    images: NDArray[Any]
    good: NDArray[np.bool_]
    cropped: NDArray[np.bool_]


class EvaluationBatches:
    """Every image of a source, or those of `indices`, once, in order: `for batch in batches`; the last batch may be smaller.

    An unreadable file is an error that names it; with a `quarantine` it is recorded and left out of its batch.
    """

    def __init__(
        self,
        source: Source,
        *,
        size: int,
        batch_size: int = 256,
        channels: int = 3,
        normalization: MeanAndStd | None = None,
        crop_ratio: float = CROP_RATIO,
        indices: NDArray[np.int64] | None = None,
        threads: int | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        if batch_size < 1:
            raise DsslError(f"batch size {batch_size}: expected at least 1")
        if not 0 < crop_ratio <= 1:
            raise DsslError(f"crop ratio {crop_ratio}: expected more than 0 and at most 1")
        chosen = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(source):
            raise DsslError(f"indices from {chosen.min()} to {chosen.max()}: the source has {len(source):,} images")
        self.count = len(chosen)
        self.cropped = 0
        """How many images so far were not taken whole."""
        self.steps = -(-len(chosen) // batch_size)
        scale, offset = _scale(normalization)
        kind = np.uint8 if normalization is None else np.float32

        def start(step: int) -> tuple[_Content, int]:
            part = chosen[step * batch_size : (step + 1) * batch_size]
            images = np.empty((len(part), size, size, channels), kind)
            return _Content(part, images, np.ones(len(part), np.bool_), np.zeros(len(part), np.bool_)), len(part)

        def fill(content: _Content, rows: range, is_stopped: Callable[[], bool]) -> None:
            for row in rows:
                if is_stopped():
                    return
                index = int(content.indices[row])
                try:
                    image = source.image(index)
                except UnreadableImage as error:
                    if quarantine is None:
                        raise
                    quarantine.record(index, error)
                    content.good[row] = False
                    continue
                if image.shape[2] != channels:
                    raise DsslError(f"{source.label_of(index)}: {image.shape[2]} channels, expected {channels}")
                content.cropped[row] = image.shape[:2] != (size, size)
                image = centre_crop(image, size=size, crop_ratio=crop_ratio)
                content.images[row] = image if normalization is None else image * scale + offset

        threads = thread_count(threads)
        self._pipeline = Pipeline(start, fill, first=0, steps=self.steps, threads=threads, ahead=2,
                                  chunk=max(1, min(64, -(-batch_size // (2 * threads)))))  # fmt: skip

    @property
    def waited(self) -> float:
        """Seconds that the consumer has waited for data so far."""
        return self._pipeline.waited

    def __len__(self) -> int:
        """The number of batches."""
        return self.steps

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """All batches, from the first."""
        for step in range(self.steps):
            content = self._pipeline.take(step)
            indices, images = content.indices, content.images
            self.cropped += int(content.cropped.sum())
            if not content.good.all():
                indices, images = indices[content.good], images[content.good]
            if len(indices):
                yield EvaluationBatch(indices=indices, images=torch.from_numpy(images).permute(0, 3, 1, 2))

    def close(self) -> None:
        """Stop the threads."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        """The batches themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the threads."""
        self.close()


def centre_crop(image: Image, *, size: int, crop_ratio: float = CROP_RATIO) -> Image:
    """The middle of an image at size x size: its shorter side becomes size / crop_ratio, bilinear, then the centre is cut out.

    An image that has the size already is returned as it is: small benchmark images are evaluated whole.
    """
    height, width = image.shape[:2]
    if height == size and width == size:
        return image
    target = round(size / crop_ratio)
    whole = [int(target * length / min(height, width)) for length in (width, height)]
    first = [round((length - size) / 2) for length in whole]
    picture = Pillow.fromarray(image if image.shape[2] == 3 else image[:, :, 0])
    if max(whole) <= _LONG * target:
        resized = picture.resize((whole[0], whole[1]), Pillow.Resampling.BILINEAR)
        kept = resized.crop((first[0], first[1], first[0] + size, first[1] + size))
    else:
        # the whole of a very long image would not fit into memory: only the part that is kept is resized
        scale = [length / resized for length, resized in zip((width, height), whole, strict=True)]
        ends = [(begin + size) * factor for begin, factor in zip(first, scale, strict=True)]
        box = (first[0] * scale[0], first[1] * scale[1], ends[0], ends[1])
        kept = picture.resize((size, size), Pillow.Resampling.BILINEAR, box=box)
    return np.array(kept).reshape(size, size, image.shape[2])


def _scale(normalization: MeanAndStd | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factor and summand from bytes to normalised values, as the view kernels have them."""
    if normalization is None:
        return np.ones(1, np.float32), np.zeros(1, np.float32)
    mean, std = np.array(normalization.mean), np.array(normalization.std)
    return (1.0 / (255.0 * std)).astype(np.float32), (-mean / std).astype(np.float32)
