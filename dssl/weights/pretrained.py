"""ImageNet weights of torchvision and timm, through their own downloaders and from their own caches."""

import logging
import re
import sys
from pathlib import Path

import torch
from torch import nn

from dssl.errors import DsslError, one_line
from dssl.models import FOR_CPUS, size_arguments, split_name
from dssl.weights.load import load_weights_into
from dssl.weights.published import torchvision_version

WORD = "imagenet"
"""What stands for these weights where a file of weights could be named."""


def is_imagenet(path: Path) -> bool:
    """Whether the word is meant, and no weights of this name; a folder of images may well be called so."""
    if str(path) != WORD or path.is_file():
        return False
    return not any(file for pattern in ("*", "checkpoints/*") for file in path.glob(f"{pattern}.safetensors"))


def load_imagenet(encoder: nn.Module, name: str, *, image_size: int, channels: int) -> str:
    """Load the ImageNet weights of the encoder of this name into it; the line says what was loaded."""
    if name in FOR_CPUS or split_name(name)[1] is not None:
        raise DsslError(
            f"there are no ImageNet weights for {name}: choose a torchvision encoder, such as mobilenet_v2, or timm:NAME"
        )
    if name.startswith("timm:"):
        return _load_timm(encoder, name, image_size=image_size, channels=channels)
    return load_weights_into(encoder, torchvision_file(name)).text()


def torchvision_file(name: str) -> Path:
    """The file of torchvision's ImageNet weights, downloaded into torch's cache unless it is there."""
    url = str(torchvision_version(name).url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[1]
    if path.exists():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url, str(path), hash_prefix=digest[1] if digest else None, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError) as error:  # RuntimeError: the hash is another
        raise DsslError(
            f"the ImageNet weights of {name} could not be downloaded ({_reason(error)}): "
            f"fetch {url} elsewhere and put it at {path}, or name the file: --init FILE"
        ) from None
    return path


def _load_timm(encoder: nn.Module, name: str, *, image_size: int, channels: int) -> str:
    import timm  # build_encoder has found it

    model = name.removeprefix("timm:")
    known = timm.get_pretrained_cfg(model)
    if known is None or not known.has_weights:
        raise DsslError(f"timm has no weights for {model}: timm.list_pretrained() shows all that it has")
    file = known.hf_hub_filename or "model.safetensors"
    url = f"https://huggingface.co/{known.hf_hub_id}/resolve/main/{file}" if known.hf_hub_id else known.url
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)  # it announces every attempt that fails; the last one is our error
    try:
        # timm renames tensors, resizes positions and sums the first layer of gray images where a model needs it
        made = timm.create_model(
            model, pretrained=True, num_classes=0, in_chans=channels, **size_arguments(name, image_size)
        )
    except Exception as error:  # whatever the hub's client raises, which depends on its version
        raise DsslError(
            f"the weights of {name} could not be downloaded ({_reason(error)}): fetch {url} elsewhere, "
            "and name the file: --init FILE"
        ) from None
    finally:
        client.setLevel(level)
    encoder.load_state_dict(made.state_dict(), strict=True)
    gray = f"; the first layer is summed over its 3 channels, for images of {channels}" if channels != 3 else ""
    return f"{known.hf_hub_id or url}: timm's weights {known.tag or model} loaded{gray}"


def _reason(error: Exception) -> str:
    """What a network error says is in its reason."""
    return one_line(getattr(error, "reason", None) or error, longest=120)
