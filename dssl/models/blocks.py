"""An encoder from inside: its blocks from input to output, which freezing, layer-wise rates and activation checkpointing
count in, and its last feature map."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dssl.errors import DsslError
from dssl.models import evaluating

Names = tuple[str, ...]
"""Of the parameters of one block."""


def blocks(encoder: nn.Module) -> tuple[Names, ...]:
    """The parameters by block, in the order in which the encoder registers them; every parameter is in one block.

    A block is a member of a ``Sequential`` or ``ModuleList`` that has parts of its own (a residual block, a transformer layer),
    or a single layer outside of these. Norms, biases and tokens, which are vectors, belong to the block before them.
    """
    found: list[list[str]] = []
    axes = {name: parameter.squeeze().dim() for name, parameter in encoder.named_parameters()}
    for names in _parts(encoder, ""):
        if found and all(axes[name] <= 1 for name in names):
            found[-1] += names
        else:
            found.append(names)
    return tuple(map(tuple, found))


def _parts(module: nn.Module, prefix: str) -> Iterator[list[str]]:
    if own := [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]:  # a class token
        yield own
    for name, child in module.named_children():
        if _is_block(child, module):
            yield [f"{prefix}{name}.{parameter}" for parameter, _ in child.named_parameters()]
        else:
            yield from _parts(child, f"{prefix}{name}.")


def _is_block(child: nn.Module, parent: nn.Module) -> bool:
    listed = isinstance(parent, nn.Sequential | nn.ModuleList)
    return listed and _has_parts(child) and not _holds_blocks(child)


def _has_parts(module: nn.Module) -> bool:
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    return not listed and any(next(child.parameters(), None) is not None for child in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it is a stage: a list with two blocks of one class is in it. (Squeeze-and-excitation is alone in its list.)"""
    lists = (part for part in module.modules() if isinstance(part, nn.Sequential | nn.ModuleList))
    return any(
        count > 1
        for part in lists
        for count in Counter(type(child) for child in part.children() if _has_parts(child)).values()
    )


def checkpoint_activations(encoder: nn.Module) -> None:
    """Keep only the input of each block and recompute the rest in the backward pass.

    The encoder is changed in place; results, random numbers and BatchNorm's statistics stay the same. A single layer outside of
    any list is not a block here.
    """
    found = list(_modules(encoder))
    if not found:
        raise DsslError(f"checkpoint_activations: {type(encoder).__name__} has no blocks to checkpoint; leave it off")
    for block in found:
        # changing the class keeps names in the state dict, and a copy of the block is checkpointed too
        kind = type(block)
        block.__class__ = type(f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {})


class _Checkpointed:
    def forward(self, *inputs: Any, **options: Any) -> Any:
        forward = partial(super().forward, **options)  # type: ignore[misc]  # the block's, which is the next base
        if not torch.is_grad_enabled():
            return forward(*inputs)
        assert isinstance(self, nn.Module)
        return checkpoint(
            forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), _without_statistics(self))
        )


@contextmanager
def _without_statistics(block: nn.Module) -> Iterator[None]:
    """The batch has been counted in BatchNorm's running statistics when it was first seen."""
    norms: list[Any] = [part for part in block.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # not track_running_stats: the kernel would save fewer tensors than the first time, which torch refuses
        # and another counter: SyncBatchNorm cannot do without one
        norm.momentum, norm.num_batches_tracked = 0.0, torch.zeros_like(norm.num_batches_tracked)
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_block(child, module):
            yield child
        else:
            yield from _modules(child)


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
