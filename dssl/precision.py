"""Which arithmetic is fastest here: measured, not guessed."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from dssl.config import Precision


def choose_precision(device: torch.device) -> tuple[Precision, str]:
    """bf16 where it is at least a tenth faster than fp32 in a convolution, and the sentence that says so."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "bf16: the GPU has it"
        return "fp32", "fp32: this GPU has no bf16"
    if device.type != "cpu":
        return "fp32", f"fp32: bf16 was not measured on {device.type}"
    slow, fast = _convolution_seconds(torch.float32, torch.bfloat16)
    ratio = slow / fast
    choice: Precision = "bf16" if ratio > 1.1 else "fp32"
    return choice, f"{choice}: a convolution in bf16 ran at {ratio:.1f} times the speed of fp32"


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _convolution_seconds(*dtypes: torch.dtype) -> list[float]:
    """The best of many short turns of each on one thread: on a busy machine some turn is left alone, and no thread waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = [float("inf")] * len(dtypes)
    images, kernel = torch.randn(16, 64, 16, 16), torch.randn(64, 64, 3, 3)
    with torch.no_grad():
        for _ in range(30):
            for which, dtype in enumerate(dtypes):
                a, b = (tensor.to(dtype, memory_format=torch.channels_last) for tensor in (images, kernel))
                start = time.perf_counter()
                F.conv2d(a, b, padding=1)
                best[which] = min(best[which], time.perf_counter() - start)
    torch.set_num_threads(threads)
    return best
