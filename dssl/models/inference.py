"""Running an encoder: in evaluation mode, without gradients, one vector for each image."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dssl.errors import DsslError


@contextmanager
def evaluating(encoder: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has the mode that it had."""
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def forward(encoder: nn.Module, images: Tensor, *, autocast: torch.dtype | None = None) -> Tensor:
    """The features of a batch, float32 on the CPU, computed where and in the type in which the weights are."""
    weight = next(encoder.parameters(), images)
    with nullcontext() if autocast is None else torch.autocast(weight.device.type, dtype=autocast):
        values = encoder(images.to(weight.device, weight.dtype, non_blocking=True))
    if not isinstance(values, Tensor) or values.dim() != 2 or len(values) != len(images):
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise DsslError(f"the encoder maps {len(images)} images to {found}, expected one vector for each")
    return values.float().cpu()
