"""Encoders by name (torchvision's without their last layer, timm's, CIFAR ResNets, three for CPUs), and how one is run."""

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from dssl.errors import DsslError, choices, one_line
from dssl.models.for_cpus import SmallEncoder, WhitenedEncoder

# They have no last Linear layer, or give more than one output while training.
_UNSUITABLE = ("squeezenet", "inception", "googlenet")
FOR_CPUS = ("small", "whitened", "whitened-quadrants")
_CIFAR = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_TIMM_SIZED = ("vit", "deit", "swin", "beit", "eva")
STEMS = {
    "cifar": "padding 1 and ReLU: dssl, lightly's ResNet, most code",
    "padding2": "padding 2: solo-learn",
    "norelu": "no ReLU after the first BatchNorm: lightly's CIFAR benchmarks",
}
"""The 3x3 stems of CIFAR ResNets. All have the same tensors, so a file of weights need not show which one it was."""
PYTHON = "python:"
"""How the name of a module begins that a Python program holds."""


_registered: dict[str, Callable[[int, int], nn.Module]] = {}


def register_encoder(name: str, build: Callable[[int, int], nn.Module]) -> None:
    """Make a network of your own an encoder that has a name, for runs of the command line.

    Args:
        name: A name without ``:`` that is not taken.
        build: ``build(image_size, channels)`` gives an untrained network from images to vectors.
    """
    if name in _built_in() or ":" in name:
        raise DsslError(
            f"an encoder named {name!r} cannot be registered: expected a name without ':' that is not in use"
        )
    _registered[name] = build


@contextmanager
def named_encoder(encoder: str | nn.Module | None) -> Iterator[str | None]:
    """The name of an encoder; a module gets one by which ``build_encoder`` gives copies of it while the block runs.

    It tells modules of another structure apart, by a digest of the names and shapes of the state dict.
    """
    if not isinstance(encoder, nn.Module):
        yield encoder
        return
    shapes = "".join(f"{name} {tuple(value.shape)}\n" for name, value in encoder.state_dict().items())
    name = f"{PYTHON}{type(encoder).__name__}({hashlib.sha256(shapes.encode()).hexdigest()[:8]})"

    def build(_image_size: int, _channels: int) -> nn.Module:
        module = copy.deepcopy(encoder).cpu().train()
        module.register_forward_hook(_pooled)
        return module

    _registered[name] = build
    try:
        yield name
    finally:
        _registered.pop(name, None)


def _pooled(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    """Vectors of a feature map; a hook and not a module around it, so that the state dict keeps its names."""
    return output.mean(dim=(2, 3)) if isinstance(output, Tensor) and output.dim() == 4 else output


def encoder_names() -> tuple[str, ...]:
    """Every name that ``build_encoder`` knows; ``timm:NAME`` stands for any model of timm."""
    return (*_registered, *_built_in())


@functools.cache
def _built_in() -> tuple[str, ...]:
    wide = sorted(torchvision.models.list_models(module=torchvision.models))
    plain = (name for name in wide if not name.startswith(_UNSUITABLE))
    return (*FOR_CPUS, *(cifar_name(name, stem) for name in _CIFAR for stem in STEMS), *plain, "timm:NAME")


def cifar_name(base: str, stem: str) -> str:
    """``resnet18`` with the stem ``padding2`` is ``resnet18-cifar-padding2``; the stem ``cifar`` is the plain one."""
    return f"{base}-cifar" if stem == "cifar" else f"{base}-cifar-{stem}"


def split_name(name: str) -> tuple[str, str | None]:
    """The inverse of ``cifar_name``; the stem is None for every other encoder."""
    base, found, stem = name.partition("-cifar")
    return (base, stem.removeprefix("-") or "cifar") if found else (name, None)


def stem_of(encoder: nn.Module) -> str | None:
    """Which of ``STEMS`` an encoder has, None where it has another one."""
    if not isinstance(encoder, torchvision.models.ResNet) or encoder.conv1.kernel_size != (3, 3):
        return None
    if isinstance(encoder.relu, nn.Identity):
        return "norelu"
    return "padding2" if encoder.conv1.padding == (2, 2) else "cifar"


def size_arguments(name: str, image_size: int) -> dict[str, Any]:
    """The arguments of torchvision or timm for an encoder that is built for one image size."""
    if name.startswith("timm:"):
        return {"img_size": image_size} if name.removeprefix("timm:").startswith(_TIMM_SIZED) else {}
    if name.startswith("vit_"):
        return {"image_size": image_size}
    return {"input_size": (image_size, image_size)} if name.startswith("maxvit") else {}


def build_encoder(name: str, *, image_size: int, channels: int = 3) -> nn.Module:
    """An untrained encoder from images (N x channels x size x size) to vectors; an error if it cannot run at that size.

    Args:
        name: ``whitened`` and ``small`` are for CPUs, ``resnet18-cifar`` has a 3x3 stem and no max-pool, ``resnet50`` and many
            others are torchvision's, ``timm:vit_small_patch16_224`` is timm's.
        image_size: Width and height in pixels.
        channels: 1 for gray images, 3 for colour.
    """
    if image_size < 1 or channels < 1:
        raise DsslError(
            f"an encoder for {channels} channels of {image_size} pixels cannot be built: both must be at least 1"
        )
    try:
        encoder = _build(name, image_size=image_size, channels=channels)
    except DsslError:
        raise
    except (RuntimeError, ValueError, AssertionError, TypeError, MemoryError) as error:
        raise DsslError(
            f"encoder {name} cannot be built for images of {image_size} px: {one_line(error)}; "
            "choose another size or encoder"
        ) from None
    try:
        feature_dim(encoder, image_size=image_size, channels=channels)
    except DsslError as error:
        raise DsslError(f"encoder {name}: {error}") from None
    return encoder


def feature_dim(encoder: nn.Module, *, image_size: int, channels: int = 3) -> int:
    """The length of the encoder's vectors; an error if it gives none or cannot run. Leaves no trace in the encoder.

    Args:
        encoder: A network from images to vectors.
        image_size: Width and height in pixels.
        channels: Of the images.
    """
    feature = _run_once(encoder, image_size=image_size, channels=channels)
    if not isinstance(feature, Tensor) or feature.dim() != 2:
        found = tuple(feature.shape) if isinstance(feature, Tensor) else type(feature).__name__
        raise DsslError(
            f"the encoder maps 2 images to {found}, expected vectors (2, D); end it with pooling and flatten"
        )
    return int(feature.shape[1])


@contextmanager
def evaluating(encoder: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has its previous mode."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def forward(encoder: nn.Module, images: Tensor, *, autocast: torch.dtype | None = None) -> Tensor:
    """The features of a batch, float32 on the CPU, computed on the device and in the type of the weights."""
    weight = next(encoder.parameters(), images)
    with nullcontext() if autocast is None else torch.autocast(weight.device.type, dtype=autocast):
        values = encoder(images.to(weight.device, weight.dtype, non_blocking=True))
    return values.float().cpu()  # type: ignore[no-any-return]  # what feature_dim has seen


def _run_once(encoder: nn.Module, *, image_size: int, channels: int) -> Any:
    """The encoder's output for two images: shapes only where possible, which takes no memory and no arithmetic."""
    tensors = (*encoder.parameters(), *encoder.buffers())
    first = next(encoder.parameters(), torch.zeros(()))
    shape = (2, channels, image_size, image_size)
    needed = [4 * 2 * channels * image_size**2]

    def measure(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        needed.append(sum(value.nbytes for value in (*inputs, output) if isinstance(value, Tensor)))

    try:
        # the copy shares nothing with the encoder, so that neither its mode nor what a layer caches is touched
        shapes = copy.deepcopy(encoder, {id(value): torch.empty_like(value, device="meta") for value in tensors}).eval()
        for module in shapes.modules():
            module.register_forward_hook(measure)
        with torch.no_grad():
            feature = shapes(torch.empty(shape, device="meta", dtype=first.dtype))
        failed = False
    # a layer that only runs for real, or the encoder's own complaint: running it for real tells which
    except Exception:
        feature, failed = None, True
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if max(needed) > memory:
        raise DsslError(
            f"two images of {image_size} px need at least {max(needed) / 2**30:,.0f} GB of memory and this machine has "
            f"{memory / 2**30:,.0f} GB; choose a smaller size"
        )
    if not failed:
        return feature
    try:
        with evaluating(encoder):
            return encoder(torch.zeros(shape, device=first.device, dtype=first.dtype))
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, MemoryError) as error:
        raise DsslError(
            f"it cannot run on images of {channels} x {image_size} x {image_size}: {one_line(error)}; "
            "choose another size or encoder"
        ) from None


def _build(name: str, *, image_size: int, channels: int) -> nn.Module:
    if name in _registered:
        return _registered[name](image_size, channels)
    if name in ("whitened", "whitened-quadrants"):
        return WhitenedEncoder(channels=channels, quadrants=name == "whitened-quadrants")
    if name == "small":
        return SmallEncoder(channels=channels)
    if name.startswith("timm:"):
        return _timm(name, image_size=image_size, channels=channels)
    if name.startswith(PYTHON):
        raise DsslError(
            f"the encoder {name} was a module of a Python program: make the call with it (dssl.train, dssl.evaluate, dssl.embed, "
            "dssl.export or dssl.load_encoder with encoder=MODULE), or register it in a --plugin and name it with --encoder"
        )
    if name not in encoder_names():
        with suppress(ImportError):
            import timm

            if timm.is_model(name):
                raise DsslError(f"unknown encoder {name!r}: did you mean timm:{name}?")
        raise choices("encoder", name, encoder_names())
    base, stem = split_name(name)
    encoder = torchvision.models.get_model(base, weights=None, **size_arguments(base, image_size))
    *_, last = (path for path, module in encoder.named_modules() if isinstance(module, nn.Linear))
    parent, _, child = last.rpartition(".")
    setattr(encoder.get_submodule(parent), child, nn.Identity())
    if stem is not None:
        encoder.conv1 = nn.Conv2d(3, 64, 3, padding=2 if stem == "padding2" else 1, bias=False)
        nn.init.kaiming_normal_(encoder.conv1.weight, mode="fan_out", nonlinearity="relu")
        encoder.maxpool = nn.Identity()
        if stem == "norelu":
            encoder.relu = nn.Identity()
    if channels != 3:
        first = next(module for module in encoder.modules() if isinstance(module, nn.Conv2d))
        first.in_channels = channels
        first.weight = nn.Parameter(torch.empty(first.out_channels, channels, *first.kernel_size))
        first.reset_parameters()
    assert isinstance(encoder, nn.Module)
    return encoder


def _timm(name: str, *, image_size: int, channels: int) -> nn.Module:
    model = name.removeprefix("timm:")
    try:
        import timm
    except ImportError:
        raise DsslError(f"encoder {name} needs timm: pip install 'dssl[timm]'") from None
    if not timm.is_model(model):
        raise choices("timm model", model, timm.list_models())
    size = size_arguments(name, image_size)
    encoder = timm.create_model(model, pretrained=False, num_classes=0, in_chans=channels, **size)
    assert isinstance(encoder, nn.Module)
    return encoder
