"""A BatchNorm of the global batch: what makes several processes compute what one computes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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


class _AcrossRanks(_BatchNorm):
    """On the CPU, of which torch's SyncBatchNorm takes no tensors."""

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(values)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        result: Tensor
        result, mean, variance = _Normalise.apply(values, self.weight, self.bias, self.eps)
        count = values.numel() // values.shape[1] * world_size()
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        return result


class BatchNorm1dAcrossRanks(_AcrossRanks, nn.BatchNorm1d):
    pass


class BatchNorm2dAcrossRanks(_AcrossRanks, nn.BatchNorm2d):
    pass


class _SyncBatchNorm(nn.SyncBatchNorm):
    process_group = None  # that of all ranks


def _then_act(module: nn.Module, _: object, values: Tensor) -> Tensor:
    """A hook after timm's BatchNorm, which has a dropout and an activation of its own."""
    acted: Tensor = module.get_submodule("act")(module.get_submodule("drop")(values))
    return acted


def batchnorm_across_ranks(module: nn.Module) -> nn.Module:
    """Make every BatchNorm see the global batch, on the device where it is; names in the state dict stay."""
    plain: dict[type, type[_BatchNorm]] = {
        nn.BatchNorm1d: BatchNorm1dAcrossRanks,
        nn.BatchNorm2d: BatchNorm2dAcrossRanks,
    }
    for child in module.modules():
        kind = type(child)
        if not isinstance(child, _BatchNorm) or isinstance(child, _AcrossRanks | nn.SyncBatchNorm):
            continue
        if isinstance(child, nn.BatchNorm2d) and {"drop", "act"} <= dict(child.named_children()).keys():
            kind = nn.BatchNorm2d
            child.register_forward_hook(_then_act)
        if kind not in plain:
            raise DsslError(
                f"the encoder has a {kind.__name__}, whose statistics several processes cannot share: train it with one process, "
                "or choose an encoder with torch's BatchNorm"
            )
        # changing the class keeps parameters, buffers and every reference to the module as they are
        child.__class__ = _SyncBatchNorm if any(tensor.is_cuda for tensor in child.buffers()) else plain[kind]
    return module
