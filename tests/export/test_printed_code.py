"""The loading code that ``dssl export`` prints, run as it stands in a fresh process, for every family of encoders."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from dssl.augment import IMAGENET
from dssl.models import build_encoder
from dssl.weights.encoder import Encoder
from dssl.weights.formats import card, export, probe_images, rebuild_lines

# encoder, size, channels, format
FAMILIES: list[tuple[str, int, int, str]] = [
    ("small", 32, 3, "safetensors"),
    ("resnet18", 32, 1, "safetensors"),
    ("resnet18-cifar-padding2", 32, 3, "safetensors"),
    ("resnet18", 64, 3, "timm"),
    ("densenet121", 64, 3, "torchvision"),
    ("efficientnet_b0", 64, 3, "torchvision"),
    ("mnasnet0_5", 64, 3, "torchvision"),
    ("mobilenet_v3_small", 64, 3, "torchvision"),
    ("regnet_y_400mf", 64, 3, "torchvision"),
    ("shufflenet_v2_x0_5", 64, 3, "torchvision"),
    ("timm:vit_tiny_patch16_224", 64, 3, "timm"),
    ("timm:test_resnet", 64, 1, "timm"),
    ("timm:test_resnet", 64, 1, "hub"),
    ("mobilenet_v2", 64, 3, "hub"),
]
SLOW: list[tuple[str, int, int, str]] = [
    ("vit_b_16", 64, 3, "torchvision"),
    ("small", 32, 1, "torch"),
    ("small", 32, 3, "onnx"),
    ("timm:deit_tiny_patch16_224", 64, 1, "timm"),
    ("alexnet", 64, 3, "torchvision"),
    ("vgg11", 64, 3, "torchvision"),
    ("convnext_tiny", 64, 3, "torchvision"),
    ("swin_t", 64, 3, "torchvision"),
    ("swin_v2_t", 64, 3, "torchvision"),
    ("maxvit_t", 448, 3, "torchvision"),
    ("timm:swin_tiny_patch4_window7_224", 64, 3, "timm"),
    ("timm:beit_base_patch16_224", 64, 3, "timm"),
    ("timm:eva02_tiny_patch14_224", 56, 3, "timm"),
]

RUNNER = """
import json, os, sys
import numpy as np
import torch
for folder, code in json.load(sys.stdin):
    os.chdir(folder)
    images = np.load("images.npy")
    names = {"images": images}
    *_, last = [exec(line, names) if "session.run(" not in line else eval(line, names) for line in code]
    if last is None:
        with torch.no_grad():
            last = [names["encoder"](torch.from_numpy(images)).numpy()]
    np.save("found.npy", last[0])
"""


def run_printed_code(
    families: Sequence[tuple[str, int, int, str]], shaken: Callable[..., nn.Module], folder: Path
) -> None:
    jobs, wanted = [], []
    for number, (name, size, channels, kind) in enumerate(families):
        encoder = shaken(build_encoder(name, image_size=size, channels=channels))
        place = folder / str(number)
        loaded = Encoder(network=encoder, name=name, image_size=size, channels=channels, normalization=IMAGENET)
        (done,) = export(loaded, place, formats=[kind])
        code = card(loaded, [done], evaluation=None).partition("```python\n")[2].partition("\n```")[0].split("\n")
        assert code == list(done.code)
        images = probe_images(loaded, 2)
        np.save(place / "images.npy", images.numpy())
        with torch.no_grad():
            wanted.append((name, place, encoder(images)))
        jobs.append((str(place), code))
    done = subprocess.run([sys.executable, "-c", RUNNER], input=json.dumps(jobs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, place, features in wanted:
        found = torch.from_numpy(np.load(place / "found.npy"))
        assert found.shape == features.shape, name
        assert (found - features).abs().max() <= 1e-4 * features.abs().max(), name


def test_the_printed_code_gives_the_same_features_in_a_fresh_process(
    shaken: Callable[..., nn.Module], tmp_path: Path
) -> None:
    run_printed_code(FAMILIES, shaken, tmp_path)


def test_the_printed_code_builds_a_transformer_of_the_right_size() -> None:
    """Its shapes alone: the 86 million weights of the smallest that torchvision has are written and read in a slow test."""
    with torch.device("meta"):
        encoder = torchvision.models.vit_b_16(image_size=64)
    encoder.heads.head = nn.Identity()
    loaded = Encoder(network=encoder, name="vit_b_16", image_size=64, normalization=IMAGENET)
    imports, build, change, *_ = rebuild_lines(loaded, "encoder.pth")
    names: dict[str, Any] = {}
    with torch.device("meta"):
        exec("\n".join((imports, build, change)), names)
    found, expected = (
        {name: value.shape for name, value in one.state_dict().items()} for one in (names["encoder"], encoder)
    )
    assert found == expected


@pytest.mark.slow
def test_the_printed_code_of_slow_and_big_ones(shaken: Callable[..., nn.Module], tmp_path: Path) -> None:
    run_printed_code(SLOW, shaken, tmp_path)
