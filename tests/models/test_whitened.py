"""The frozen first layer: what it gives on the images it was measured on, and that it travels with the encoder."""

import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from dssl import build_encoder
from dssl.config import RunConfig
from dssl.methods.byol import BYOL
from dssl.methods.method import Method
from dssl.models.for_cpus import WhitenedEncoder, fixed_filters, whiten
from dssl.recipes import recipe
from dssl.training import train
from dssl.training.prepare import build_method, fit_to_data, training_data
from dssl.weights import checkpoint
from dssl.weights.formats import export
from dssl.weights.load import open_weights
from tests.rejecting import rejects


def images(channels: int = 3, size: int = 32, count: int = 40) -> torch.Tensor:
    """Smooth noise with a mean that is not zero."""
    noise = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(3))
    return 0.3 + noise + torch.nn.functional.avg_pool2d(noise, 5, stride=1, padding=2) * 4


def built(channels: int = 3) -> WhitenedEncoder:
    torch.manual_seed(0)
    encoder = build_encoder("whitened", image_size=32, channels=channels)
    assert isinstance(encoder, WhitenedEncoder)
    return encoder


@pytest.mark.parametrize("channels", [3, 1])
def test_patches_become_uncorrelated_with_unit_variance(channels: int) -> None:
    encoder, measured = built(channels), images(channels)
    whiten(encoder, measured)
    windows = sliding_window_view(measured.double().numpy(), (4, 4), axis=(2, 3))[:, :, ::2, ::2]
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, channels * 16)
    filters = encoder.filters.double().numpy().reshape(len(encoder.filters), -1)
    white = patches @ filters.T + encoder.shift.double().numpy()
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(white.T @ white / len(white), np.eye(len(filters)), atol=1e-5)
    # and they are the directions of largest variance
    largest = np.linalg.eigvalsh(np.cov(patches.T))[::-1][: len(filters)]
    np.testing.assert_allclose(1 / np.square(filters).sum(axis=1), largest, rtol=1e-3)


def test_a_flat_set_of_images_gives_finite_filters() -> None:
    encoder = built()
    whiten(encoder, torch.full((8, 3, 32, 32), 0.7))
    assert torch.isfinite(encoder(images())).all()


def test_images_of_another_kind_are_refused() -> None:
    with rejects("N x 3", "(40, 1, 32, 32)"):
        whiten(built(), images(channels=1))


@pytest.mark.parametrize("channels", [3, 1])
def test_the_fixed_filters_are_orthogonal_and_need_no_seed(channels: int) -> None:
    bank = fixed_filters(channels)
    rows = bank.reshape(len(bank), -1)
    assert len(rows) == min(24, 16 * channels)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(unit @ unit.T, np.eye(len(rows)), atol=1e-12)
    torch.manual_seed(5)
    again = build_encoder("whitened", image_size=32, channels=channels).state_dict()["filters"]
    assert torch.equal(again, built(channels).filters)


@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 48), (1, 96)])
def test_every_size_and_number_of_channels_gives_one_feature(channels: int, size: int) -> None:
    encoder = built(channels)
    assert encoder(images(channels, size, count=3)).shape == (3, 256)
    assert {name for name, _ in encoder.named_buffers()} >= {"filters", "shift"}
    assert "filters" not in dict(encoder.named_parameters())


@pytest.mark.parametrize("size", [32, 64])
def test_the_mean_of_the_quadrants_is_the_feature_of_the_whole(size: int) -> None:
    whole, quadrants = built(), build_encoder("whitened-quadrants", image_size=size)
    quadrants.load_state_dict(whole.state_dict())
    shown = images(size=size, count=3)
    with torch.no_grad():
        parts = quadrants.eval()(shown).reshape(3, 256, 4)
        torch.testing.assert_close(parts.mean(dim=2), whole.eval()(shown))
        upside_down = quadrants(shown.flip(2)).reshape(3, 256, 4)
    assert not torch.allclose(upside_down, parts)


def prepared(config: RunConfig, init: Path | None = None) -> Method:
    method = build_method(config, init=init)
    fit_to_data(config, method, training_data(config), new=init is None)
    return method


def test_a_run_measures_by_its_seed_and_not_with_first_weights(tmp_path: Path) -> None:
    def filters(seed: int = 0, init: Path | None = None) -> torch.Tensor:
        config = recipe("shapes", data="shapes:2100", encoder="whitened", seed=seed)
        state = prepared(config, init).encoder.state_dict()
        return torch.as_tensor(state["filters"])

    first = filters()
    assert torch.equal(filters(), first)
    assert not torch.equal(filters(seed=1), first)
    other = built()
    whiten(other, images())
    torch.save(other.state_dict(), tmp_path / "first.pth")
    assert torch.equal(filters(init=tmp_path / "first.pth"), other.filters)


def test_a_run_on_gray_images_measures_gray_filters(tmp_path: Path) -> None:
    for number in range(8):
        Image.effect_noise((40, 36), 50 + number).save(tmp_path / f"{number}.png")
    config = recipe("folder", data=str(tmp_path), channels=1, image_size=32, encoder="whitened", batch_size=4)
    kept = prepared(config).encoder.state_dict()["filters"]
    assert kept.shape == (16, 1, 4, 4)
    assert not torch.equal(kept, built(channels=1).filters)


def test_the_target_of_byol_has_the_measured_filters() -> None:
    method = prepared(recipe("shapes", method="byol", data="shapes:64", encoder="whitened"))
    assert isinstance(method, BYOL)
    kept = method.encoder.state_dict()["filters"]
    assert torch.equal(method.target_encoder.state_dict()["filters"], kept)
    assert not torch.equal(kept, built().filters)


def test_checkpoint_resume_and_export_keep_the_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(
        "shapes",
        method="simclr",
        data="shapes:64",
        encoder="whitened-quadrants",
        epochs=2,
        batch_size=16,
        knn_every=0,
        precision="fp32",
    )
    train(config, tmp_path / "whole")
    # the same run, as if it had been killed after its first epoch
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    checkpoint.path_at(tmp_path / "broken" / "checkpoints", 8).unlink()

    def refuse(*_: object) -> None:
        raise AssertionError("a resumed run measures nothing")

    monkeypatch.setattr("dssl.training.prepare.images_to_whiten", refuse)
    assert train(config, tmp_path / "broken").step == 8
    whole, broken = (
        checkpoint.read(checkpoint.path_at(tmp_path / run / "checkpoints", 8)) for run in ("whole", "broken")
    )
    assert whole.header["sha256"] == broken.header["sha256"]
    kept = whole.part("method.encoder")["filters"]
    assert not torch.equal(kept, built().filters)

    loaded = open_weights(tmp_path / "whole")
    assert torch.equal(loaded.network.state_dict()["filters"], kept)
    export(loaded, tmp_path / "out", formats=["safetensors", "onnx"])
    again = open_weights(next((tmp_path / "out").glob("*.safetensors"))).network
    with torch.no_grad():
        expected = loaded.network(images(count=2))
        assert torch.equal(again(images(count=2)), expected)
    session = onnxruntime.InferenceSession(next((tmp_path / "out").glob("*.onnx")))
    (given,) = session.run(None, {session.get_inputs()[0].name: images(count=2).numpy()})
    np.testing.assert_allclose(given, expected.numpy(), atol=1e-4)
