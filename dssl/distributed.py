"""What makes many processes compute what one process computes: a gather with gradient and a BatchNorm across ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Gather(torch.autograd.Function):
    """Concatenate the rows of all ranks; the gradient of a rank's rows is the sum over what every rank did with them."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total.chunk(world_size())[rank()]


class _Sum(torch.autograd.Function):
    """Sum over ranks; so is its gradient."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of the global batch, in the order of the ranks; the rows themselves when there is one process."""
    if world_size() == 1:
        return rows
    gathered = _Gather.apply(rows)
    assert isinstance(gathered, Tensor)
    return gathered


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, with gradient."""
    if world_size() == 1:
        return values
    total = _Sum.apply(values)
    assert isinstance(total, Tensor)
    return total


class _AcrossRanks:
    """The forward of a BatchNorm whose batch is the global one (torch's SyncBatchNorm refuses CPU tensors)."""

    training: bool
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            result = super().forward(values)  # type: ignore[misc]
            assert isinstance(result, Tensor)
            return result
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        axes = [axis for axis in range(values.dim()) if axis != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        count = values.numel() // values.shape[1] * world_size()
        mean = sum_over_ranks(wide.sum(axes)) / count
        centred = wide - mean.view(shape)
        variance = sum_over_ranks(centred.square().sum(axes)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None and self.bias is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(values.dtype)


class BatchNorm1dAcrossRanks(_AcrossRanks, nn.BatchNorm1d):  # type: ignore[misc]
    pass


class BatchNorm2dAcrossRanks(_AcrossRanks, nn.BatchNorm2d):  # type: ignore[misc]
    pass


def batchnorm_across_ranks(module: nn.Module, *, device: torch.device) -> nn.Module:
    """Make every BatchNorm see the global batch: torch's own on CUDA, ours elsewhere; names in the state dict stay."""
    if device.type == "cuda":
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
        assert isinstance(converted, nn.Module)
        return converted
    for child in module.modules():
        # changing the class keeps parameters, buffers and every reference to the module as they are
        if type(child) is nn.BatchNorm1d:
            child.__class__ = BatchNorm1dAcrossRanks
        elif type(child) is nn.BatchNorm2d:
            child.__class__ = BatchNorm2dAcrossRanks
    return module
