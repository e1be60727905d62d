"""ImageNet weights by name, from the caches of torchvision and timm, and what is said where they cannot be had."""

import os
import subprocess
import sys
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision

from dssl.augment import IMAGENET, Normalization
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.training.prepare import normalization_of
from dssl.weights.load import imagenet_normalization, load_imagenet, load_weights_into, open_weights, torchvision_file
from dssl.weights.match import match
from tests.rejecting import states

FILE = "mobilenet_v2-b0353104.pth"
REAL = Path(torch.hub.get_dir()) / "checkpoints" / FILE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_a_file_in_torchs_cache_is_taken_without_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *_, **__: pytest.fail("the network was asked"))
    torch.manual_seed(1)
    original = torchvision.models.mobilenet_v2()
    torch.save(original.state_dict(), cache / FILE)
    encoder = build_encoder("mobilenet_v2", image_size=64)
    line = load_imagenet(encoder, "mobilenet_v2", image_size=64, channels=3)
    assert "312 of 312 tensors loaded" in line
    images = torch.randn(2, 3, 64, 64)
    original.classifier[1] = torch.nn.Identity()
    with torch.no_grad():
        assert torch.equal(encoder.eval()(images), original.eval()(images))


def test_without_network_a_line_says_which_file_to_fetch_and_where_to_put_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(DsslError) as caught:
        torchvision_file("mobilenet_v2")
    text = str(caught.value)
    assert "https://download.pytorch.org/models/mobilenet_v2-b0353104.pth" in text
    assert str(cache / FILE) in text
    assert "name resolution" in text
    assert "name the file instead of imagenet" in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["small", "whitened", "resnet18-cifar"])
def test_encoders_that_nobody_trained_on_imagenet_are_refused(name: str) -> None:
    with pytest.raises(DsslError, match=f"ImageNet.*{name}"):
        load_imagenet(build_encoder(name, image_size=32), name, image_size=32, channels=3)


def test_timms_weights_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build_encoder("timm:test_resnet", image_size=32)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(timm, "create_model", refuse)
    place = "https://huggingface.co/timm/test_resnet.r160_in1k/resolve/main/"
    with pytest.raises(DsslError, match=rf"fetch {place}\S+ .*instead of imagenet"):
        load_imagenet(encoder, "timm:test_resnet", image_size=32, channels=3)


def test_timms_weights_come_from_the_hubs_cache(tmp_path: Path) -> None:
    # in another process: the hub's client reads where its cache is when it is imported
    program = f"""
import json, pathlib, torch, timm
from safetensors.torch import save_file
torch.manual_seed(3)
model = timm.create_model("test_resnet")
home = pathlib.Path({str(tmp_path)!r}) / "hub" / "models--timm--test_resnet.r160_in1k"
snapshot = home / "snapshots" / ("0" * 40)
snapshot.mkdir(parents=True), (home / "refs").mkdir()
(home / "refs" / "main").write_text("0" * 40)
save_file(model.state_dict(), snapshot / "model.safetensors")
from dssl.models import build_encoder
from dssl.weights.load import load_imagenet
gray = torch.rand(2, 1, 64, 64)
model.reset_classifier(0)
for channels in (3, 1):
    encoder = build_encoder("timm:test_resnet", image_size=64, channels=channels)
    print(load_imagenet(encoder, "timm:test_resnet", image_size=64, channels=channels))
    with torch.no_grad():
        ours, theirs = encoder.eval()(gray.expand(-1, channels, -1, -1)), model.eval()(gray.expand(-1, 3, -1, -1))
        print(float((ours - theirs).abs().max()) < 1e-4)
"""
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    colour, same_colour, gray, same_gray = done.stdout.splitlines()
    for line in (colour, gray):
        assert line.startswith("timm/test_resnet.r160_in1k: timm's weights r160_in1k loaded")
        assert ("3 channels" in line) == (line is gray)
    assert (same_colour, same_gray) == ("True", "True")


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "resnet18-cifar", "small"])
def test_the_first_layer_of_colour_weights_is_summed_for_gray_images(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    colour = build_encoder(name, image_size=32).eval()
    torch.save(colour.state_dict(), tmp_path / "weights.pth")
    gray = build_encoder(name, image_size=32, channels=1)
    report = load_weights_into(gray, tmp_path / "weights.pth")
    states(report.text(), "3 channels", "gray")
    images = torch.randn(3, 1, 32, 32)
    with torch.no_grad():
        expected, found = colour(images.expand(-1, 3, -1, -1)), gray.eval()(images)
    assert torch.allclose(found, expected, atol=1e-4)
    # colour images get the weights as they are, and nobody says otherwise
    assert "summed" not in load_weights_into(colour, tmp_path / "weights.pth").text()


@pytest.mark.parametrize("second", ["target", "optimizer"])
def test_the_trained_network_is_made_gray_wherever_it_stands(tmp_path: Path, second: str) -> None:
    torch.manual_seed(3)
    networks = {name: build_encoder("resnet18", image_size=32).eval() for name in (second, "online")}
    content = {f"{name}.{key}": value for name, one in networks.items() for key, value in one.state_dict().items()}
    torch.save(content, tmp_path / "weights.pth")  # the second network first
    gray = build_encoder("resnet18", image_size=32, channels=1)
    report = load_weights_into(gray, tmp_path / "weights.pth")
    assert report.prefix == "online."
    states(report.text(), "online.conv1.weight", "3 channels")
    assert torch.equal(gray.conv1.weight, networks["online"].conv1.weight.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("size", [32, 96])
def test_the_positions_of_a_transformer_are_resized_as_timm_does(tmp_path: Path, size: int) -> None:
    torch.manual_seed(4)
    original = timm.create_model("vit_tiny_patch16_224", img_size=64)
    torch.save(original.state_dict(), tmp_path / "weights.pth")
    encoder = build_encoder("timm:vit_tiny_patch16_224", image_size=size)
    report = load_weights_into(encoder, tmp_path / "weights.pth")
    patches = size // 16
    states(report.text(), "pos_embed", "4 x 4", f"{patches} x {patches}")
    expected = timm.layers.resample_abs_pos_embed(original.pos_embed, [patches, patches])
    assert torch.allclose(encoder.pos_embed, expected, atol=1e-6)
    assert (
        "resized"
        not in load_weights_into(
            build_encoder("timm:vit_tiny_patch16_224", image_size=64), tmp_path / "weights.pth"
        ).text()
    )


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "timm:test_resnet", "resnet18"])
def test_a_run_from_imagenet_weights_normalises_as_they_were_trained(name: str, channels: int) -> None:
    """Several of timm's weights were trained with a mean and a deviation of 0.5."""
    config = RunConfig(data="photos", encoder=name, channels=channels, normalization="imagenet")
    found = normalization_of(replace(config, init=Path("imagenet")), None)
    expected = Normalization((0.5,) * 3, (0.5,) * 3) if name.startswith("timm:") else IMAGENET
    assert found == (expected if channels == 3 else expected.gray())
    assert normalization_of(config, None) == (IMAGENET if channels == 3 else IMAGENET.gray())


def test_a_file_is_normalised_for_as_it_says_or_as_the_published_weights(
    tmp_path: Path, small_checkpoint: Path
) -> None:
    torch.manual_seed(5)
    file, half = tmp_path / "vit.pth", Normalization((0.5,) * 3, (0.5,) * 3)
    name = "timm:vit_tiny_patch16_224"
    torch.save(build_encoder(name, image_size=32).state_dict(), file)
    loaded = open_weights(file, encoder=name, image_size=32)
    assert loaded.normalization == half
    assert "(mean 0.5, 0.5, 0.5" in loaded.report
    assert open_weights(file, encoder=name, image_size=32, normalization=IMAGENET).normalization == IMAGENET
    # and so for a run that starts from it, which the advice of a failed download leads to
    config = RunConfig(data="photos", encoder=name, normalization="imagenet", init=file)
    assert normalization_of(config, None) == half
    # a checkpoint of dssl knows
    own = replace(config, encoder="small", init=small_checkpoint)
    assert normalization_of(own, None).mean == (0.5, 0.4, 0.3)
    assert imagenet_normalization("efficientnet_v2_l") == half
    assert imagenet_normalization("mobilenet_v2") == IMAGENET


def test_the_positions_of_torchvisions_transformers_are_resized_too() -> None:
    def made(size: int) -> torch.nn.Module:
        return torchvision.models.VisionTransformer(
            image_size=size, patch_size=8, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=4
        )

    small, large = made(16), made(32)
    chosen, report = match(large, small.state_dict(), path=Path("weights.pth"))
    states(report.text(), "encoder.pos_embedding", "2 x 2", "4 x 4")
    old, new = small.encoder.pos_embedding, chosen["encoder.pos_embedding"]
    assert torch.equal(new[:, 0], old[:, 0])  # of the class token
    assert torch.allclose(new[:, 1:].mean(), old[:, 1:].mean(), atol=1e-6)
    # a grid that is not square is not guessed at
    broken = small.state_dict() | {"encoder.pos_embedding": old[:, :4]}
    with pytest.raises(DsslError, match=r"encoder\.pos_embedding"):
        match(large, broken, path=Path("weights.pth"))


@pytest.mark.skipif(not REAL.is_file(), reason=f"torchvision's {FILE} is not in torch's cache")
def test_the_real_weights_know_imagenet(tmp_path: Path) -> None:
    encoder = build_encoder("mobilenet_v2", image_size=64, channels=1)
    assert "features.0.0.weight" in load_imagenet(encoder, "mobilenet_v2", image_size=64, channels=1)
    with torch.no_grad():
        features = encoder.eval()(torch.rand(4, 1, 64, 64))
    assert features.shape == (4, 1280)
    assert 0 < float(features.max()) <= 6  # ReLU6, then a mean
