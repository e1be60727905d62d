"""Every image has its row; the encoder is left as it was."""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

from dssl.augment import CIFAR10
from dssl.data import Quarantine, UnreadableImage, open_source
from dssl.data.loader import DeviceTransfer, EvaluationBatches
from dssl.data.shapes import Shapes
from dssl.errors import DsslError
from dssl.weights.encoder import Encoder, FeatureStore, weights_hash


class Mean(nn.Module):
    """An encoder whose feature can be computed by hand, and which remembers how many images it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(images))
        assert not torch.is_grad_enabled()
        assert not self.training
        return self.norm(images.mean(dim=(2, 3)) * self.scale)


def run(network: nn.Module, **changes: Any) -> Encoder:
    return Encoder(**{"network": network, "name": "own", "image_size": 32, "normalization": CIFAR10, **changes})


def by_hand(source: Shapes) -> torch.Tensor:
    images = torch.from_numpy(source._images).double().mean(dim=(1, 2)) / 255
    return (images - torch.tensor(CIFAR10.mean)) / torch.tensor(CIFAR10.std)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_every_sample_has_its_own_row_in_order(batch_size: int) -> None:
    source, encoder = Shapes(101), Mean()
    encoder.train()
    encoder.norm.eval()  # a module with a mode of its own gets it back
    features = run(encoder, batch_size=batch_size).features(source)
    torch.testing.assert_close(features.values.double(), by_hand(source), rtol=1e-4, atol=1e-4)
    assert sum(encoder.seen) == 101  # none twice, none padded
    assert features.rows.tolist() == list(range(101))
    assert encoder.training
    assert not encoder.norm.training


class Bytes:
    """Copies at once, and refuses what a GPU should not be sent."""

    def copy(self, views: dict[str, torch.Tensor]) -> Any:
        assert all(view.dtype == torch.uint8 for view in views.values())
        return {name: view.clone() for name, view in views.items()}, None


def test_bytes_that_are_normalised_on_the_device_give_the_same_bits() -> None:
    transfer = DeviceTransfer(torch.device("cpu"), normalization=CIFAR10, copies=Bytes())
    assert transfer.as_bytes
    with (
        EvaluationBatches(Shapes(50), size=32, batch_size=20, normalization=CIFAR10) as usual,
        EvaluationBatches(Shapes(50), size=32, batch_size=20) as as_bytes,
    ):
        for expected, batch in zip(usual, as_bytes, strict=True):
            assert torch.equal(transfer.plain(batch.images), expected.images)


def test_running_statistics_do_not_move(encoder: nn.Module) -> None:
    before = weights_hash(encoder)
    encoder.train()
    try:
        run(encoder).features(Shapes(64))
        assert encoder.training
    finally:
        encoder.eval()
    assert weights_hash(encoder) == before


def test_precision_follows_the_weights_and_autocast(encoder: nn.Module) -> None:
    source = Shapes(20)
    plain = run(encoder).features(source).values
    double = run(encoder.double()).features(source).values
    encoder.float()
    half = run(encoder, autocast=torch.bfloat16).features(source).values
    assert plain.dtype == double.dtype == half.dtype == torch.float32
    torch.testing.assert_close(plain, double, rtol=1e-3, atol=1e-4)
    assert 0 < (plain - half).abs().max() < 0.1 * plain.abs().max()


@pytest.mark.parametrize("fault", ["drop last", "repeat"])
def test_a_dropped_or_repeated_batch_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EvaluationBatches.__iter__

    def broken(batches: EvaluationBatches) -> Any:
        every = list(original(batches))
        return iter(every[:-1] if fault == "drop last" else [*every, every[0]])

    monkeypatch.setattr(EvaluationBatches, "__iter__", broken)
    with pytest.raises(DsslError, match=r"features for 50 images"):
        run(Mean(), batch_size=20).features(Shapes(50))


def test_an_unreadable_image_is_an_error_unless_there_is_a_quarantine(tmp_path: Path) -> None:
    for number in range(5):
        Pillow.fromarray(np.full((40, 50, 3), 40 * number, np.uint8)).save(tmp_path / f"{number}.png")
    source = open_source(str(tmp_path))
    (tmp_path / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DsslError, match=r"2\.png"):
        run(Mean()).features(source)
    quarantine = Quarantine(source, max_share=1.0)
    features = run(Mean()).features(source, quarantine=quarantine)
    assert features.rows.tolist() == [0, 1, 3, 4]
    assert features.unreadable == 1
    assert features.values[:, 0].diff().min() > 0  # the gray values rise


class SometimesAway(Shapes):
    """Some of its images cannot be read as long as they are away."""

    away: ClassVar = {2}

    def image(self, index: int) -> Any:
        if index in self.away:
            raise UnreadableImage("2.png", "the disk is away")
        return super().image(index)


def test_an_image_that_can_be_read_again_is_not_counted_twice() -> None:
    """Readable or not, it was left out the first time, and stays so."""
    source = SometimesAway(6)
    quarantine = Quarantine(source, max_share=1.0)
    for _ in range(2):
        found = run(Mean()).features(source, quarantine=quarantine)
        assert found.rows.tolist() == [0, 1, 3, 4, 5]
        source.away.clear()


def test_kept_features_are_of_these_files_and_complete(tmp_path: Path) -> None:
    """Lists, and folders of files of equal sizes, have equal fingerprints where names are equal."""
    for folder, level in (("clean", 200), ("blurred", 100)):
        (tmp_path / folder).mkdir()
        for name in ("a", "b", "c"):
            Pillow.new("RGB", (8, 8), (level, level, level)).save(tmp_path / folder / f"{name}.bmp")
        (tmp_path / folder / "list.txt").write_text("a.bmp\nb.bmp\nc.bmp\n")
    for kind in ("list.txt", ""):
        clean, blurred = (open_source(str(tmp_path / folder / kind)) for folder in ("clean", "blurred"))
        assert clean.fingerprint == blurred.fingerprint or kind == ""
        store = FeatureStore(run(Mean(), image_size=8, threads=1), folder=tmp_path / "kept")
        first, other = (store.of(one, allow_unreadable=True).values for one in (clean, blurred))
        assert store.computed == 6
        assert float(first.mean()) > float(other.mean())
        again = FeatureStore(run(Mean(), image_size=8, threads=1), folder=tmp_path / "kept")
        assert torch.equal(again.of(clean, allow_unreadable=True).values, first)
        assert again.computed == 0
    # an image that could not be read for a while: its size and time are those of the file as it is and will be
    shutil.rmtree(tmp_path / "kept")
    file = tmp_path / "clean" / "b.bmp"
    content, time = file.read_bytes(), file.stat().st_mtime_ns
    for _ in range(2):
        file.write_bytes(bytes(len(content)))
        os.utime(file, ns=(time, time))
        store = FeatureStore(run(Mean(), image_size=8, threads=1), folder=tmp_path / "kept")
        source = open_source(str(tmp_path / "clean" / "list.txt"))
        assert store.of(source, allow_unreadable=True).rows.tolist() == [0, 2]
    assert store.computed == 0  # it is still unreadable
    file.write_bytes(content)
    os.utime(file, ns=(time, time))
    back = FeatureStore(run(Mean(), image_size=8, threads=1), folder=tmp_path / "kept")
    whole = open_source(str(tmp_path / "clean" / "list.txt"))
    assert back.of(whole, allow_unreadable=True).rows.tolist() == [0, 1, 2]
