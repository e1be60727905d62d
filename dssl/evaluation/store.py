"""Features computed once per encoder and split, and kept in a file that records what they are of."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dssl.data import Source
from dssl.data.loader import CROP_RATIO
from dssl.data.quarantine import Quarantine
from dssl.files import replacing
from dssl.weights.checkpoint import content_hash
from dssl.weights.encoder import Encoder, Features


class FeatureStore:
    """An encoder and the features that it gave: in memory, and in ``folder`` if there is one."""

    def __init__(self, encoder: Encoder, *, folder: Path | None = None) -> None:
        self.encoder, self.folder = encoder, folder
        self.computed = 0
        """How many images went through the encoder; the rest came from memory or from a file."""
        self._features: dict[tuple[Source, bool], Features] = {}

    def of(self, source: Source, *, allow_unreadable: bool) -> Features:
        """Features of every image of a source; unreadable training images may be left out, test images may not."""

        def compute() -> Features:
            quarantine = Quarantine(source, max_share=1.0) if allow_unreadable else None
            features = self.encoder.features(source, quarantine=quarantine)
            self.computed += len(features.rows)
            return features

        if (source, allow_unreadable) not in self._features:
            self._features[source, allow_unreadable] = self.kept(
                source, {"allow_unreadable": allow_unreadable}, compute
            )
        return self._features[source, allow_unreadable]

    def kept(self, source: Source, about: dict[str, Any], compute: Callable[[], Features]) -> Features:
        """What ``compute`` gives for a source, from the file in which it was kept if there is one.

        ``about`` says what it depends on besides encoder and source. Images that could not be read are tried again.
        """
        if self.folder is None:
            return compute()
        text = self._about(source, about)
        features = _read(self.folder / _file_name(text), text)
        if features is None:
            earlier = (text.replace(source.fingerprint, fingerprint) for fingerprint in source.earlier_fingerprints())
            files = (_read(self.folder / _file_name(version), version) for version in earlier)
            features = next((kept for kept in files if kept is not None), None)
        if features is not None and features.unreadable:
            missing = np.setdiff1d(np.arange(len(source)), features.rows)
            features = None if source.any_readable(missing.tolist()) else features
        if features is None:
            features = compute()
            _write(self.folder / _file_name(text), text, features)
        return features

    def _about(self, source: Source, more: dict[str, Any]) -> str:
        encoder = self.encoder
        about = {
            "weights": encoder.sha256,
            "encoder": encoder.name,
            "image_size": encoder.image_size,
            "normalization": [encoder.normalization.mean, encoder.normalization.std],
            "crop_ratio": CROP_RATIO,
            "autocast": str(encoder.autocast),
            "source": source.fingerprint,
            "images": len(source),
            "reading": source.reading,
            "files": source.stamp(),
            **more,
        }
        return json.dumps(about, sort_keys=True)


class Columns(FeatureStore):
    """Some columns of the features of another store, as the features of an encoder that gives only these."""

    def __init__(self, store: FeatureStore, encoder: Encoder, columns: slice) -> None:
        super().__init__(encoder)
        self._store, self._columns = store, columns

    def of(self, source: Source, *, allow_unreadable: bool) -> Features:
        features = self._store.of(source, allow_unreadable=allow_unreadable)
        return dataclasses.replace(features, values=features.values[:, self._columns])


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
    return Features(
        values=tensors["values"],
        rows=tensors["rows"].numpy().astype(np.int64),
        unreadable=int(metadata["unreadable"]),
        cropped=int(metadata["cropped"]),
    )
