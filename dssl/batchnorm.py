"""A BatchNorm of the global batch: what makes several processes compute what one computes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dssl.distributed import world_size
from dssl.errors import DsslError


class _Normalise(torch.autograd.Function):
    """torch's own BatchNorm kernels with the statistics of the global batch: one exchange forward, one backward.

    Every rank has as many values. The kernel's backward takes out the means over the rank's own batch; what the means over
    the global batch differ by is linear in the values, and is added.
    """

    @staticmethod
    def forward(
        context: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.float64 if values.dtype == torch.float64 else torch.float32
        unused = values.new_zeros(2, values.shape[1], dtype=kind)
        own = torch.stack(torch.batch_norm_update_stats(values, unused[0], unused[1], 0.0))
        parts = [torch.empty_like(own) for _ in range(world_size())]
        dist.all_gather(parts, own)
        means, variances = torch.stack(parts, dim=1)
        mean = means.mean(dim=0)
        variance = variances.mean(dim=0) + (means - mean).square().mean(dim=0)
        context.save_for_backward(values, weight, mean, torch.rsqrt(variance + eps))
        context.eps = eps
        context.mark_non_differentiable(mean, variance)
        return F.batch_norm(values, mean, variance, weight, bias, eps=eps), mean, variance

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        values, weight, mean, scale = context.saved_tensors
        gradient, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], values, weight, None, None, mean, scale, True, context.eps, [True, True, True]
        )
        own = torch.stack([for_bias, for_weight]).to(mean.dtype)
        total = own.clone()
        dist.all_reduce(total)
        count = values.numel() // values.shape[1]
        missing = (own - total / world_size()) / count * (scale if weight is None else scale * weight)
        slope = missing[1] * scale
        offset = missing[0] - slope * mean
        shape = [1, -1] + [1] * (values.dim() - 2)
        offset, slope = (part.to(values.dtype).view(shape) for part in (offset, slope))
        gradient = torch.addcmul(gradient + offset, values, slope)
        return gradient, *((None, None) if weight is None else (for_weight, for_bias)), None


class _NormaliseOnCuda(torch.autograd.Function):
    """The kernels of torch's SyncBatchNorm, without its waits for the host.

    SyncBatchNorm drops ranks with an empty batch by a mask, whose size the host must know: three waits in every layer. Here no
    rank has an empty batch, so there is nothing to drop. The kernel moves the running statistics.
    """

    @staticmethod
    def forward(
        context: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        values = _dense(values)
        channels = values.shape[1]
        mean, scale = torch.batch_norm_stats(values, eps)
        own = torch.cat([mean, scale, mean.new_full((1,), values.numel() // channels)])
        gathered = own.new_empty(world_size() * len(own))
        dist.all_gather_into_tensor(gathered, own)
        parts = gathered.view(world_size(), len(own))
        means, scales, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1].contiguous()
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            values, means, scales, running_mean, running_var, momentum, eps, counts
        )
        context.save_for_backward(values, weight, mean, scale, counts)
        return torch.batch_norm_elemt(values, weight, bias, mean, scale, eps)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, mean, scale, counts = context.saved_tensors
        gradient = _dense(gradients[0])
        of_values, of_weight, of_bias, *_ = context.needs_input_grad
        *sums, for_weight, for_bias = torch.batch_norm_backward_reduce(
            gradient, values, mean, scale, weight, of_values, of_weight, of_bias
        )
        total = torch.stack(sums)
        dist.all_reduce(total)
        for_values = torch.batch_norm_backward_elemt(
            gradient, values, mean, scale, weight, total[0], total[1], counts.to(torch.int32)
        )
        return for_values, for_weight if of_weight else None, for_bias if of_bias else None, None, None, None, None


def _dense(values: Tensor) -> Tensor:
    return values if values.is_contiguous(memory_format=torch.channels_last) else values.contiguous()


class _AcrossRanks:
    """The forward of a BatchNorm whose batch is the global one (torch's SyncBatchNorm refuses CPU tensors and waits on CUDA)."""

    training: bool
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor | None
    momentum: float
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            alone: Tensor = super().forward(values)  # type: ignore[misc]  # torch's, the next base
            return alone
        if self.num_batches_tracked is not None:  # None while a checkpointed block is recomputed
            self.num_batches_tracked.add_(1)
        result: Tensor
        if values.is_cuda:
            result = _NormaliseOnCuda.apply(
                values, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps
            )
            return result
        result, mean, variance = _Normalise.apply(values, self.weight, self.bias, self.eps)
        count = values.numel() // values.shape[1] * world_size()
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return result


# the attributes above are torch's own, declared there with wider types
class BatchNorm1dAcrossRanks(_AcrossRanks, nn.BatchNorm1d):  # type: ignore[misc]
    pass


class BatchNorm2dAcrossRanks(_AcrossRanks, nn.BatchNorm2d):  # type: ignore[misc]
    pass


class _ThenActs(_AcrossRanks):
    """Of timm's BatchNorm, which is followed by a dropout and an activation of its own."""

    drop: nn.Module
    act: nn.Module

    def forward(self, values: Tensor) -> Tensor:
        normalised = super().forward(values)
        if not self.training or world_size() == 1:  # timm's own forward has done it all
            return normalised
        acted: Tensor = self.act(self.drop(normalised))
        return acted


def batchnorm_across_ranks(module: nn.Module) -> nn.Module:
    """Make every BatchNorm see the global batch; names in the state dict stay."""
    plain: dict[type, type] = {nn.BatchNorm1d: BatchNorm1dAcrossRanks, nn.BatchNorm2d: BatchNorm2dAcrossRanks}
    for child in module.modules():
        kind = type(child)
        if not isinstance(child, nn.modules.batchnorm._BatchNorm) or issubclass(kind, _AcrossRanks):
            continue
        # changing the class keeps parameters, buffers and every reference to the module as they are
        if kind in plain:
            child.__class__ = plain[kind]
        elif isinstance(child, nn.BatchNorm2d) and {"drop", "act"} <= child._modules.keys():
            child.__class__ = type(f"{kind.__name__}AcrossRanks", (_ThenActs, kind), {})
        else:
            raise DsslError(
                f"the encoder has a {kind.__name__}, whose statistics several processes cannot share: train it with one process, "
                "or choose an encoder with torch's BatchNorm"
            )
    return module
