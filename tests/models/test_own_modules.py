"""Networks of timm and torchvision as modules of your own: trained, adapted, evaluated, exported, loaded by a fresh process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer, get_model
from torchvision.models.resnet import BasicBlock, ResNet

import dssl
from dssl.data.shapes import Shapes

timm = pytest.importorskip("timm", reason="timm is not installed")


def without(module: nn.Module, layer: str) -> nn.Module:
    setattr(module, layer, nn.Identity())
    return module


SMALL: dict[str, Callable[[], nn.Module]] = {
    "timm ViT": lambda: timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=0
    ),
    "timm ConvNeXt": lambda: timm.create_model(
        "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=0
    ),
    "torchvision ViT": lambda: without(VisionTransformer(32, 8, 2, 2, 24, 48), "heads"),
    "torchvision ResNet": lambda: without(ResNet(BasicBlock, [1, 1, 1, 1]), "fc"),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "timm vit_tiny": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0),
    "timm convnext_atto": lambda: timm.create_model("convnext_atto", num_classes=0),
    "timm resnet18": lambda: timm.create_model("resnet18", num_classes=0),
    "torchvision vit_b_32": lambda: without(get_model("vit_b_32", image_size=32), "heads"),
    "torchvision convnext_tiny": lambda: without(get_model("convnext_tiny"), "classifier"),  # gives a feature map
    "torchvision resnet18": lambda: without(get_model("resnet18"), "fc"),
}
TINY: dict[str, Any] = {
    "image_size": 32, "batch_size": 8, "threads": 1, "knn_every": 0, "precision": "fp32",
    "method": {"name": "simclr", "output": 16}, "optimizer": {"name": "adamw", "rate": 1e-3, "warmup_epochs": 0.0},
}  # fmt: skip
LOADED = """
import sys, numpy, torch, dssl
from pathlib import Path
from tests.models.test_own_modules import SMALL, WHOLE
for place in map(Path, sys.argv[1:]):
    encoder = dssl.load_encoder(place / "encoder.safetensors", encoder=(SMALL | WHOLE)[place.name]())
    with torch.no_grad():
        numpy.save(place / "fresh.npy", encoder(torch.from_numpy(numpy.load(place / "images.npy"))).numpy())
"""


def walk(name: str, make: Callable[[], nn.Module], folder: Path) -> Path:
    """From a module to its export, with images and the features that the trained module has of them."""
    torch.manual_seed(0)
    module, source = make(), Shapes(16, split="train")
    data = [(source.image(index), index % 2) for index in range(16)]
    scratch = dssl.train("shapes", data=data, out=folder / name / "scratch", encoder=module, epochs=1, **TINY)
    assert scratch.config.init is None
    adapt = {"head_epochs": 1, "evaluation_size": 32, "trained_blocks": 1, "max_drift": None, "average": 0.0}
    run = dssl.train("adapt", data=data, out=folder / name / "adapt", encoder=module, epochs=2, adapt=adapt, **TINY)
    assert run.finished
    found = dssl.evaluate(run, data=data, test=data, encoder=module, protocols=["knn"], threads=1)
    assert found["results"]
    place = dssl.export(run, encoder=module, out=folder / "exports" / name)
    trained = run.encoder(make())
    assert any(not torch.equal(value, module.state_dict()[key]) for key, value in trained.state_dict().items())
    images = torch.randn(3, 3, 32, 32)
    np.save(place / "images.npy", images.numpy())
    with torch.no_grad():
        np.save(place / "features.npy", trained(images).numpy())
    return place


def load_in_a_fresh_process(places: list[Path]) -> None:
    words = [sys.executable, "-c", LOADED, *map(str, places)]
    loaded = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert loaded.returncode == 0, loaded.stderr
    for place in places:
        assert np.array_equal(np.load(place / "fresh.npy"), np.load(place / "features.npy")), place.name


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.mark.parametrize("name", SMALL)
def test_a_small_network_walks_the_whole_way(name: str, exports: Path) -> None:
    walk(name, SMALL[name], exports)


def test_a_fresh_process_loads_what_was_exported(exports: Path) -> None:
    places = sorted((exports / "exports").glob("*"))
    assert places
    load_in_a_fresh_process(places)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_published_network_walks_the_whole_way(name: str, tmp_path: Path) -> None:
    load_in_a_fresh_process([walk(name, WHOLE[name], tmp_path)])
