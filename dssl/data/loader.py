"""Batches: of views for training, made by threads ahead of the step, and of plain images for evaluation; on their way to a GPU
bytes as far as possible, copied during the computation, normalised where they arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from torch import Tensor

from dssl.augment import BaseViewMaker, Normalization
from dssl.data.decode import GROUP, UnreadableImage, resize
from dssl.data.order import order_of
from dssl.data.pipeline import Pipeline, thread_count
from dssl.data.quarantine import Quarantine, Reader
from dssl.data.source import Shuffle, Source
from dssl.errors import DsslError
from dssl.types import Image

_CHUNK, _FEW = 64, 16  # images that a thread claims at once: at most, and where the batch has enough also at least
_LONG = 16  # times its shorter side: longer images are not resized whole
CROP_RATIO = 0.875  # of the shorter side: 224 pixels out of 256, as is usual


class Event(Protocol):
    """The end of a copy: a `torch.cuda.Event`, whose methods torch has not typed."""

    def query(self) -> bool: ...


@dataclass(slots=True, kw_only=True)  # not frozen: trainers move batches to a device by setting their fields
class Batch:
    """One rank's part of a global batch."""

    step: int
    epoch: int
    indices: NDArray[np.int64]
    views: dict[str, Tensor]
    """N x C x H x W, in channels_last memory."""


class CudaCopies:
    """Copies on a separate stream, so that they run while the GPU computes the previous step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def copy(self, views: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """The copies, for which the computing stream waits and the host does not, and the event after their last read."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = {name: view.to(self._device, non_blocking=True) for name, view in views.items()}
            done = self._stream.record_event()
        computing.wait_event(done)
        for copied in copies.values():
            copied.record_stream(computing)  # its memory belongs to the other stream, which must not reuse it too early
        return copies, done


class DeviceTransfer:
    """Brings batches to the device as normalised floats.

    On a GPU they arrive as bytes (a quarter of the floats) from pinned memory. On the CPU the kernels that make the views have
    already normalised them, which costs no extra pass.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        normalization: Normalization,
        dtype: torch.dtype = torch.float32,
        copies: CudaCopies | None = None,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._copies = copies or (CudaCopies(device) if device.type == "cuda" else None)
        self.as_bytes = self._copies is not None
        """Whether batches have to come as bytes in pinned memory."""
        self._under_way: list[tuple[Event, Mapping[str, Tensor]]] = []
        """Copies that may not have ended, and what they read, whose memory must not be used again until then."""
        self._scale, self._offset = (
            torch.from_numpy(numbers).view(1, -1, 1, 1).to(device) for numbers in normalization.scale_and_offset()
        )

    def to_device(self, batch: Batch) -> dict[str, Tensor]:
        """The views by name, N x C x H x W."""
        if self._copies is None:
            return {name: view.to(self._device, self._dtype) for name, view in batch.views.items()}
        copies, done = self._copies.copy(batch.views)
        self._under_way = [(event, views) for event, views in self._under_way if not event.query()]
        self._under_way.append((done, batch.views))
        return {name: self._normalised(copied) for name, copied in copies.items()}

    def plain(self, images: Tensor) -> Tensor:
        """Images of an evaluation, which come as bytes where batches have to; others are normalised already."""
        if self._copies is None:
            return images
        # torch keeps the pinned copy until the device has read it
        held = images.pin_memory() if self._device.type == "cuda" else images
        copies, _ = self._copies.copy({"images": held})
        return self._normalised(copies["images"])

    def _normalised(self, copied: Tensor) -> Tensor:
        return copied.to(torch.float32).mul_(self._scale).add_(self._offset).to(self._dtype)


@dataclass(slots=True)
class _Content:
    step: int
    epoch: int
    indices: NDArray[np.int64]
    buffers: Any
    plan: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Batches(Pipeline[_Content]):
    """The batches of a training run, from any step on: `for batch in batches`, or `batches.at(step)`.

    Order and views depend on seed, epoch and step alone, so that neither the number of threads, nor the start step, nor the
    number of ranks changes an image. `batch_size` is the global one; a rank gets its slice of it. An unreadable image is replaced
    by another, of the same label where there are `labels`.
    """

    def __init__(
        self,
        source: Source,
        maker: BaseViewMaker,
        *,
        batch_size: int,
        seed: int,
        steps: int,
        start_step: int = 0,
        threads: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 2,
        quarantine: Quarantine | None = None,
        labels: NDArray[np.int64] | None = None,
        pinned: bool = False,
        shuffle: Shuffle | None = None,
        window: int | None = None,
    ) -> None:
        if len(source) < 2:
            raise DsslError(
                f"{source.name}: one image is not enough: self-supervised training compares images with each other"
            )
        order = order_of(source, batch_size=batch_size, seed=seed, shuffle=shuffle, window=window)
        threads = thread_count(threads)
        self.steps_per_epoch = order.steps_per_epoch
        self.quarantine = quarantine if quarantine is not None else Quarantine(source)
        self._next, self._names = start_step, maker.names
        count = batch_size // world_size
        reader = Reader(source, seed=seed, quarantine=self.quarantine, labels=labels)

        def start(step: int) -> tuple[_Content, int]:
            position = order.at(step)
            mine = position.indices[rank * count : (rank + 1) * count]
            return _Content(step, position.epoch, mine, maker.allocate(count, pinned=pinned)), count

        super().__init__(
            start,
            lambda content, rows, is_stopped: _fill(reader, maker, content, rows, is_stopped),
            first=start_step,
            steps=steps,
            threads=threads,
            ahead=ahead,
            # small enough that all threads work on the batch that is needed next, but no smaller: each claim, like each call
            # of a kernel, needs the interpreter's lock
            chunk=max(min(_FEW, -(-count // threads)), min(_CHUNK, -(-count // (2 * threads)))),
        )

    def at(self, step: int) -> Batch:
        """The batch of a step; the threads prepare the steps that follow it, so that asking for the next one hardly waits."""
        if not 0 <= step < self.steps:
            raise DsslError(f"step {step}: expected 0 to {self.steps - 1}")
        content = self.take(step)
        self._next = step + 1
        views = {name: torch.from_numpy(content.buffers[name]).permute(0, 3, 1, 2) for name in self._names}
        return Batch(step=content.step, epoch=content.epoch, indices=content.indices, views=views)

    def __len__(self) -> int:
        """How many batches are left."""
        return self.steps - self._next

    def __iter__(self) -> Iterator[Batch]:
        """From the next step to the last."""
        while self._next < self.steps:
            yield self.at(self._next)


def _fill(reader: Reader, maker: BaseViewMaker, content: _Content, rows: range, is_stopped: Callable[[], bool]) -> None:
    """Read some images of a batch and make their views."""
    with content.lock:  # once per batch: a plan costs a millisecond, however few the images
        if content.plan is None:
            content.plan = maker.plan(content.indices, epoch=content.epoch)
    pending: list[Image] = []
    held, first = 0, rows.start  # of the pending images: their bytes, and the row of the first
    images = reader.images(content.indices[rows.start : rows.stop].tolist())
    for row in rows:
        if is_stopped():
            return
        try:
            image = next(images)
        except Exception as error:  # whatever it is, it goes on, with the name of the image
            error.add_note(f"while reading {reader.source.label_of(int(content.indices[row]))}")
            raise
        pending.append(image)
        held += image.nbytes
        if held >= GROUP or row == rows[-1]:
            _make(reader, maker, content, first, pending)
            pending, held, first = [], 0, row + 1


def _make(reader: Reader, maker: BaseViewMaker, content: _Content, first: int, images: list[Image]) -> None:
    """The views of these images into the rows from `first` on; an error names its image."""
    try:
        maker.apply_many(content.plan, first, images, content.buffers, first)
        return
    except Exception as error:  # whatever it is, it is raised again with the name of the image
        if len(images) == 1:
            error.add_note(f"while making the views of {reader.source.label_of(int(content.indices[first]))}")
            raise
    for row, image in enumerate(images, first):  # to learn which of them it is
        _make(reader, maker, content, row, [image])


@dataclass(slots=True, kw_only=True)
class EvaluationBatch:
    """Images without augmentation, and their indices in the source."""

    indices: NDArray[np.int64]
    images: Tensor
    """N x C x H x W in channels_last memory; float32 and normalised, or uint8 without a normalisation."""


@dataclass(slots=True)
class _Plain:
    indices: NDArray[np.int64]
    images: NDArray[Any]
    good: NDArray[np.bool_]
    cropped: NDArray[np.bool_]


class EvaluationBatches(Pipeline[_Plain]):
    """Every image of a source, or those of `indices`, once and in order: `for batch in batches`; the last batch may be smaller.

    An unreadable file is an error that names it; with a `quarantine` it is recorded and left out of its batch.
    """

    def __init__(
        self,
        source: Source,
        *,
        size: int,
        batch_size: int = 256,
        channels: int = 3,
        normalization: Normalization | None = None,
        indices: NDArray[np.int64] | None = None,
        threads: int | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        chosen = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        self.count = len(chosen)
        self.cropped = 0
        """How many images so far were cropped."""
        scales = None if normalization is None else normalization.scale_and_offset()
        kind = np.uint8 if normalization is None else np.float32

        def start(step: int) -> tuple[_Plain, int]:
            part = chosen[step * batch_size : (step + 1) * batch_size]
            images = np.empty((len(part), size, size, channels), kind)
            return _Plain(part, images, np.ones(len(part), np.bool_), np.zeros(len(part), np.bool_)), len(part)

        def fill(content: _Plain, rows: range, is_stopped: Callable[[], bool]) -> None:
            for row in rows:
                if is_stopped():
                    return
                index = int(content.indices[row])
                if quarantine is not None and index in quarantine:  # not tried again: it may be readable now
                    content.good[row] = False
                    continue
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
                image = centre_crop(image, size=size)
                content.images[row] = image if scales is None else image * scales[0] + scales[1]

        threads = thread_count(threads)
        super().__init__(start, fill, first=0, steps=-(-len(chosen) // batch_size), threads=threads, ahead=2,
                         chunk=max(1, min(64, -(-batch_size // (2 * threads)))))  # fmt: skip

    def __len__(self) -> int:
        """The number of batches."""
        return self.steps

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """All batches, from the first."""
        for step in range(self.steps):
            content = self.take(step)
            indices, images = content.indices, content.images
            self.cropped += int(content.cropped.sum())
            if not content.good.all():
                indices, images = indices[content.good], images[content.good]
            if len(indices):
                yield EvaluationBatch(indices=indices, images=torch.from_numpy(images).permute(0, 3, 1, 2))


def centre_crop(image: Image, *, size: int) -> Image:
    """The centre of an image at size x size: the shorter side is resized to size / CROP_RATIO, bilinearly, then cropped.

    An image that already has the size is returned as it is: small benchmark images are evaluated whole.
    """
    height, width = image.shape[:2]
    if height == size and width == size:
        return image
    target = round(size / CROP_RATIO)
    whole = [int(target * length / min(height, width)) for length in (width, height)]
    first = [round((length - size) / 2) for length in whole]
    if max(whole) <= _LONG * target:
        resized = resize(image, (whole[0], whole[1]), Pillow.Resampling.BILINEAR)
        return np.ascontiguousarray(resized[first[1] : first[1] + size, first[0] : first[0] + size])
    # a very long image would not fit into memory when resized: only the part that is kept is
    scale = [length / resized for length, resized in zip((width, height), whole, strict=True)]
    ends = [(begin + size) * factor for begin, factor in zip(first, scale, strict=True)]
    box = (first[0] * scale[0], first[1] * scale[1], ends[0], ends[1])
    return resize(image, (size, size), Pillow.Resampling.BILINEAR, box=box)
