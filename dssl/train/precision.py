"""Which arithmetic is fastest here: measured, not guessed."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from dssl.config import Precision


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA, then Apple's GPU, then the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def choose_precision(device: torch.device) -> tuple[Precision, str]:
    """bf16 where it is at least a tenth faster than fp32 in a convolution, and the sentence that says so."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "bf16: the GPU has it"
        return "fp32", "fp32: this GPU has no bf16"
    if device.type != "cpu":
        return "fp32", f"fp32: bf16 was not measured on {device.type}"
    slow, fast = (_convolution_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    ratio = slow / fast
    choice: Precision = "bf16" if ratio > 1.1 else "fp32"
    return choice, f"{choice}: a convolution in bf16 ran at {ratio:.1f} times the speed of fp32"


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _convolution_seconds(dtype: torch.dtype) -> float:
    images = torch.randn(64, 64, 16, 16).to(dtype).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(64, 64, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
    best = float("inf")
    with torch.no_grad():
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(4):
                F.conv2d(images, kernel, padding=1)
            best = min(best, time.perf_counter() - start)
    return best
