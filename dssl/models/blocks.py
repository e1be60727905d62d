"""The blocks of an encoder from input to output: what freezing and layer-wise rates count in."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

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
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    for name, child in module.named_children():
        if listed and _has_parts(child) and not _holds_blocks(child):
            yield [f"{prefix}{name}.{one}" for one, _ in child.named_parameters()]
        else:
            yield from _parts(child, f"{prefix}{name}.")


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
