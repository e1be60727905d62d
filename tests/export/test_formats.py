"""Every format, loaded by its real client in the way that its own lines of code say."""

import dataclasses
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import torchvision
from PIL import Image as Pillow
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from dssl.commands.export import Arguments, run
from dssl.data import open_source
from dssl.data.loader import EvaluationBatches
from dssl.data.scale import Range
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.weights import checkpoint, formats
from dssl.weights.encoder import Encoder
from dssl.weights.formats import FORMATS, card, export, probe_images, rebuild_lines
from dssl.weights.load import load_encoder, open_weights
from dssl.weights.match import from_detectron2, to_detectron2
from tests.rejecting import rejects, states

IMAGES = torch.linspace(-2, 2, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64).mul(37).sin()


@pytest.fixture(scope="module")
def resnet18(shaken: Callable[..., nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(shaken(build_encoder("resnet18", image_size=64)).state_dict(), path)
    return open_weights(path, image_size=64)


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def loaded(request: Any, shaken: Callable[..., nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Both kinds of residual block, for what depends on the names of tensors."""
    if request.param == "resnet18":
        return request.getfixturevalue("resnet18")  # type: ignore[no-any-return]
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(shaken(build_encoder(request.param, image_size=64)).state_dict(), path)
    return open_weights(path, image_size=64)


def features(encoder: nn.Module, images: Tensor = IMAGES) -> Tensor:
    encoder.eval()
    with torch.no_grad():
        return encoder(images)  # type: ignore[no-any-return]


def execute(lines: tuple[str, ...] | list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)  # the lines are ours; that they run is what is tested
    return names


@pytest.mark.parametrize("name", ["torchvision", "timm", "safetensors"])
def test_round_trip_by_the_printed_lines(
    name: str, resnet18: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (done,) = export(resnet18, tmp_path, formats=[name])
    assert done.difference == 0.0
    assert "every tensor loaded" in done.text()
    assert "largest difference 0.0" in done.text()
    lines = list(done.code)
    if name == "safetensors":
        lines = ["from dssl.weights.load import load_encoder", lines[1].replace("dssl.load", "load")]
    again = execute(lines, tmp_path, monkeypatch)["encoder"]
    assert torch.equal(features(again), features(resnet18.network))
    assert done.tensors == len(resnet18.network.state_dict())


def test_clients_load_strictly_without_our_lines(loaded: Encoder, tmp_path: Path) -> None:
    export(loaded, tmp_path, formats=["torchvision", "timm"])
    theirs = torchvision.models.get_model(loaded.name, weights=None)
    result = theirs.load_state_dict(torch.load(tmp_path / "encoder-torchvision.pth", weights_only=True), strict=False)
    assert set(result.missing_keys) == {"fc.weight", "fc.bias"}
    assert result.unexpected_keys == []
    pyramid = timm.create_model(loaded.name, pretrained=False, features_only=True)
    pyramid.load_state_dict(load_file(tmp_path / "encoder-timm.safetensors"), strict=True)
    pyramid.eval()
    with torch.no_grad():
        last = pyramid(IMAGES)[-1]
    torch.testing.assert_close(last.mean(dim=(2, 3)), features(loaded.network), rtol=1e-4, atol=1e-5)


def detectron2_names(depth: int) -> set[str]:
    """The names of Detectron2's ResNet, from its rule: stem, res2 to res5, convolutions with a norm inside each."""

    def conv(name: str) -> set[str]:
        return {f"{name}.weight"} | {
            f"{name}.norm.{part}" for part in ("weight", "bias", "running_mean", "running_var")
        }

    blocks, convs = {18: ((2, 2, 2, 2), 2), 50: ((3, 4, 6, 3), 3)}[depth]
    names = conv("stem.conv1")
    for stage, count in enumerate(blocks, start=2):
        for block in range(count):
            for number in range(1, convs + 1):
                names |= conv(f"res{stage}.{block}.conv{number}")
        if stage > 2 or depth == 50:
            names |= conv(f"res{stage}.0.shortcut")
    return names


def test_detectron2_names(loaded: Encoder, tmp_path: Path) -> None:
    (done,) = export(loaded, tmp_path, formats=["detectron2"])
    with done.path.open("rb") as file:
        content = pickle.load(file, encoding="latin1")  # noqa: S301 as Detectron2 itself does; the file is ours
    assert content["matching_heuristics"] is True
    assert isinstance(content["__author__"], str)
    assert set(content["model"]) == detectron2_names(int(loaded.name.removeprefix("resnet")))
    assert all(isinstance(value, np.ndarray) for value in content["model"].values())
    own = loaded.network.state_dict()
    assert all(np.array_equal(value, own[from_detectron2(name)].numpy()) for name, value in content["model"].items())
    assert "without Detectron2" in done.text()


def test_names_there_and_back(loaded: Encoder) -> None:
    for name in loaded.network.state_dict():
        assert from_detectron2(to_detectron2(name)) == name


def test_onnx_is_one_file_with_a_free_batch(resnet18: Encoder, tmp_path: Path) -> None:
    (done,) = export(resnet18, tmp_path, formats=["onnx"])
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    for images in (IMAGES, IMAGES[:1], torch.cat([IMAGES] * 3)):
        (found,) = session.run(["features"], {"images": images.numpy()})
        expected = features(resnet18.network, images)
        assert (torch.from_numpy(found) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert done.difference < 1e-4


@pytest.mark.slow
def test_onnx_and_torch_of_resnet50(shaken: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.save(shaken(build_encoder("resnet50", image_size=64)).state_dict(), tmp_path / "w.pth")
    for done in export(open_weights(tmp_path / "w.pth", image_size=64), tmp_path / "out", formats=["onnx", "torch"]):
        assert done.difference < 1e-4


def test_torch_export(small_checkpoint: Path, tmp_path: Path) -> None:
    small = open_weights(small_checkpoint)
    (done,) = export(small, tmp_path, formats=["torch"])
    again = torch.export.load(tmp_path / "encoder.pt2").module()
    images = probe_images(small, 5)
    with torch.no_grad():
        torch.testing.assert_close(again(images), features(small.network, images), rtol=1e-6, atol=1e-6)
    assert done.difference <= 1e-6
    with pytest.raises(DsslError, match=r"encoder\.pt2.*torch\.export"):
        load_encoder(tmp_path / "encoder.pt2")


def test_safetensors_keep_the_configuration(small_checkpoint: Path, tmp_path: Path) -> None:
    small = open_weights(small_checkpoint)
    export(small, tmp_path, formats=["safetensors"])
    again = open_weights(tmp_path / "encoder.safetensors")
    assert (again.name, again.image_size, again.normalization) == (small.name, small.image_size, small.normalization)
    assert again.header["config"] == small.header["config"]
    assert again.header["exported_from"] == small.sha256
    with safe_open(tmp_path / "encoder.safetensors", framework="pt") as file:
        assert "optimizer" not in " ".join(file.keys())
    content = bytearray((tmp_path / "encoder.safetensors").read_bytes())
    content[-3] ^= 4
    (tmp_path / "encoder.safetensors").write_bytes(content)
    with pytest.raises(DsslError, match="damaged"):
        load_encoder(tmp_path / "encoder.safetensors")


@pytest.mark.parametrize("name", ["torchvision", "timm", "detectron2"])
def test_encoders_that_a_client_cannot_hold(
    name: str, small_checkpoint: Path, shaken: Callable[..., nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(DsslError, match=r"small.*--formats safetensors"):
        export(open_weights(small_checkpoint), tmp_path / "out", formats=[name])
    torch.save(shaken(build_encoder("resnet18-cifar", image_size=32)).state_dict(), tmp_path / "w.pth")
    cifar = open_weights(tmp_path / "w.pth", stem="cifar")
    with pytest.raises(DsslError, match=r"resnet18.*--formats safetensors") as caught:
        export(cifar, tmp_path / "out", formats=[name])
    assert "Conv2d(3, 64, 3, padding=1, bias=False)" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_lines_that_rebuild_a_cifar_encoder_work(
    shaken: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(shaken(build_encoder("resnet18-cifar", image_size=32)).state_dict(), tmp_path / "w.pth")
    cifar = open_weights(tmp_path / "w.pth", stem="cifar")
    (done,) = export(cifar, tmp_path, formats=["safetensors"])
    lines = rebuild_lines(cifar, done.path.name)
    assert len(lines) == 5  # the import and four lines
    again = execute(lines, tmp_path, monkeypatch)["encoder"]
    images = probe_images(cifar)
    assert torch.equal(features(again, images), features(cifar.network, images))


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_other_torchvision_models(
    name: str, tmp_path: Path, shaken: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(shaken(build_encoder(name, image_size=64)).state_dict(), tmp_path / "w.pth")
    other = open_weights(tmp_path / "w.pth", encoder=name, image_size=64)
    (done,) = export(other, tmp_path, formats=["torchvision"])
    again = execute(done.code, tmp_path, monkeypatch)["encoder"]
    assert torch.equal(features(again), features(other.network))
    for refused in ("timm", "detectron2"):
        with rejects(refused, name):
            export(other, tmp_path, formats=[refused])


def test_a_timm_encoder_goes_back_to_timm(
    tmp_path: Path, shaken: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "timm:mobilenetv3_small_050"
    torch.save(shaken(build_encoder(name, image_size=64)).state_dict(), tmp_path / "w.pth")
    other = open_weights(tmp_path / "w.pth", encoder=name, image_size=64)
    (done,) = export(other, tmp_path, formats=["timm"])
    again = execute(done.code, tmp_path, monkeypatch)["encoder"]
    assert torch.equal(features(again), features(other.network))
    with rejects("torchvision", name):
        export(other, tmp_path, formats=["torchvision"])


def test_a_client_that_gives_other_features_voids_the_file(
    resnet18: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = formats.save_file

    def careless(state: dict[str, Tensor], path: Path) -> None:
        original({name: value * 1.001 if name == "conv1.weight" else value for name, value in state.items()}, path)

    monkeypatch.setattr(formats, "save_file", careless)
    with pytest.raises(DsslError, match="differ by "):
        export(resnet18, tmp_path, formats=["timm"])
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DsslError, match="'onnx'"):
        export(open_weights(small_checkpoint), tmp_path, formats=["onn"])
    assert set(FORMATS) == {"safetensors", "torchvision", "timm", "detectron2", "onnx", "torch", "hub"}


def test_the_command_prints_what_was_verified_and_writes_a_card(
    small_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_checkpoint.parent.parent
    assert run(Arguments(weights=folder)) == 0
    output = capsys.readouterr().out
    assert "every tensor loaded (72)" in output
    assert "largest difference 0.0" in output
    card = (folder / "export" / "README.md").read_text()
    for part in ("view graph | `dssl`", "heavy policy | `ra(2,5)`", "shapes", "epoch | 3.0", "None"):
        assert part in card
    with pytest.raises(DsslError, match="--formats"):
        run(Arguments(weights=folder, formats=()))


def test_an_export_replaces_nothing_but_its_own(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, other = small_checkpoint.parent.parent, tmp_path / "other.safetensors"
    saved = checkpoint.read(small_checkpoint)
    header = {name: value for name, value in saved.header.items() if name != "sha256"}
    checkpoint.write(other, header | {"epoch": 4.0}, {name: value * 2 for name, value in saved.tensors.items()})
    mine = tmp_path / "project"
    mine.mkdir()
    (mine / "README.md").write_text("my own words")
    with pytest.raises(DsslError, match=r"README\.md"):
        run(Arguments(weights=run_folder, out=mine))
    assert [(path.name, path.read_text()) for path in mine.iterdir()] == [("README.md", "my own words")]

    # a second export of the same weights adds to the card of the first
    out = tmp_path / "out"
    run(Arguments(weights=run_folder, out=out))
    first = (out / "README.md").read_text()
    run(Arguments(weights=run_folder, out=out, formats=("torch",)))
    second = (out / "README.md").read_text()
    for name in ("`encoder.safetensors`: every tensor", "`encoder.pt2`: every tensor"):
        assert second.count(name) == 1
    run(Arguments(weights=run_folder, out=out))
    (out / "encoder.pt2").unlink()
    run(Arguments(weights=run_folder, out=out))
    assert (out / "README.md").read_text() == first
    with pytest.raises(DsslError, match=str(out)):
        run(Arguments(weights=other, out=out))
    assert (out / "README.md").read_text() == first

    # in the run's own folder the files of its earlier weights go
    run(Arguments(weights=run_folder, formats=("safetensors", "torch")))
    checkpoint.write(checkpoint.path_at(run_folder / "checkpoints", 10**6), header, checkpoint.read(other).tensors)
    capsys.readouterr()
    run(Arguments(weights=run_folder))
    states(capsys.readouterr().out, "encoder.pt2", "removed")
    assert sorted(path.name for path in (run_folder / "export").iterdir()) == ["README.md", "encoder.safetensors"]


def test_the_card_claims_no_more_than_is_known(small_checkpoint: Path, tmp_path: Path) -> None:
    own = open_weights(small_checkpoint)
    assert card(own, (), evaluation=None).startswith("# small, pretrained without labels\n")

    def with_header(header: dict[str, Any]) -> Encoder:
        assert own.origin is not None
        return dataclasses.replace(own, origin=dataclasses.replace(own.origin, header=header))

    adapted = with_header({**own.header, "config": {**own.header["config"], "init": "imagenet"}})
    for one, row in (
        (adapted, "| started from the weights | `imagenet` |"),
        (with_header({}), "| data | unknown |"),
    ):
        text = card(one, (), evaluation=None)
        assert text.startswith("# small\n")
        assert row in text


def test_the_card_holds_the_numbers_of_the_same_weights_only(small_checkpoint: Path) -> None:
    folder = small_checkpoint.parent.parent
    result = {
        "name": "knn k=20", "accuracy": 41.5, "interval_95": [40.0, 43.0],
        "protocol": {"train_images": 300, "test_images": 100, "backbone": "frozen: verified"},
    }  # fmt: skip
    (folder / "evaluation").mkdir()
    about = json.loads(json.dumps(open_weights(folder).protocol()))
    changes = (({}, True), ({"sha256": "0" * 64}, False), ({"image_size": 64}, False))
    for change, shown in (*changes, ({"normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}}, False)):
        content = {"checkpoint": about | change, "results": [result]}
        (folder / "evaluation" / "evaluation.json").write_text(json.dumps(content))
        run(Arguments(weights=folder))
        assert ("41.50%" in (folder / "export" / "README.md").read_text()) == shown


@pytest.mark.parametrize("name", ["timm:resnet26d", "timm:resnetv2_50"])
def test_relatives_of_resnets_have_no_names_in_detectron2(name: str, small_checkpoint: Path, tmp_path: Path) -> None:
    network = build_encoder(name, image_size=64)
    loaded = dataclasses.replace(open_weights(small_checkpoint), name=name, network=network, image_size=64)
    with rejects("detectron2", name):
        formats.check_formats(loaded, tmp_path, ["detectron2"])


def test_the_card_knows_comparisons_of_the_same_weights(small_checkpoint: Path) -> None:
    folder = small_checkpoint.parent.parent
    (folder / "evaluation").mkdir()
    about = json.loads(json.dumps(open_weights(folder).protocol()))
    row = {
        "name": "linear probe", "before": 70.5, "after": 72.25, "difference": 1.75, "interval": [0.5, 3.0], "verdict": "better",
    }  # fmt: skip
    for change, shown in (({}, True), ({"sha256": "0" * 64}, False)):
        content = {"checkpoint": about | change, "against": [{"against": "start", "protocols": [row]}]}
        (folder / "evaluation" / "comparison.json").write_text(json.dumps(content))
        run(Arguments(weights=folder))
        line = "| linear probe | `start` | 70.50% | 72.25% | +1.75 | +0.50 to +3.00 | better |"
        assert (line in (folder / "export" / "README.md").read_text()) == shown


def test_nothing_is_written_unless_every_format_can_be(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = small_checkpoint.parent.parent, tmp_path / "out"
    run(Arguments(weights=folder, formats=("torch",)))
    before = {path: path.read_bytes() for path in (folder / "export").iterdir()}
    newer = {name: value + 1 for name, value in checkpoint.read(small_checkpoint).tensors.items()}
    header = {name: value for name, value in checkpoint.read(small_checkpoint).header.items() if name != "sha256"}
    checkpoint.write(
        checkpoint.path_at(small_checkpoint.parent, 99), header, newer
    )  # whose export replaces the earlier

    def refused(*formats: str, out: Path | None = None) -> str:
        with pytest.raises(DsslError) as caught:
            run(Arguments(weights=folder, formats=formats, out=out))
        return str(caught.value)

    assert "torchvision" in refused("safetensors", "torchvision")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        assert "dssl[onnx]" in refused("safetensors", "onnx")
    assert {path: path.read_bytes() for path in (folder / "export").iterdir()} == before
    (out / "encoder.safetensors").mkdir(parents=True)
    assert str(out / "encoder.safetensors") in refused("torch", "safetensors", out=out)
    assert [path.name for path in out.iterdir()] == ["encoder.safetensors"]
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused("safetensors", out=tmp_path / "file")


@pytest.mark.parametrize("size", [(40, 60), (32, 32), (32, 50), (7, 9)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_the_transform_gives_what_evaluation_sees(small_checkpoint: Path, tmp_path: Path, size: Any, mode: str) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    colours = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    picture = Pillow.fromarray(colours).convert(mode)
    exif = Pillow.Exif()
    exif[0x0112] = 6
    picture.save(photos / "1.png", exif=exif)
    loaded = open_weights(small_checkpoint)
    batches = EvaluationBatches(open_source(str(photos)), size=32, normalization=loaded.normalization, threads=1)
    with batches:
        (expected,) = (batch.images for batch in batches)
    encoder, transform = load_encoder(small_checkpoint, transform=True)
    with Pillow.open(photos / "1.png") as image:
        tensor = transform(image)
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, expected[0])
    torch.testing.assert_close(features(encoder, tensor[None]), features(loaded.network, expected))


def test_the_transform_of_a_gray_encoder_and_of_one_with_a_range(small_checkpoint: Path) -> None:
    loaded = open_weights(small_checkpoint)
    gray = dataclasses.replace(loaded, channels=1, normalization=loaded.normalization.gray())
    values = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32)
    mean, std = gray.normalization.mean[0], gray.normalization.std[0]
    tensor = gray.preprocessing(Pillow.fromarray((values // 4).astype(np.uint8)))
    torch.testing.assert_close(
        tensor[0], torch.from_numpy((values // 4 / 255 - mean) / std).float(), rtol=1e-5, atol=1e-5
    )
    ranged = dataclasses.replace(gray, value_range=Range(((0.0, 1023.0),)))
    levels = np.floor(values / 1023 * 255 + 0.5) / 255
    tensor = ranged.preprocessing(Pillow.fromarray(values))
    torch.testing.assert_close(tensor[0], torch.from_numpy((levels - mean) / std).float(), rtol=1e-5, atol=1e-5)


def test_onnx_may_contain_the_normalisation(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DsslError, match="--onnx-preprocessing"):
        run(Arguments(weights=small_checkpoint, onnx_preprocessing=True, out=tmp_path / "none"))
    run(Arguments(weights=small_checkpoint, formats=("onnx",), onnx_preprocessing=True, out=tmp_path / "out"))
    output = capsys.readouterr().out
    for fact in ("37 px", "0.875", "bilinear", "0.5, 0.4, 0.3", "0.2, 0.25, 0.3", "uint8"):
        assert fact in output
    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("pixels", "tensor(uint8)", [32, 32, 3])
    encoder, transform = load_encoder(small_checkpoint, transform=True)
    pixels = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), np.uint8)
    expected = features(encoder, torch.stack([transform(Pillow.fromarray(image)) for image in pixels]))
    (found,) = session.run(["features"], {"pixels": pixels})
    assert (torch.from_numpy(found) - expected).abs().max() < 1e-4 * expected.abs().max()
