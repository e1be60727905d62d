"""An encoder as one object: its network, how images are prepared for it, how it is run, and where its weights
came from; and its features, computed once per split and kept in a file that records what they are of.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dssl.augment import Normalization
from dssl.data import Source
from dssl.data.decode import pixels_of
from dssl.data.loader import CROP_RATIO, DeviceTransfer, EvaluationBatches, centre_crop
from dssl.data.quarantine import Quarantine
from dssl.data.scale import Range, scaled
from dssl.errors import DsslError
from dssl.files import replacing
from dssl.models import evaluating, feature_dim, forward
from dssl.weights.checkpoint import content_hash

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where weights came from."""

    path: Path
    """A file or a run's folder; or the word that stands for weights, such as ``imagenet``."""
    sha256: str
    """Of the file's content."""
    report: str
    """What was loaded and what was not, in a line for people."""
    header: dict[str, Any] = field(default_factory=dict)
    """A checkpoint's header, or what an export kept of it; empty for foreign weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """From a picture to the tensor (channels x size x size) that an encoder takes, as evaluation makes it."""

    image_size: int
    channels: int
    normalization: Normalization
    value_range: Range | None = None

    def __call__(self, picture: Pillow.Image) -> Tensor:
        if self.value_range is None:
            image = pixels_of(picture, channels=self.channels)
        else:
            image = scaled(np.atleast_3d(np.asarray(picture)), self.value_range)
        if image.shape[2] != self.channels:
            raise DsslError(f"the picture has {image.shape[2]} channels, expected {self.channels}")
        scale, offset = self.normalization.scale_and_offset()
        return torch.from_numpy(centre_crop(image, size=self.image_size) * scale + offset).permute(2, 0, 1)

    def text(self) -> str:
        """One line for people, in the order in which it is done."""
        size, to_one = self.image_size, "0 to 255" if self.value_range is None else self.value_range.text()
        mean, std = (", ".join(f"{value:.6g}" for value in values) for values in self.normalization.plain().values())
        return (
            f"{self.channels} x {size} x {size}: shorter side to {round(size / CROP_RATIO)} px (crop ratio {CROP_RATIO}, "
            f"bilinear interpolation), centre crop {size} px, an image of that size as it is; values {to_one} become 0 to 1; "
            f"minus mean {mean}; divided by std {std}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A network from images to vectors, and everything that its features depend on."""

    network: nn.Module
    name: str
    """As ``build_encoder`` knows it."""
    image_size: int
    channels: int = 3
    normalization: Normalization
    value_range: Range | None = None
    """The values that became 0 and 255 in its training; None for photographs."""
    batch_size: int = 256
    autocast: torch.dtype | None = None
    threads: int | None = None
    """Threads that decode images; None for one per core."""
    progress: Progress | None = None
    """Told how many images of a source are done."""
    origin: Origin | None = None
    """None for weights that are in no file."""

    @property
    def device(self) -> torch.device:
        """Where its weights are, and where it computes; the CPU if it has none."""
        return next(self.network.parameters(), torch.zeros(())).device

    @property
    def dim(self) -> int:
        """How long its vectors are."""
        return feature_dim(self.network, image_size=self.image_size, channels=self.channels)

    @property
    def precision(self) -> str:
        return "float32" if self.autocast is None else str(self.autocast).removeprefix("torch.")

    @property
    def place(self) -> str:
        """What to call it in a message: the path of its weights, or its name."""
        return self.name if self.origin is None else str(self.origin.path)

    @property
    def sha256(self) -> str:
        """Of the file's content, or of the weights if they are in no file."""
        return weights_hash(self.network) if self.origin is None else self.origin.sha256

    @property
    def preprocessing(self) -> Preprocessing:
        """What its images go through first."""
        return Preprocessing(
            image_size=self.image_size,
            channels=self.channels,
            normalization=self.normalization,
            value_range=self.value_range,
        )

    @property
    def report(self) -> str:
        """What is known of its weights, in a line."""
        return f"{self.name}: untrained" if self.origin is None else self.origin.report

    @property
    def header(self) -> dict[str, Any]:
        """What its file records of the training; empty where it records nothing."""
        return {} if self.origin is None else self.origin.header

    def protocol(self) -> dict[str, Any]:
        """What every number that is measured with this encoder must say."""
        recorded = ("step", "epoch", "dssl_version", "fingerprint", "verdict")
        config = self.header.get("config") or {}
        return {
            "file": self.place,
            "sha256": self.sha256,
            "encoder": self.name,
            "image_size": self.image_size,
            "normalization": dataclasses.asdict(self.normalization),
            **({} if self.value_range is None else {"range": self.value_range.plain()}),
            **{name: self.header[name] for name in recorded if name in self.header},
            "training_seed": config.get("seed"),
            "weights": self.report,
        }

    def raw_pixels(self) -> "Encoder":
        """The baseline that learns nothing: the same images, their normalised pixels as features."""
        return dataclasses.replace(self, network=nn.Flatten(), name="raw pixels", origin=None)

    def features(
        self, source: Source, *, indices: NDArray[np.int64] | None = None, quarantine: Quarantine | None = None
    ) -> Features:
        """The vector of every image (or of those at ``indices``), in order: none dropped, none padded, nothing random.

        The network is in evaluation mode meanwhile, and is left as it was. An unreadable image is an error unless there is a
        ``quarantine`` (for training images only: a test set with missing images is another test set).
        """
        transfer = DeviceTransfer(self.device, normalization=self.normalization)
        wanted = np.arange(len(source), dtype=np.int64) if indices is None else np.asarray(indices, np.int64)
        batches = EvaluationBatches(
            source, size=self.image_size, batch_size=self.batch_size, channels=self.channels, indices=wanted,
            normalization=None if transfer.as_bytes else self.normalization, threads=self.threads, quarantine=quarantine,
        )  # fmt: skip
        parts: list[Tensor] = []
        rows: list[NDArray[np.int64]] = []
        done = int(wanted[0]) if len(wanted) else 0  # the shards of one source count on
        with batches, evaluating(self.network):
            for batch in batches:
                parts.append(forward(self.network, transfer.plain(batch.images), autocast=self.autocast))
                rows.append(batch.indices)
                done += len(batch.indices)
                if self.progress is not None:
                    self.progress(done, len(source))
        if not parts:
            raise NothingReadable(
                f"{source.name}: none of its images can be read: there is nothing to compute features of"
            )
        values, computed = torch.cat(parts), np.concatenate(rows)
        if quarantine is not None:
            wanted = wanted[[int(index) not in quarantine for index in wanted]]
        if len(values) != len(wanted) or not np.array_equal(computed, wanted):
            raise DsslError(
                f"{source.name}: {len(values)} features for {len(wanted)} images: samples were dropped or repeated"
            )
        return Features(values=values, rows=computed, unreadable=batches.count - len(computed), cropped=batches.cropped)


def weights_hash(network: nn.Module) -> str:
    """SHA-256 of every parameter and buffer."""
    return content_hash("weights", network.state_dict())


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
