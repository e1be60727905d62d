"""Features of every image of a source: none dropped, none padded, nothing random."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl.augment import Normalization
from dssl.data import Source
from dssl.data.device import DeviceTransfer
from dssl.data.loader import CROP_RATIO, EvaluationBatches
from dssl.data.quarantine import Quarantine
from dssl.errors import DsslError
from dssl.models import device_of, evaluating, forward

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


class NothingReadable(DsslError):
    """None of the wanted images can be read; whoever asks for a part of a source catches this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Rows of features (float32, on the CPU) and the index in its source of the image of each row."""

    values: Tensor
    rows: NDArray[np.int64]
    unreadable: int = 0
    """How many images could not be read and have no row; always 0 unless that was allowed."""
    cropped: int = 0
    """How many images were resized and cropped; those that have the encoder's size already are taken whole."""


def compute_features(
    encoder: nn.Module,
    source: Source,
    *,
    image_size: int,
    normalization: Normalization,
    channels: int = 3,
    indices: NDArray[np.int64] | None = None,
    batch_size: int = 256,
    crop_ratio: float = CROP_RATIO,
    autocast: torch.dtype | None = None,
    threads: int | None = None,
    quarantine: Quarantine | None = None,
    progress: Progress | None = None,
    feed: DeviceTransfer | None = None,
) -> Features:
    """The encoder's vector of every image (or of those at ``indices``), in order, computed where the encoder's weights are.

    The encoder is in evaluation mode meanwhile, and is left as it was. An unreadable image is an error unless there is a
    ``quarantine`` (for training images only: a test set with missing images is another test set). ``feed`` brings the images
    to the encoder; the usual one by default.
    """
    feed = feed or feed_of(encoder, normalization)
    batches = EvaluationBatches(
        source,
        size=image_size,
        batch_size=batch_size,
        channels=channels,
        normalization=None if feed.as_bytes else normalization,
        crop_ratio=crop_ratio,
        indices=indices,
        threads=threads,
        quarantine=quarantine,
    )
    wanted = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
    parts: list[Tensor] = []
    rows: list[NDArray[np.int64]] = []
    done = 0
    with batches, evaluating(encoder):
        for batch in batches:
            parts.append(forward(encoder, feed.plain(batch.images), autocast=autocast))
            rows.append(batch.indices)
            done += len(batch.indices)
            if progress is not None:
                progress(done, len(wanted))
    if not parts:
        raise NothingReadable(f"{source.name}: none of its images can be read: there is nothing to compute features of")
    values, found = torch.cat(parts), np.concatenate(rows)
    if quarantine is not None:
        wanted = wanted[[int(index) not in quarantine for index in wanted]]
    check_complete(values, found, wanted, name=source.name)
    return Features(values=values, rows=found, unreadable=batches.count - len(found), cropped=batches.cropped)


def feed_of(encoder: nn.Module, normalization: Normalization) -> DeviceTransfer:
    """What brings images to where the encoder's weights are."""
    return DeviceTransfer(device_of(encoder), normalization=normalization)


def check_complete(values: Tensor, rows: NDArray[np.int64], wanted: NDArray[np.int64], *, name: str) -> None:
    """Refuse features that are not one row for each wanted image, in their order."""
    if len(values) != len(wanted) or not np.array_equal(rows, wanted):
        raise DsslError(f"{name}: {len(values)} features for {len(wanted)} images: samples were dropped or repeated")
