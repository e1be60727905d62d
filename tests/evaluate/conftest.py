"""Features of real (drawn) images under a small encoder, a checkpoint of it, and sources of one's own making."""

import dataclasses
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
from dssl.evaluation.protocols import Benchmark
from dssl.models import build_encoder
from dssl.weights import checkpoint
from dssl.weights.encoder import Encoder, FeatureStore
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
    small = Encoder(network=encoder, name="small", image_size=32, normalization=CIFAR10)
    parts = [small.features(source).values for source in (train, test)]
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
def new_benchmark(run_folder: Callable[..., Path]) -> Callable[..., Benchmark]:
    def build(train: Any = None, test: Any = None, *, folder: Path | None = None) -> Benchmark:
        run = run_folder()
        encoder = dataclasses.replace(open_weights(run), threads=1)
        store = FeatureStore(encoder, folder=run / "features")
        train, test = train or Shapes(200), test or Shapes(101, split="test")
        return Benchmark.of(store, train, test, seed=0, epochs=1, folder=folder)

    return build
