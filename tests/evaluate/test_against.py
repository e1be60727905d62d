"""Encoders side by side: the same images, the same labels, a difference with its interval, and a page."""

import dataclasses
import json
import shutil
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from dssl.augment import IMAGENET, Normalization
from dssl.commands.evaluate import Arguments, run
from dssl.errors import DsslError
from dssl.evaluation.comparison import open_other
from dssl.evaluation.protocols import untrained
from dssl.models import build_encoder
from dssl.models.for_cpus import whiten
from dssl.weights import checkpoint, load
from dssl.weights.encoder import Encoder
from dssl.weights.load import open_weights

FEW = {"probe-1": 3, "probe-10": 2}


@pytest.fixture
def compared(
    run_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encoder: nn.Module,
    few_test_images: int,
) -> tuple[Path, Path]:
    """A run, and the file of an encoder that has lost half of its channels."""
    monkeypatch.setattr("dssl.evaluation.comparison.DRAWS", FEW)
    worse = {name: value.clone() for name, value in encoder.state_dict().items()}
    worse["blocks.3.bn2.weight"][::2] = 0
    worse["blocks.3.downsample.1.weight"][::2] = 0
    worse["blocks.3.bn2.bias"][::2] = -9
    torch.save(worse, tmp_path / "worse.pth")
    return run_folder(), tmp_path / "worse.pth"


def read(folder: Path) -> list[dict[str, object]]:
    found = json.loads((folder / "evaluation" / "comparison.json").read_text())
    return list(found["against"])


def test_the_comparison_agrees_with_two_evaluations(
    compared: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, worse = compared
    settings = {"threads": 1, "data": "shapes:300", "protocols": ("knn", "probe", "probe-1")}
    assert run(Arguments(weights=folder, against=(str(worse), "untrained"), **settings)) == 0
    output = capsys.readouterr().out
    found = read(folder)
    assert [one["against"] for one in found] == [str(worse), "untrained"]
    rows = {one["name"]: one for one in found[0]["protocols"]}
    assert list(rows) == ["knn k=20", "linear probe", "linear probe, 1% of the labels"]
    assert [one["draws"] for one in rows.values()] == [1, 1, 3]
    for name, one in rows.items():
        assert name in output
        low, high = one["interval"]
        assert low <= one["difference"] <= high
        assert one["difference"] == pytest.approx(100 * (one["won"] - one["lost"]) / (one["images"] * one["draws"]))
        assert sum(change["won"] for change in one["classes"]) == one["won"]
        assert len(one["won_rows"]) <= one["won"]
        for side in ("won", "lost"):  # as the source calls them
            assert one[f"{side}_images"] == [f"shapes test {row}" for row in one[f"{side}_rows"]]
        assert one["protocol"]["checkpoint"]["file"] == str(folder)
        assert one["other_protocol"]["checkpoint"]["file"] == str(worse)
    assert rows["linear probe"]["p_value"] is not None
    assert rows["linear probe, 1% of the labels"]["p_value"] is None

    # the accuracies are those of the plain command
    for path, key in ((folder, "after"), (worse, "before")):
        out = tmp_path / key
        run(Arguments(weights=path, out=out, encoder="small", normalization="cifar10", page=False, **settings))
        single = {one["name"]: one["accuracy"] for one in json.loads((out / "evaluation.json").read_text())["results"]}
        for name in ("knn k=20", "linear probe"):
            assert rows[name][key] == pytest.approx(single[name])

    page = (folder / "evaluation" / "comparison.html").read_text()
    for text in ("Images that changed sides", "By class", "untrained: the same encoder with random weights", "→"):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")


def test_an_encoder_does_not_differ_from_itself(
    compared: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = compared
    settings = {"threads": 1, "data": "shapes:100", "protocols": ("knn", "probe-10"), "page": False}
    run(Arguments(weights=folder, against=(str(folder),), **settings))
    for one in read(folder)[0]["protocols"]:
        assert (one["difference"], one["interval"], one["won"], one["lost"]) == (0, [0, 0], 0, 0)
        assert one["verdict"] == "no difference shown"


def test_the_start_of_a_run_is_a_word(compared: tuple[Path, Path], encoder: nn.Module) -> None:
    folder, _ = compared
    loaded = open_weights(folder)
    with pytest.raises(DsslError, match="--against start"):
        open_other("start", loaded, seed=0)
    tensors = {f"method.encoder.{name}": torch.zeros_like(value) for name, value in encoder.state_dict().items()}
    checkpoint.write(folder / "start.safetensors", loaded.header, tensors)
    start = open_other("start", loaded, seed=0)
    assert start is not None
    assert all(float(value.abs().sum()) == 0 for value in start.network.state_dict().values())
    # also where a checkpoint of the run is named
    newest = folder / "checkpoints" / "step-000000040.safetensors"
    assert open_other("start", open_weights(newest), seed=0) is not None


def test_fine_tuning_and_training_from_scratch_have_the_same_budget(
    compared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worse = compared
    settings = {"threads": 1, "data": "shapes:60", "protocols": ("finetune-10", "finetune"), "epochs": 1, "page": False}
    run(Arguments(weights=folder, against=(str(worse), "supervised"), **settings))
    found = read(folder)
    for one in found:
        names = [row["name"] for row in one["protocols"]]
        assert names == ["fine-tuned, 10% of the labels", "fine-tuned"]
        assert all(row["draws"] == 1 for row in one["protocols"])
    used = [row["protocol"]["train_images"] for row in found[0]["protocols"]]
    assert used == [10, 60]
    # both say how they were trained: the same way from either start, and their own from scratch
    ours, theirs = ([row[key]["training"] for row in found[0]["protocols"]] for key in ("protocol", "other_protocol"))
    assert ours == theirs
    assert [row["other_protocol"]["kind"] for row in found[1]["protocols"]] == ["supervised", "supervised"]
    assert [row["other_protocol"]["train_images"] for row in found[1]["protocols"]] == used


def test_what_is_no_encoder_is_refused(compared: tuple[Path, Path]) -> None:
    folder, _ = compared
    with pytest.raises(DsslError, match=r"--against imagnet.*imagenet, start"):
        run(Arguments(weights=folder, against=("imagnet",), data="shapes:60", threads=1))
    with pytest.raises(DsslError, match=r"--against.*imagenet"):
        run(Arguments(weights=folder, against=(), data="shapes:60", threads=1))
    with pytest.raises(DsslError, match=r"ImageNet.* small"):
        run(Arguments(weights=folder, against=("imagenet",), data="shapes:60", threads=1))


def test_a_folder_of_images_called_imagenet_is_not_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load.is_imagenet(Path("imagenet"))
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    assert load.is_imagenet(Path("imagenet"))
    (tmp_path / "imagenet" / "encoder.safetensors").touch()
    assert not load.is_imagenet(Path("imagenet"))
    assert not load.is_imagenet(tmp_path / "imagenet")


def test_imagenet_weights_see_images_as_they_were_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The images of a run of dssl are normalised by its own constants, which are no other weights' business."""
    torch.manual_seed(0)
    original = torchvision.models.resnet18()
    torch.save(original.state_dict(), tmp_path / "resnet18.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    published = tmp_path / "hub" / "checkpoints" / Path(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    published.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "resnet18.pth", published)
    own = Normalization((0.1, 0.1, 0.1), (0.05, 0.05, 0.05))
    as_told = open_weights(tmp_path / "resnet18.pth", normalization=own)
    origin = dataclasses.replace(as_told.origin, header={"normalization": own.plain()})
    of_a_run = dataclasses.replace(as_told, origin=origin)
    for like, expected in ((of_a_run, IMAGENET), (as_told, own)):
        assert open_other(str(tmp_path / "resnet18.pth"), like, seed=0).normalization == expected
        assert open_other("imagenet", like, seed=0).normalization == IMAGENET
        assert open_other("untrained", like, seed=0).normalization == own
    gray = dataclasses.replace(of_a_run, channels=1)
    assert open_other("imagenet", gray, seed=0).normalization == IMAGENET.gray()


def test_an_untrained_encoder_has_the_filters_that_the_run_began_with() -> None:
    encoder = build_encoder("whitened", image_size=32)
    whiten(encoder, torch.randn(64, 3, 32, 32))
    like = Encoder(network=encoder, name="whitened", image_size=32, normalization=IMAGENET)
    other = open_other("untrained", like, seed=0)
    for fresh in (other.network, untrained(like, seed=0, purpose="supervised").network):
        assert torch.equal(fresh.filters, encoder.filters)
        assert torch.equal(fresh.shift, encoder.shift)
        assert not torch.equal(fresh.groups[0].weight, encoder.groups[0].weight)


def test_pictures_show_both_answers(compared: tuple[Path, Path]) -> None:
    """The caption of a lost image is a right answer and then a wrong one."""
    folder, worse = compared
    run(Arguments(weights=worse, encoder="small", normalization="cifar10", data="shapes:300", protocols=("probe",),
                  image_size=32, out=folder / "evaluation", against=(str(folder),), threads=1))  # fmt: skip
    (row,) = read(folder)[0]["protocols"]
    page = (folder / "evaluation" / "comparison.html").read_text()
    assert min(row["lost"], row["won"]) > 12
    assert page.count('<figure class="picture') == 24
    assert page.count(": is ") == 12


@pytest.fixture
def mobilenet(tmp_path: Path) -> Path:
    """A file of another architecture that says nothing of itself."""
    torch.manual_seed(0)
    path = tmp_path / "theirs.pth"
    torch.save(torchvision.models.mobilenet_v3_small().state_dict(), path)
    return path


def test_each_encoder_runs_at_its_own_size_under_its_own_name(
    compared: tuple[Path, Path], mobilenet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = compared
    word = f"{mobilenet}@mobilenet_v3_small"
    settings = {"threads": 1, "data": "shapes:60", "protocols": ("knn",), "page": False}
    for size, expected in ((None, (32, 224)), (64, (64, 64))):
        run(Arguments(weights=folder, against=(word,), image_size=size, **settings))
        (row,) = read(folder)[0]["protocols"]
        sides = [row[side]["checkpoint"] for side in ("protocol", "other_protocol")]
        assert tuple(side["image_size"] for side in sides) == expected
        assert [side["encoder"] for side in sides] == ["small", "mobilenet_v3_small"]
        output = capsys.readouterr().out
        assert f"mobilenet_v3_small, {expected[1]} px" in output
        assert f"small, {expected[0]} px" in output
    # the number of the other is the one that it has alone, image for image
    run(Arguments(weights=mobilenet, encoder="mobilenet_v3_small", image_size=64, out=tmp_path / "alone", **settings))
    alone = json.loads((tmp_path / "alone" / "evaluation.json").read_text())["results"][0]
    assert row["before"] == pytest.approx(alone["accuracy"])
    with pytest.raises(DsslError, match=str(mobilenet)):
        run(Arguments(weights=folder, against=(f"{mobilenet}@resnet18",), **settings))


def test_what_nobody_stated_of_one_file_is_not_stated_of_another(mobilenet: Path, tmp_path: Path) -> None:
    word = f"{tmp_path / 'timm.pth'}@timm:vit_tiny_patch16_224"
    torch.save(build_encoder("timm:vit_tiny_patch16_224", image_size=224).state_dict(), tmp_path / "timm.pth")
    half = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert open_other(word, open_weights(mobilenet, encoder="mobilenet_v3_small"), seed=0).normalization == half


def test_without_network_the_advice_is_no_flag_of_another_command(
    mobilenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(DsslError) as caught:
        run(Arguments(weights=mobilenet, encoder="mobilenet_v3_small", data="shapes:60", against=("imagenet",)))
    assert "name the file instead of imagenet" in str(caught.value)
    assert "--" not in str(caught.value)
