"""Features computed once per encoder and split, and kept in a file that records what they are of."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from dssl.data import Source
from dssl.data.loader import CROP_RATIO
from dssl.data.quarantine import Quarantine
from dssl.evaluation.features import Features, Progress, compute_features
from dssl.files import replacing
from dssl.weights.checkpoint import content_hash
from dssl.weights.load import LoadedEncoder


class FeatureStore:
    """An encoder, how it is run, and the features that it gave: in memory, and in ``folder`` where one is given."""

    def __init__(
        self,
        loaded: LoadedEncoder,
        *,
        folder: Path | None = None,
        batch_size: int = 256,
        crop_ratio: float = CROP_RATIO,
        autocast: torch.dtype | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded, self.folder, self.crop_ratio, self.autocast = loaded, folder, crop_ratio, autocast
        self.threads, self.progress, self.batch_size = threads, progress, batch_size
        self.computed = 0
        """How many images went through the encoder; the rest came from memory or from a file."""
        self._known: dict[str, Features] = {}

    @property
    def precision(self) -> str:
        return "float32" if self.autocast is None else str(self.autocast).removeprefix("torch.")

    def of(self, source: Source, *, allow_unreadable: bool) -> Features:
        """Features of every image of a source; unreadable training images may be left out, test images may not."""
        about = self._about(source, allow_unreadable)
        key = _file_name(about)
        if key not in self._known:
            path = None if self.folder is None else self.folder / key
            found = None if path is None else _read(path, about)
            if path is not None and found is None:
                others = (about.replace(source.fingerprint, known) for known in source.earlier_fingerprints())
                candidates = (_read(path.with_name(_file_name(other)), other) for other in others)
                found = next((features for features in candidates if features is not None), None)
            if found is not None and found.unreadable:
                missing = np.setdiff1d(np.arange(len(source)), found.rows)
                found = None if source.any_readable(missing.tolist()) else found
            if found is None:
                found = self.compute(source, quarantine=Quarantine(source, max_share=1.0) if allow_unreadable else None)
                self.computed += len(found.rows)
                if path is not None:
                    _write(path, about, found)
            self._known[key] = found
        return self._known[key]

    def compute(
        self,
        source: Source,
        *,
        encoder: nn.Module | None = None,
        indices: NDArray[np.int64] | None = None,
        quarantine: Quarantine | None = None,
    ) -> Features:
        """Features of all images, or of those at ``indices``; progress counts the images of the whole source.

        ``encoder`` takes the place of the loaded one, such as a copy of it that was fine-tuned.
        """
        progress, first = self.progress, 0 if indices is None or len(indices) == 0 else int(indices[0])
        return compute_features(
            self.loaded.encoder if encoder is None else encoder,
            source,
            image_size=self.loaded.image_size,
            normalization=self.loaded.normalization,
            channels=self.loaded.channels,
            indices=indices,
            batch_size=self.batch_size,
            crop_ratio=self.crop_ratio,
            autocast=self.autocast,
            threads=self.threads,
            quarantine=quarantine,
            progress=None if progress is None else lambda done, _: progress(first + done, len(source)),
        )

    def _about(self, source: Source, allow_unreadable: bool) -> str:
        about: dict[str, Any] = {
            "weights": self.loaded.sha256,
            "encoder": self.loaded.name,
            "image_size": self.loaded.image_size,
            "normalization": [self.loaded.normalization.mean, self.loaded.normalization.std],
            "crop_ratio": self.crop_ratio,
            "autocast": str(self.autocast),
            "source": source.fingerprint,
            "images": len(source),
            "allow_unreadable": allow_unreadable,
            "reading": source.reading,
            "files": source.stamp(),
        }
        return json.dumps(about, sort_keys=True)


def _file_name(about: str) -> str:
    return f"features-{hashlib.sha256(about.encode()).hexdigest()[:16]}.safetensors"


def _write(path: Path, about: str, features: Features) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"values": features.values.contiguous(), "rows": torch.from_numpy(features.rows)}
    digest = content_hash(about, tensors)
    counts = {"unreadable": str(features.unreadable), "cropped": str(features.cropped)}
    metadata = {"about": about, "sha256": digest, **counts}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def _read(path: Path, about: str) -> Features | None:
    """The kept features; None if the file is missing, damaged or about something else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("values", "rows")}
    except (OSError, SafetensorError):
        return None
    if metadata.get("about") != about or content_hash(about, tensors) != metadata.get("sha256"):
        return None
    if "cropped" not in metadata:  # written before it was counted
        return None
    return Features(
        values=tensors["values"],
        rows=tensors["rows"].numpy().astype(np.int64),
        unreadable=int(metadata["unreadable"]),
        cropped=int(metadata["cropped"]),
    )
