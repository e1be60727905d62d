"""Features of real (drawn) images under a small encoder, a checkpoint of it, and sources of one's own making."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.config_io import to_dict
from dssl.data import Source, shapes
from dssl.data.shapes import Shapes
from dssl.evaluation.features import compute_features
from dssl.evaluation.protocols import Task
from dssl.evaluation.runner import aligned_labels
from dssl.evaluation.store import FeatureStore
from dssl.models import build_encoder
from dssl.weights import checkpoint
from dssl.weights.load import open_weights


class Memory(Source):
    """A source that holds what it is given."""

    def __init__(self, images: NDArray[np.uint8], labels: list[int] | None, classes: tuple[str, ...] | None) -> None:
        self.images, self.classes = images, classes
        self.labels = None if labels is None else np.array(labels, np.int64)
        self.name, self.fingerprint = f"memory ({len(images)} images)", f"memory {images.sum()} {len(images)}"

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> NDArray[np.uint8]:
        return self.images[index]

    def label_of(self, index: int) -> str:
        return f"memory {index}"


@dataclass(frozen=True)
class Split:
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@pytest.fixture(scope="session")
def memory() -> type[Memory]:
    return Memory


@pytest.fixture(scope="session")
def encoder() -> nn.Module:
    """Untrained, but with the statistics of real images, so that its features are not degenerate."""
    torch.manual_seed(0)
    encoder = build_encoder("small", image_size=32)
    source = Shapes(256)
    images = torch.stack([torch.from_numpy(source.image(i)).permute(2, 0, 1) for i in range(256)]).float() / 127 - 1
    with torch.no_grad():
        for _ in range(30):
            encoder(images)
    return encoder.eval()


@pytest.fixture(scope="session")
def real(encoder: nn.Module) -> Split:
    """Features of 2,000 training and 1,001 test images of the built-in set; labels by hue, which such features can tell."""
    train, test = Shapes(2000), Shapes(1001, split="test")
    parts = [compute_features(encoder, one, image_size=32, normalization=CIFAR10).values for one in (train, test)]
    labels = [
        torch.from_numpy(one._images.mean(axis=(1, 2)).argmax(axis=1) + 3 * (one._images.mean(axis=(1, 2, 3)) > 127))
        for one in (train, test)
    ]
    return Split(parts[0], labels[0], parts[1], labels[1])


@pytest.fixture
def few_test_images(monkeypatch: pytest.MonkeyPatch) -> int:
    """The test split of the built-in images, with fewer of them."""
    monkeypatch.setattr(shapes, "TEST_COUNT", 400)
    return shapes.TEST_COUNT


@pytest.fixture
def run_folder(tmp_path: Path, encoder: nn.Module) -> Callable[..., Path]:
    """Writes a run of the encoder."""

    def write(**config: Any) -> Path:
        folder = tmp_path / "run"
        path = folder / "checkpoints" / "step-000000040.safetensors"
        path.parent.mkdir(parents=True)
        header = {
            "dssl_version": "0", "step": 40, "steps_per_epoch": 4, "epoch": 10.0, "fingerprint": "abc", "health": {},
            "verdict": "healthy",
            "normalization": {"mean": list(CIFAR10.mean), "std": list(CIFAR10.std)},
            "config": to_dict(RunConfig(encoder="small", data="shapes:300", **config)),
        }  # fmt: skip
        checkpoint.write(
            path, header, {f"method.encoder.{name}": value for name, value in encoder.state_dict().items()}
        )
        return folder

    return write


@pytest.fixture
def task(run_folder: Callable[..., Path]) -> Callable[..., Task]:
    def build(train: Any = None, test: Any = None, **changes: Any) -> Task:
        folder = run_folder()
        loaded = open_weights(folder)
        train, test = train or Shapes(200), test or Shapes(101, split="test")
        train_labels, test_labels, classes = aligned_labels(train, test)
        store = FeatureStore(loaded, folder=folder / "features", threads=1)
        settings = {"seed": 0, "epochs": 1, **changes}
        return Task(
            store=store, train=train, test=test, train_labels=train_labels, test_labels=test_labels,
            classes=classes, **settings,
        )  # fmt: skip

    return build
