"""Which arithmetic is fastest here: measured, not guessed."""

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dssl.config import Precision
from dssl.distributed import World

_MOST_IMAGES, _PIXELS = 16, 2**17
"""The measured batch: 16 small images, 2 of 224 pixels."""
_TURNS, _SECONDS = 5, 1.0
"""Upper limits: the number of turns, and the seconds after which no turn begins."""

Measure = Callable[[nn.Module, Tensor], tuple[float, float]]
"""Seconds of a step in fp32 and in bf16."""


def precision_of(
    asked: Precision,
    kept: Mapping[str, Any] | None,
    world: World,
    *,
    encoder: nn.Module,
    image_size: int,
    channels: int,
) -> tuple[Precision, str]:
    """What was asked for, what the run started with (``kept``), or what the first process measures; and the reason."""
    if asked != "auto":
        return asked, f"{asked} (requested)"
    if kept is not None:
        return kept["precision"], f"{kept['precision']}, as the run started"
    # the first one alone: processes that measure at the same time slow each other down
    return world.from_first(
        lambda: choose_precision(encoder, image_size=image_size, channels=channels, device=world.device)
    )


def choose_precision(
    encoder: nn.Module, *, image_size: int, channels: int, device: torch.device, measure: Measure | None = None
) -> tuple[Precision, str]:
    """bf16 where a step of this encoder is at least a tenth faster with it than in fp32, and a sentence with the reason."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "bf16: the GPU has it"
        return "fp16", "fp16 with a scaled loss: this GPU has no bf16"
    if device.type != "cpu":
        return "fp32", f"fp32: bf16 was not measured on {device.type}"
    count = max(2, min(_MOST_IMAGES, _PIXELS // image_size**2))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, channels, image_size, image_size, generator=generator)
    full, half = (measure or encoder_seconds)(encoder, images.contiguous(memory_format=torch.channels_last))
    choice: Precision = "bf16" if full > 1.1 * half else "fp32"
    return choice, (
        f"{choice}: a step of the encoder on {count} images of {image_size} px took {1000 * half:.0f} ms in bf16, "
        f"{1000 * full:.0f} ms in fp32"
    )


def half_type(precision: Precision) -> torch.dtype | None:
    """What autocast computes in; None where there is nothing to cast."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    half = half_type(precision)
    return nullcontext() if half is None else torch.autocast(device.type, dtype=half)


def loss_scaler(device: torch.device, precision: Precision) -> torch.amp.GradScaler:
    """Keeps small gradients of fp16 above zero; does nothing in any other precision."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def encoder_seconds(
    encoder: nn.Module, images: Tensor, *, clock: Callable[[], float] = time.thread_time
) -> tuple[float, float]:
    """The best of a few turns of forward and backward in fp32, then in bf16, on a copy of the encoder.

    One thread and its own processor time: neither a busy machine nor threads that wait for each other distort it.
    """
    trial = copy.deepcopy(encoder).train().to(memory_format=torch.channels_last)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    turns: list[tuple[float, ...]] = []
    begin = clock()
    try:
        # the first turn also loads and compiles: it counts only where there is no time for another
        while not turns or (len(turns) < _TURNS and clock() - begin < _SECONDS):
            turns.append(tuple(_one_step(trial, images, precision, clock) for precision in ("fp32", "bf16")))
    finally:
        torch.set_num_threads(threads)
    full, half = zip(*(turns[1:] or turns), strict=True)
    return min(full), min(half)


def _one_step(module: nn.Module, images: Tensor, precision: Precision, clock: Callable[[], float]) -> float:
    begin = clock()
    with autocast(images.device, precision):
        output = module(images)
    # a detector's backbone gives a table of feature maps
    outputs = output.values() if isinstance(output, Mapping) else (output,)
    torch.stack([values.float().square().mean() for values in outputs]).sum().backward()  # type: ignore[no-untyped-call]  # of torch
    module.zero_grad(set_to_none=True)
    return clock() - begin
