"""Batches on their way to a GPU: bytes as far as they go, copied beside the computation, normalised where they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dssl.augment import Normalization
from dssl.data.loader import Batch, Event


class Copies(Protocol):
    """What copies views to a device without waiting."""

    def copy(self, views: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """The copies, ready for whatever the device is told to do next, and the event after which nobody reads the originals."""


class CudaCopies:
    """Copies on a stream of their own, so that they run while the GPU computes the step before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, views: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Event]:
        """Starts the copies; the stream that computes waits for them, the host does not."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copies = {name: view.to(self._device, non_blocking=True) for name, view in views.items()}
            done = self._stream.record_event()
        computing.wait_event(done)
        for copied in copies.values():
            copied.record_stream(computing)  # its memory belongs to the other stream, which must not reuse it too early
        return copies, done


class Feed:
    """Brings batches to where they are trained on, as normalised floats.

    On a GPU they arrive as bytes (a quarter of the floats) from pinned memory. On the CPU the kernels that make the views have
    normalised them already, which costs no pass of its own.
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

    def place(self, batch: Batch) -> dict[str, Tensor]:
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
