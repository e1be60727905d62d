"""Weights in: own checkpoints, foreign prefixes, and everything that must be refused."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from dssl.augment import CIFAR10
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.weights.load import load_encoder, load_weights_into, open_weights, read_tensors
from dssl.weights.match import infer_encoder, to_detectron2
from tests.rejecting import rejects, states

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def resnet18(shaken: Callable[..., nn.Module]) -> nn.Module:
    return shaken(build_encoder("resnet18", image_size=32))


@pytest.fixture(scope="module")
def weights(resnet18: nn.Module) -> dict[str, Tensor]:
    return dict(resnet18.state_dict())


def test_run_folder_and_checkpoint_give_the_online_encoder(small: nn.Module, small_checkpoint: Path) -> None:
    for path in (small_checkpoint, small_checkpoint.parent.parent, str(small_checkpoint)):
        loaded = load_encoder(path)
        assert not loaded.training
        assert same(loaded, small)
        assert torch.equal(loaded(IMAGES), small(IMAGES))


def test_a_checkpoint_says_everything_about_its_encoder(small_checkpoint: Path) -> None:
    loaded = open_weights(small_checkpoint)
    assert (loaded.name, loaded.image_size, loaded.channels) == ("small", 32, 3)
    assert loaded.normalization.mean == (0.5, 0.4, 0.3)
    protocol = loaded.protocol()
    assert protocol["epoch"] == 3.0
    assert len(protocol["sha256"]) == 64


def test_a_changed_bit_in_a_checkpoint_is_refused(small_checkpoint: Path) -> None:
    content = bytearray(small_checkpoint.read_bytes())
    content[-9] ^= 1
    small_checkpoint.write_bytes(content)
    with pytest.raises(DsslError, match="damaged"):
        load_encoder(small_checkpoint)


SEQUENTIAL = {"conv1": "0", "bn1": "1", "layer1": "4", "layer2": "5", "layer3": "6", "layer4": "7"}


def numbered(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{SEQUENTIAL[first]}.{rest}"


def head(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {**state, f"{name}.weight": torch.ones(10, 512), f"{name}.bias": torch.ones(10)}


FOREIGN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "torchvision": (lambda w: head(w, "fc"), ""),
    "timm in a checkpoint": (lambda w: {"epoch": 3, "arch": "resnet18", "state_dict": head(w, "fc")}, "state_dict."),
    "moco": (
        lambda w: {
            "epoch": 1,
            "arch": "resnet18",
            "state_dict": {
                **{f"module.encoder_k.{n}": torch.zeros_like(v) for n, v in w.items()},
                **{f"module.encoder_q.{n}": v for n, v in w.items()},
                "module.encoder_q.fc.weight": torch.ones(128, 512),
                "module.queue": torch.ones(128, 64),
            },
            "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        },
        "state_dict.module.encoder_q.",
    ),
    "moco v3": (
        lambda w: {
            "state_dict": {
                **{f"module.base_encoder.{n}": v for n, v in w.items()},
                **{f"module.momentum_encoder.{n}": torch.zeros_like(v) for n, v in w.items()},
            }
        },
        "state_dict.module.base_encoder.",
    ),
    "simsiam": (
        lambda w: {"state_dict": {f"module.encoder.{n}": v for n, v in head(w, "fc.0").items()}},
        "state_dict.module.encoder.",
    ),
    "solo-learn": (
        lambda w: {
            "state_dict": {
                **{f"backbone.{n}": v for n, v in w.items()},
                **{f"momentum_backbone.{n}": torch.zeros_like(v) for n, v in w.items()},
                "projector.0.weight": torch.ones(4, 4),
                "classifier.weight": torch.ones(10, 512),
            },
            "pytorch-lightning_version": "2",
            "callbacks": {},
        },
        "state_dict.backbone.",
    ),
    "lightly": (
        lambda w: {
            "state_dict": {
                **{f"backbone.{numbered(n)}": v for n, v in w.items()},
                **{f"backbone_momentum.{numbered(n)}": torch.zeros_like(v) for n, v in w.items()},
                "projection_head.layers.0.weight": torch.ones(4, 4),
            }
        },
        "state_dict.backbone.",
    ),
    "torch.compile and DDP": (lambda w: {f"module._orig_mod.{n}": v for n, v in w.items()}, "module._orig_mod."),
    "without counters": (lambda w: {n: v for n, v in w.items() if "num_batches" not in n}, ""),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_weights_are_found_and_every_tensor_is_loaded(
    kind: str, resnet18: nn.Module, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    make, prefix = FOREIGN[kind]
    path = tmp_path / "weights.pth"
    torch.save(make(weights), path)
    loaded = open_weights(path)  # the architecture is inferred
    assert loaded.name == "resnet18"
    assert torch.equal(loaded.network(IMAGES), resnet18(IMAGES))
    assert str(path) in loaded.report
    report = load_weights_into(build_encoder("resnet18", image_size=32), path)
    expected = len(weights) - 20 if kind == "without counters" else len(weights)
    assert (report.prefix, report.loaded, report.total) == (prefix, expected, len(weights))


def test_the_report_names_the_second_network_and_the_heads(weights: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "moco.pth"
    torch.save(FOREIGN["moco"][0](weights), path)
    report = load_weights_into(build_encoder("resnet18", image_size=32), path)
    assert report.other_prefixes == ("state_dict.module.encoder_k.",)
    assert "120 of 120" in report.text()
    assert set(report.ignored) == {
        "state_dict.module.encoder_q.fc.weight",
        "state_dict.module.queue",
        "optimizer.state.0.momentum_buffer",
    }


def test_detectron2_names_are_read_once_the_arrays_of_a_pickle_are_tensors(
    resnet18: nn.Module, weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("r18.pkl")
    arrays = {to_detectron2(n): v.numpy() for n, v in weights.items() if "num_batches" not in n}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "x", "matching_heuristics": True}))
    code = refused(path)
    exec(code[code.index("import pathlib") :])
    loaded = open_weights(Path("weights.pth"))
    assert loaded.name == "resnet18"
    assert torch.equal(loaded.network(IMAGES), resnet18(IMAGES))
    states(loaded.report, "Detectron2", "BGR")


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"])
@pytest.mark.parametrize("cifar", [False, True])
def test_the_architecture_of_a_resnet_is_inferred(name: str, cifar: bool) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None)
        if cifar:
            model.conv1 = nn.Conv2d(3, 64, 3, bias=False)
    assert infer_encoder(model.state_dict()) == (f"{name}-cifar" if cifar else name)


@pytest.mark.parametrize("name", ["wide_resnet50_2", "resnext50_32x4d", "vit_b_16", "convnext_tiny"])
def test_what_cannot_be_inferred_is_asked_for(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        state = torchvision.models.get_model(name, weights=None).state_dict()
    assert infer_encoder(state) is None
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(DsslError, match=r"w\.pt.*--encoder"):
        load_encoder(tmp_path / "w.pt")


def test_timm_and_torchvision_models_that_are_no_resnets(tmp_path: Path) -> None:
    model = timm.create_model("mobilenetv3_small_050", num_classes=10).eval()
    torch.save(model.state_dict(), tmp_path / "t.pt")
    loaded = load_encoder(tmp_path / "t.pt", encoder="timm:mobilenetv3_small_050", image_size=32)
    assert torch.equal(loaded(IMAGES), model.forward_head(model.forward_features(IMAGES), pre_logits=True))
    convnext = torchvision.models.shufflenet_v2_x0_5(weights=None).eval()
    torch.save(convnext.state_dict(), tmp_path / "s.pt")
    report = load_weights_into(build_encoder("shufflenet_v2_x0_5", image_size=32), tmp_path / "s.pt")
    assert set(report.ignored) == {"fc.weight", "fc.bias"}


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(path: Path, *, encoder: str | None = None) -> str:
    with pytest.raises(DsslError) as caught:
        load_encoder(path, encoder=encoder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_another_architecture_is_refused_even_where_every_name_fits(tmp_path: Path) -> None:
    bigger = build_encoder("resnet34", image_size=32)
    torch.save(bigger.state_dict(), tmp_path / "w.pt")
    states(refused(tmp_path / "w.pt", encoder="resnet18"), 96, "'layer1.2.conv1.weight'")
    states(refused(tmp_path / "w.pt", encoder="resnet34-cifar"), "'conv1.weight'", "(64, 3, 7, 7)", "(64, 3, 3, 3)")
    states(refused(tmp_path / "w.pt", encoder="resnet50"), "85 of 318", "'layer1.0.conv3.weight'")
    states(refused(tmp_path / "w.pt", encoder="small"), 216, "'stem.0.weight'")


def test_nothing_changes_in_an_encoder_that_does_not_fit(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({**weights, "layer4.1.bn2.weight": torch.ones(3)}, tmp_path / "w.pt")
    encoder = build_encoder("resnet18", image_size=32)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with rejects("'layer4.1.bn2.weight'", "(3,)", "(512,)"):
        load_weights_into(encoder, tmp_path / "w.pt")
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize("victim", ["conv1.weight", "layer2.0.downsample.1.running_mean", "layer4.1.bn2.bias"])
def test_a_missing_or_renamed_key_is_refused(victim: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    rest = {name: value for name, value in weights.items() if name != victim}
    torch.save(rest, tmp_path / "missing.pt")
    assert victim in refused(tmp_path / "missing.pt", encoder="resnet18")
    torch.save({**rest, f"{victim}_": weights[victim]}, tmp_path / "renamed.pt")
    assert victim in refused(tmp_path / "renamed.pt", encoder="resnet18")


def test_broken_numbers_are_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({**weights, "bn1.weight": torch.full((64,), float("nan"))}, tmp_path / "w.pt")
    assert "NaN" in refused(tmp_path / "w.pt")


class Payload:
    """A pickle that would leave a trace if anybody ran it."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("kind", ["torch", "legacy torch", "pickle"])
def test_a_pickle_payload_is_refused_and_never_run(kind: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pkl"
    if kind == "torch":
        torch.save({**weights, "x": Payload(trace)}, path)
    elif kind == "legacy torch":
        torch.save({**weights, "x": Payload(trace)}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(Payload(trace)))
    assert "run code" in refused(path)
    assert not trace.exists()


def test_legacy_torch_files_are_read(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert set(read_tensors(tmp_path / "w.pth")[0]) == set(weights)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(suffix: str, share: float, tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".pt":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(path, encoder="resnet18")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04.", b"PK\x03\x04", b"\x80\x02}q\x00.", bytes(100)])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".pkl", ""])
def test_nonsense_is_refused(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    refused(path)


def test_places_without_weights(tmp_path: Path) -> None:
    assert "no checkpoint" in refused(tmp_path)
    states(refused(tmp_path / "nothing.pt"), tmp_path / "nothing.pt", ".safetensors")
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint" in refused(tmp_path)


def test_a_checkpoint_of_another_encoder_than_asked_for(
    tmp_path: Path, small: nn.Module, write_checkpoint: Callable[..., Path]
) -> None:
    path = write_checkpoint(tmp_path / "step-000000001.safetensors", small, encoder="small")
    states(refused(path, encoder="resnet18"), "95 of 120", "'layer1.0.conv1.weight'")


def test_a_normalisation_fits_the_channels(tmp_path: Path) -> None:
    for channels in (1, 5):
        torch.save(
            build_encoder("resnet18", image_size=32, channels=channels).state_dict(), tmp_path / f"{channels}.pth"
        )
    path = tmp_path / "1.pth"
    like = replace(open_weights(weights_file(tmp_path)), channels=1)
    for normalization in (None, CIFAR10):
        loaded = open_weights(path, normalization=normalization, fallback=like)
        assert len(loaded.normalization.mean) == 1
    with rejects(tmp_path / "5.pth", "5 channels", "normalization", 3):
        open_weights(tmp_path / "5.pth", normalization=CIFAR10, fallback=replace(like, channels=5))


def weights_file(folder: Path) -> Path:
    torch.save(build_encoder("resnet18", image_size=32).state_dict(), folder / "colour.pth")
    return folder / "colour.pth"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mobilenet_v2-b0353104.pth", "mobilenet_v2"),
        ("MobileNet_V3_Small_Weights.IMAGENET1K_V1.pth", "mobilenet_v3_small"),
        ("efficientnet_b0_rwightman-7f5810bc.pth", "efficientnet_b0"),
        ("resnet18-f37072fd.pth", "resnet18"),
    ],
)
def test_torchvisions_own_file_names_say_which_encoder_it_is(file: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name)
    torch.save(theirs.state_dict(), tmp_path / file)
    loaded = open_weights(tmp_path / file, image_size=64)
    assert loaded.name == name
    assert (name in loaded.report.partition("loaded")[2]) == (name != "resnet18")  # which its tensors show
    images = torch.randn(2, 3, 64, 64)
    *_, last = (path for path, module in theirs.named_modules() if isinstance(module, nn.Linear))
    theirs.set_submodule(last, nn.Identity())
    with torch.no_grad():
        assert torch.equal(loaded.network(images), theirs.eval()(images))


def test_a_name_that_the_tensors_contradict_counts_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mobilenet_v2-b0353104.pth"
    torch.save(torchvision.models.mobilenet_v3_small().state_dict(), file)
    with pytest.raises(DsslError, match="--encoder"):
        open_weights(file)
    assert open_weights(file, encoder="mobilenet_v3_small", image_size=64).name == "mobilenet_v3_small"
