"""Batches on their way to a GPU: bytes as far as possible, copied during the computation, normalised where they arrive."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dssl.augment import Normalization


class Event(Protocol):
    """Something that happens on a device, such as the end of a copy: a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of a global batch; it stays untouched as long as anything holds one of its tensors."""

    step: int
    epoch: int
    indices: NDArray[np.int64]
    views: dict[str, Tensor]
    """N x C x H x W, in channels_last memory."""
    readers: list[Event] = field(default_factory=list)
    """Code that lets a device read the tensors asynchronously adds the event of its end: they stay untouched until then, too."""


_Free = deque[tuple[Any, list[Event]]]


def _settle(free: _Free) -> None:
    """Wait until no device reads the buffers any more, so that their memory can be freed."""
    while free:
        for event in free.pop()[1]:
            event.synchronize()


class Pool:
    """Buffers that are reused once every tensor on them is gone and no device reads them any more."""

    def __init__(self, names: Sequence[str], allocate: Callable[[], Any], *, keep: int) -> None:
        self._names, self._allocate, self._keep = names, allocate, keep
        self._free: _Free = deque()
        self._finalizer = weakref.finalize(self, _settle, self._free)

    def take(self) -> Any:
        """Free buffers, or new ones."""
        free, found = self._free, None
        for _ in range(len(free)):
            buffers, readers = free.popleft()
            if not all(event.query() for event in readers):
                free.append((buffers, readers))  # no waiting: the consumer may be asking for a batch right now
            elif found is None:
                found = buffers
            elif len(free) < self._keep:
                free.append((buffers, []))
        return self._allocate() if found is None else found

    def lend(self, buffers: Any) -> tuple[dict[str, Tensor], list[Event]]:
        """The buffers as tensors, without a copy, and the list for the events of their readers."""
        tokens = deque(range(len(buffers) - 1))
        free, finalizer = self._free, self._finalizer
        readers: list[Event] = []

        def gone() -> None:
            try:
                tokens.pop()  # atomic, since the last two tensors may die in two threads at once
            except IndexError:
                free.append((buffers, readers))
                if not finalizer.alive:  # the loader is closed or forgotten: free the memory now
                    _settle(free)

        tensors = {}
        for name in self._names:
            array = buffers[name].view()  # an object of its own, which lives as long as the tensor's memory is in use
            weakref.finalize(array, gone).atexit = False
            tensors[name] = torch.from_numpy(array).permute(0, 3, 1, 2)
        return tensors, readers

    def close(self) -> None:
        """Wait for the devices that still read free buffers."""
        self._finalizer()


class Copies(Protocol):
    """What copies views to a device without waiting."""

    def copy(self, views: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """The copies, ready for the device's next operation, and the event after which the originals are not read any more."""


class CudaCopies:
    """Copies on a separate stream, so that they run while the GPU computes the previous step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def copy(self, views: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """Start the copies; the computing stream waits for them, the host does not."""
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
        copies: Copies | None = None,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._copies = copies or (CudaCopies(device) if device.type == "cuda" else None)
        self.as_bytes = self._copies is not None
        """Whether batches have to come as bytes in pinned memory."""
        self._scale, self._offset = (
            torch.from_numpy(numbers).view(1, -1, 1, 1).to(device) for numbers in normalization.scale_and_offset()
        )

    def to_device(self, batch: Batch) -> dict[str, Tensor]:
        """The views by name, N x C x H x W."""
        if self._copies is None:
            return {name: view.to(self._device, self._dtype) for name, view in batch.views.items()}
        copies, done = self._copies.copy(batch.views)
        batch.readers.append(done)
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
