"""Encoders by name: torchvision's classifiers without their last layer, timm's, CIFAR ResNets, and a small one for CPUs."""

import difflib
import functools

import torch
import torchvision
from torch import nn

from dssl.errors import DsslError, choices
from dssl.models.small import SmallEncoder

# They have no last Linear layer, or give more than one output while training.
_UNSUITABLE = ("squeezenet", "inception", "googlenet")
_CIFAR = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")


@functools.cache
def encoder_names() -> tuple[str, ...]:
    """Every name that ``build_encoder`` knows; ``timm:NAME`` stands for any model of timm."""
    wide = [
        name for name in torchvision.models.list_models(module=torchvision.models) if not name.startswith(_UNSUITABLE)
    ]
    return ("small", *(f"{name}-cifar" for name in _CIFAR), *sorted(wide), "timm:NAME")


def build_encoder(name: str, *, image_size: int, channels: int = 3) -> nn.Module:
    """An untrained encoder from images (N x channels x size x size) to vectors.

    ``small`` is for CPUs, ``resnet18-cifar`` has a 3x3 stem and no max-pool, ``resnet50`` and the like are torchvision's,
    ``timm:vit_small_patch16_224`` is timm's.
    """
    if image_size < 1 or channels < 1:
        raise DsslError(f"an encoder for {channels} channels of {image_size} pixels cannot be: both must be at least 1")
    if name == "small":
        return SmallEncoder(channels=channels)
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"), image_size=image_size, channels=channels)
    if name not in encoder_names():
        raise choices("encoder", name, encoder_names())
    base = name.removesuffix("-cifar")
    if base.startswith("vit_"):
        encoder = torchvision.models.get_model(base, weights=None, image_size=image_size)
    elif base.startswith("maxvit"):
        encoder = torchvision.models.get_model(base, weights=None, input_size=(image_size, image_size))
    else:
        encoder = torchvision.models.get_model(base, weights=None)
    _remove_classifier(encoder)
    if name != base:
        encoder.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(encoder.conv1.weight, mode="fan_out", nonlinearity="relu")
        encoder.maxpool = nn.Identity()
    if channels != 3:
        _change_input(encoder, channels)
    assert isinstance(encoder, nn.Module)
    return encoder


def feature_dim(encoder: nn.Module, *, image_size: int, channels: int = 3) -> int:
    """How long the encoder's vectors are; says so when it does not give vectors. Leaves no trace in the encoder."""
    was_training = encoder.training
    first = next(encoder.parameters(), torch.zeros(()))
    images = torch.zeros(2, channels, image_size, image_size, device=first.device, dtype=first.dtype)
    encoder.eval()
    try:
        with torch.no_grad():
            feature = encoder(images)
    finally:
        encoder.train(was_training)
    if not isinstance(feature, torch.Tensor) or feature.dim() != 2:
        found = tuple(feature.shape) if isinstance(feature, torch.Tensor) else type(feature).__name__
        raise DsslError(
            f"the encoder maps 2 images to {found}, expected vectors (2, D); end it with pooling and flatten"
        )
    return int(feature.shape[1])


def _remove_classifier(encoder: nn.Module) -> None:
    *_, last = (path for path, module in encoder.named_modules() if isinstance(module, nn.Linear))
    parent, _, child = last.rpartition(".")
    setattr(encoder.get_submodule(parent), child, nn.Identity())


def _change_input(encoder: nn.Module, channels: int) -> None:
    path, first = next((path, module) for path, module in encoder.named_modules() if isinstance(module, nn.Conv2d))
    parent, _, child = path.rpartition(".")
    changed = nn.Conv2d(
        channels,
        first.out_channels,
        (first.kernel_size[0], first.kernel_size[1]),
        stride=(first.stride[0], first.stride[1]),
        padding=(int(first.padding[0]), int(first.padding[1])),
        bias=first.bias is not None,
    )
    setattr(encoder.get_submodule(parent), child, changed)


def _timm(name: str, *, image_size: int, channels: int) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise DsslError(f"encoder timm:{name} needs timm: pip install 'dssl[timm]'") from None
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=5)
        hint = f"did you mean {near[0]!r}? near are {', '.join(near)}; " if near else ""
        raise DsslError(f"unknown timm model {name!r}: {hint}timm.list_models() shows all")
    size = {"img_size": image_size} if name.startswith(("vit", "deit", "swin", "beit", "eva")) else {}
    encoder = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels, **size)
    assert isinstance(encoder, nn.Module)
    return encoder
