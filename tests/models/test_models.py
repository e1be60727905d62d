"""Every encoder that is listed can be built and gives vectors; an unknown one is refused with what exists."""

import pytest
import torch
from torch import nn

from dssl import DsslError, build_encoder, encoder_names, feature_dim, models


@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("small", 32, 256),
        ("resnet18-cifar", 32, 512),
        ("resnet50", 64, 2048),
        ("mobilenet_v3_small", 64, 1024),
        ("vit_b_16", 32, 768),
        ("convnext_tiny", 64, 768),
        ("regnet_y_400mf", 64, 440),
        ("timm:resnet10t", 64, 512),
    ],
)
@pytest.mark.parametrize("channels", [3, 1])
def test_images_to_vectors(name: str, size: int, dim: int, channels: int) -> None:
    encoder = build_encoder(name, image_size=size, channels=channels)
    assert feature_dim(encoder, image_size=size, channels=channels) == dim
    assert encoder.training


def test_every_listed_name_can_be_built_without_a_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "feature_dim", lambda *_, **__: 0)  # running 80 of them takes a minute
    with torch.device("meta"):
        for name in encoder_names():
            if name == "timm:NAME" or name.startswith("regnet"):  # RegNet computes its widths, which "meta" cannot
                continue
            encoder = build_encoder(name, image_size=224)
            outputs = {module.out_features for module in encoder.modules() if isinstance(module, nn.Linear)}
            assert 1000 not in outputs, name


def test_cifar_resnet_differs_from_torchvision_only_in_the_stem() -> None:
    import torchvision

    ours = build_encoder("resnet18-cifar", image_size=32).state_dict()
    theirs = torchvision.models.resnet18(weights=None).state_dict()
    assert set(theirs) - set(ours) == {"fc.weight", "fc.bias"}
    assert {key for key in ours if ours[key].shape != theirs[key].shape} == {"conv1.weight"}
    assert ours["conv1.weight"].shape == (64, 3, 3, 3)
    with torch.no_grad():
        maps = build_encoder("resnet18-cifar", image_size=32)
        maps.avgpool = nn.Identity()
        assert maps.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 512 * 4 * 4)  # 32 px end as 4 x 4: no early pooling


def test_measuring_the_feature_leaves_no_trace() -> None:
    encoder = build_encoder("small", image_size=32)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    feature_dim(encoder, image_size=32)
    assert all(torch.equal(before[key], value) for key, value in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("name", "hint"), [("resnet81", "'resnet18'"), ("smal", "'small'"), ("resnet18d", "timm:resnet18d"), ("x", ", ")]
)
def test_an_unknown_name_says_what_may_be_meant(name: str, hint: str) -> None:
    with pytest.raises(DsslError, match=hint) as caught:
        build_encoder(name, image_size=32)
    assert name in str(caught.value)
    assert str(caught.value).count(",") <= 8


def test_an_unknown_timm_model_is_refused() -> None:
    with pytest.raises(DsslError, match=r"'resnet1234'.*'resnet34'"):
        build_encoder("timm:resnet1234", image_size=32)


def test_an_encoder_that_gives_maps_is_refused() -> None:
    with pytest.raises(DsslError, match=r"\(2, 4, 30, 30\)"):
        feature_dim(nn.Conv2d(3, 4, 3), image_size=32)


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("alexnet", 32, "3 x 32 x 32"),
        ("densenet121", 8, "3 x 8 x 8"),
        ("maxvit_t", 64, "64 px"),
        ("vit_b_16", 30, "30 px"),
        ("small", 100_000, "100000 px.* GB"),
    ],
)
def test_what_cannot_run_at_the_asked_size_is_refused_in_one_line(name: str, size: int, says: str) -> None:
    with pytest.raises(DsslError, match=f"encoder {name}.*{says}") as caught:
        build_encoder(name, image_size=size)
    assert "\n" not in str(caught.value)


class OnlyForReal(nn.Module):
    """It asks for values, which shapes alone do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.runs: list[str] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.runs.append(images.device.type)
        maps: torch.Tensor = self.norm(self.conv(images))
        return maps.mean(dim=(2, 3)) if float(images.sum()) == 0 else maps


def test_an_encoder_that_needs_values_is_run_for_real() -> None:
    encoder = OnlyForReal()
    assert feature_dim(encoder, image_size=8) == 5
    assert encoder.runs == ["cpu"]
    assert encoder.training


def test_measuring_leaves_a_frozen_batch_norm_frozen() -> None:
    encoder = OnlyForReal()
    encoder.norm.eval()
    feature_dim(encoder, image_size=8)
    assert encoder.training
    assert not encoder.norm.training


def test_the_stems_of_cifar_resnets_share_their_tensors_but_not_their_features() -> None:
    plain = build_encoder("resnet18-cifar", image_size=32)
    images = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    with torch.no_grad():
        expected = plain.eval()(images)
        for stem in ("padding2", "norelu"):
            other = build_encoder(f"resnet18-cifar-{stem}", image_size=32).eval()
            other.load_state_dict(plain.state_dict(), strict=True)
            assert models.stem_of(other) == stem
            assert (other(images) - expected).abs().max() > 0.01 * expected.abs().max()
    assert models.stem_of(plain) == "cifar"
    assert models.stem_of(build_encoder("resnet18", image_size=32)) is None
