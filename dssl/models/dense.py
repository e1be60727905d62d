"""The last feature map of an encoder, before it is pooled to a vector: for segmentation and other dense tasks."""

from typing import Any

import torch
from torch import Tensor, nn

from dssl.errors import DsslError
from dssl.models import evaluating


class DenseEncoder(nn.Module):
    """Gives the map as one long row for each image; ``shape`` is channels, height, width."""

    def __init__(self, encoder: nn.Module, *, image_size: int, channels: int) -> None:
        super().__init__()
        self.encoder = encoder
        weight = next(encoder.parameters())
        images = torch.zeros(2, channels, image_size, image_size, dtype=weight.dtype, device=weight.device)
        with evaluating(encoder):
            channels, height, width = last_map(encoder, images).shape[1:]
        self.shape = (int(channels), int(height), int(width))

    def forward(self, images: Tensor) -> Tensor:
        return last_map(self.encoder, images).flatten(1)


def last_map(encoder: nn.Module, images: Tensor) -> Tensor:
    """N x C x H x W: the last map before the pooling.

    The tokens of a vision transformer are laid out as the patches were; class and register tokens are left out.
    """
    if callable(of_timm := getattr(encoder, "forward_features", None)):
        found = of_timm(images)
        prefix = int(getattr(encoder, "num_prefix_tokens", 0))
        if isinstance(found, Tensor) and getattr(encoder, "output_fmt", "NCHW") == "NHWC":
            found = found.permute(0, 3, 1, 2)
        return _laid_out(found, prefix, encoder)
    # no more than these: every output of a ResNet-50 would be 90 MB for an image of 224 px
    last: Tensor | None = None
    pooled: Tensor | None = None

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal last, pooled
        if not isinstance(output, Tensor) or output.dim() not in (3, 4):
            return
        # what follows the pooling of the whole map is not a map; squeeze-and-excitation pools, too, and maps follow it
        if isinstance(module, nn.AdaptiveAvgPool2d):
            pooled = last
        elif output.dim() == 4 and output.shape[2:].numel() > 1:
            pooled = None
        last = output

    handles = [module.register_forward_hook(keep) for module in encoder.modules()]
    try:
        encoder(images)
    finally:
        for handle in handles:
            handle.remove()
    found = last if pooled is None else pooled
    if found is None:
        raise DsslError(f"{type(encoder).__name__} has no feature map: dense features need a network with one")
    return _laid_out(found, 1, encoder)  # torchvision's transformers have one token for the class


def _laid_out(found: Any, prefix: int, encoder: nn.Module) -> Tensor:
    if isinstance(found, Tensor) and found.dim() == 4:
        return found
    if isinstance(found, Tensor) and found.dim() == 3:
        tokens = found[:, prefix:]
        side = round(tokens.shape[1] ** 0.5)
        if side * side == tokens.shape[1]:
            return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)
    raise DsslError(f"{type(encoder).__name__} has no feature map that can be laid out in a square")
