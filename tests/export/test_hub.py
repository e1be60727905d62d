"""The Hugging Face Hub: a folder that timm opens by itself, a card that the Hub can read, and the way there and back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from torch import nn

import dssl
from dssl.cli import main
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.weights.formats import export
from dssl.weights.load import open_weights
from tests.export.hub_server import serving

timm = pytest.importorskip("timm", reason="an extra of dssl")
hub = pytest.importorskip("huggingface_hub", reason="an extra of dssl")


def _checkpoint(
    write: Callable[..., Path], shaken: Callable[..., nn.Module], run: Path, name: str, **config: Any
) -> Path:
    size, channels = config.get("image_size", 32), config.get("channels", 3)
    write(
        run / "checkpoints" / "step-000000012.safetensors", shaken(build_encoder(name, image_size=size, channels=channels)),
        encoder=name, **config,
    )  # fmt: skip
    return run


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18", 64), ("timm:test_resnet", 96), ("timm:vit_tiny_patch16_224", 48)],  # 96 / 0.875 is rounded up by us
)
def test_timm_opens_the_folder_without_us(
    name: str, size: int, write_checkpoint: Callable[..., Path], shaken: Callable[..., nn.Module], tmp_path: Path
) -> None:
    run = _checkpoint(write_checkpoint, shaken, tmp_path / "run", name, image_size=size)
    assert main(["export", str(run), "--formats", "hub"]) == 0
    folder = run / "export" / "hub"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == (name.removeprefix("timm:"), 0)
    encoder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    ours, transform = dssl.load_encoder(run, transform=True)
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(encoder(images), ours(images))
        assert torch.equal(dssl.load_encoder(folder / "model.safetensors")(images), ours(images))
    # somebody adds a classifier
    assert timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=5)(images).shape == (2, 5)
    # and prepares pictures as timm reads it from the file
    data = timm.data.resolve_model_data_config(encoder)
    assert tuple(data["input_size"]) == (3, size, size)
    pixels = np.random.default_rng(0).integers(0, 255, (9, 13, 3), dtype=np.uint8)
    picture = Pillow.fromarray(pixels).resize((260, 180), Pillow.Resampling.BICUBIC)
    theirs = timm.data.create_transform(**data, is_training=False)(picture)
    assert (theirs - transform(picture)).abs().max() < 1.01 / 255 / 0.2  # a level of a channel


def test_other_channels_are_loaded_as_they_are(
    write_checkpoint: Callable[..., Path], shaken: Callable[..., nn.Module], tmp_path: Path
) -> None:
    run = _checkpoint(
        write_checkpoint, shaken, tmp_path / "run", "timm:test_resnet", image_size=32, channels=5, normalization="measure",
        standard="crop(0.2,1)", heavy="crop(0.2,1)",
    )  # fmt: skip
    path = run / "checkpoints" / "step-000000012.safetensors"
    loaded = open_weights(path, normalization=dssl.augment.Normalization((0.5,) * 5, (0.2,) * 5))
    (done,) = export(loaded, tmp_path, formats=["hub"])
    assert done.difference == 0
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["model_args"]["in_chans"] == 5


def test_an_encoder_that_timm_lacks_says_how_it_is_loaded(small_checkpoint: Path, tmp_path: Path) -> None:
    folder = dssl.export(small_checkpoint, formats=["hub"], out=tmp_path / "out") / "hub"
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "dssl"
    assert 'dssl.load_encoder("hf:USER/NAME"' in card.text
    assert "create_model" not in card.text
    assert "architecture" not in json.loads((folder / "config.json").read_text())
    images = torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        expected = dssl.load_encoder(small_checkpoint)(images)
        assert torch.equal(dssl.load_encoder(folder / "model.safetensors")(images), expected)


def test_the_card_states_what_is_known_and_no_path_of_this_machine(
    write_checkpoint: Callable[..., Path], shaken: Callable[..., nn.Module], tmp_path: Path
) -> None:
    private = tmp_path / "private folder"
    run = _checkpoint(
        write_checkpoint, shaken, private / "run", "timm:resnet18", image_size=64, data=f"{private}/photos", init=Path("imagenet")
    )  # fmt: skip
    (run / "evaluation").mkdir()
    protocol = {
        "train_images": 10,
        "test_images": 200,
        "test_data": f"{private.parent}/photos/val",
        "backbone": "frozen",
    }
    result = {"name": "knn k=20", "accuracy": 41.5, "interval_95": [35.0, 48.0], "protocol": protocol}
    measured = {"checkpoint": open_weights(run).protocol(), "results": [result]}
    (run / "evaluation" / "evaluation.json").write_text(json.dumps(measured, default=str))
    assert main(["export", str(run), "--formats", "hub", "safetensors"]) == 0
    folder = run / "export" / "hub"
    card = hub.ModelCard.load(folder / "README.md")
    stated = timm.get_pretrained_cfg("resnet18")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("unknown", "timm", stated.hf_hub_id)
    assert stated.license in card.text
    (metric,) = card.data.eval_results
    assert (metric.metric_type, metric.metric_value, metric.dataset_name) == ("accuracy", 41.5, "val")
    for file in folder.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file
        assert b"private folder" not in file.read_bytes(), file
    assert str(private) in (run / "export" / "README.md").read_text()  # the card for oneself
    assert main(["export", str(run), "--formats", "hub", "--license", "apache-2.0"]) == 0
    assert hub.ModelCard.load(folder / "README.md").data.license == "apache-2.0"
    assert "hub/model.safetensors" in (run / "export" / "README.md").read_text()


def test_there_and_back_through_the_hub(small_checkpoint: Path, tmp_path: Path) -> None:
    """The real client in real processes; only the server is ours."""
    token = "hf_" + "secret" * 6
    run = small_checkpoint.parent.parent
    with serving() as server:
        known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = known | {
            "HF_ENDPOINT": server.url, "HF_TOKEN": token, "HF_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        pushed = subprocess.run(
            [sys.executable, "-m", "dssl", "push", str(run), "me/photos", "--private", "--out", str(tmp_path / "out")],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert pushed.returncode == 0, pushed.stderr
        (created,) = server.created
        assert (created["organization"], created["name"]) == ("me", "photos")
        assert created.get("private") or created["visibility"] == "private"  # as the client's version calls it
        names = {f"me/photos/{name}" for name in ("README.md", "config.json", "model.safetensors")}
        assert server.files.keys() == names
        assert f"{server.url}/me/photos" in pushed.stdout.splitlines()
        assert b'"hf:me/photos"' in server.files["me/photos/README.md"]
        assert server.tokens == {f"Bearer {token}"}
        written = [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
        assert not written
        assert token not in pushed.stdout + pushed.stderr
        script = """
import sys, torch, dssl
features = dssl.load_encoder("hf:me/photos")(torch.ones(1, 3, 32, 32))
assert torch.equal(features, dssl.load_encoder(sys.argv[1])(torch.ones(1, 3, 32, 32)))
assert dssl.load_encoder("hf:me/photos@main").training is False
try:
    dssl.load_encoder("hf:me/nothing")
except dssl.DsslError as error:
    print(error)
"""
        loaded = subprocess.run(
            [sys.executable, "-c", script, str(run)], env=environment, capture_output=True, text=True, check=False
        )
        assert loaded.returncode == 0, loaded.stderr
        assert "hf:me/nothing" in loaded.stdout


@pytest.mark.parametrize("name", ["photos", "me/my/photos", "me/pho tos"])
def test_a_name_that_the_hub_does_not_take_is_refused_before_anything_is_written(
    name: str, small_checkpoint: Path, tmp_path: Path
) -> None:
    from dssl.commands import push

    with pytest.raises(DsslError, match="USER/NAME"):
        push.run(push.Arguments(weights=small_checkpoint, repository=name, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
