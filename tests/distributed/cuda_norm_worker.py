"""One rank of two GPUs: the BatchNorm across ranks against torch's own on the global batch."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dssl.batchnorm import batchnorm_across_ranks


def on_gpus(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(minutes=2)
    )
    generator = torch.Generator().manual_seed(0)
    for affine in (True, False):
        for shape in ((10, 4, 3, 3), (10, 4), (10, 4, 6)):
            values, gradient = (
                torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
            )
            kind: Any = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
            reference, across = (kind(4, affine=affine).to(device, torch.float64) for _ in range(2))
            batchnorm_across_ranks(across)
            whole, half = (part.clone().requires_grad_() for part in (values, values.chunk(2)[rank]))
            expected = reference(whole)
            expected.backward(gradient)
            result = across(half)
            result.backward(gradient.chunk(2)[rank])
            assert whole.grad is not None
            pairs = [(result, expected.chunk(2)[rank]), (half.grad, whole.grad.chunk(2)[rank])]
            pairs += list(zip(across.buffers(), reference.buffers(), strict=True))
            for one, other in zip(across.parameters(), reference.parameters(), strict=True):
                dist.all_reduce(one.grad)  # DDP's business
                pairs.append((one.grad, other.grad))
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    dist.destroy_process_group()
