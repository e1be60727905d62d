"""An encoder from inside: its blocks from input to output, which freezing, layer-wise rates and activation checkpointing
count in."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dssl.errors import DsslError

Names = tuple[str, ...]
"""Of the parameters of one block."""


def blocks(encoder: nn.Module) -> tuple[Names, ...]:
    """The parameters by block, in the order in which the encoder registers them; every parameter is in one block.

    A block is a member of a ``Sequential`` or ``ModuleList`` that has parts of its own (a residual block, a transformer layer),
    or a single layer outside of these. Norms, biases and tokens, which are vectors, belong to the block before them.
    """
    found: list[list[str]] = []
    axes = {name: parameter.squeeze().dim() for name, parameter in encoder.named_parameters()}
    for _, names in _parts(encoder):
        if found and all(axes[name] <= 1 for name in names):
            found[-1] += names
        else:
            found.append(names)
    return tuple(map(tuple, found))


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module | None, list[str]]]:
    """Every block with the names of its parameters, and those that are in no block, such as a class token."""
    if own := [f"{prefix}{name}" for name, _ in module.named_parameters(recurse=False)]:
        yield None, own
    for name, child in module.named_children():
        if _is_block(child, module):
            yield child, [f"{prefix}{name}.{parameter}" for parameter, _ in child.named_parameters()]
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
    found = [block for block, _ in _parts(encoder) if block is not None]
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
