"""Activation checkpointing: keep only the input of each encoder block, and recompute the rest in the backward pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dssl.errors import DsslError


def checkpoint_activations(encoder: nn.Module) -> None:
    """Checkpoint every block of the encoder in place; results, random numbers and BatchNorm's statistics stay the same.

    A block is a member of a ``Sequential`` or ``ModuleList`` that has parts of its own: a residual block, a transformer layer.
    """
    blocks = list(_blocks(encoder))
    if not blocks:
        raise DsslError(f"checkpoint_activations: {type(encoder).__name__} has no blocks to checkpoint; leave it off")
    for block in blocks:
        # changing the class keeps names in the state dict, and a copy of the block is checkpointed too
        kind = type(block)
        block.__class__ = type(f"Checkpointed{kind.__name__}", (_Checkpointed, kind), {})


class _Checkpointed:
    def forward(self, *inputs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]  # the block's, which is the next base
        if not torch.is_grad_enabled():
            return forward(*inputs)
        assert isinstance(self, nn.Module)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=lambda: _contexts(self))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _without_statistics(block)


@contextmanager
def _without_statistics(block: nn.Module) -> Iterator[None]:
    """The batch has been counted in BatchNorm's running statistics when it was first seen."""
    norms: list[Any] = [part for part in block.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # not track_running_stats: the kernel would save fewer tensors than the first time, which torch refuses
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if listed and not isinstance(child, nn.Sequential | nn.ModuleList) and next(child.children(), None) is not None:
            yield child
        else:
            yield from _blocks(child)
