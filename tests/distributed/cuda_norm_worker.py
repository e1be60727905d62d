"""One rank of two: the BatchNorm across ranks that CUDA gets, over stand-ins for torch's kernels, written from formulae."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dssl.batchnorm import _NormaliseOnCuda


def over(values: Tensor) -> list[int]:
    return [0, *range(2, values.dim())]


def along(row: Tensor, like: Tensor) -> Tensor:
    return row.view(1, -1, *[1] * (like.dim() - 2))


def stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return values.mean(over(values)), (values.var(over(values), correction=0) + eps).rsqrt()


def gather(
    values: Tensor,
    means: Tensor,
    scales: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    total = counts.sum()
    mean = (counts[:, None] * means).sum(0) / total
    variance = (counts[:, None] * (scales**-2 - eps + (means - mean) ** 2)).sum(0) / total
    running_mean += momentum * (mean - running_mean)
    running_var += momentum * (variance * total / (total - 1) - running_var)
    return mean, (variance + eps).rsqrt()


def normalise(values: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, eps: float) -> Tensor:
    result = (values - along(mean, values)) * along(scale, values)
    return result if weight is None else result * along(weight, values) + along(bias, values)


def reduce(gradient: Tensor, values: Tensor, mean: Tensor, scale: Tensor, weight: Any, *_: bool) -> tuple[Tensor, ...]:
    sums = gradient.sum(over(values))
    products = (gradient * (values - along(mean, values))).sum(over(values))
    return sums, products, products * scale, sums.clone()


def for_values(
    gradient: Tensor, values: Tensor, mean: Tensor, scale: Tensor, weight: Any, sums: Tensor, products: Tensor, counts: Tensor
) -> Tensor:  # fmt: skip
    assert counts.dtype == torch.int32
    total = counts.sum()
    centred = gradient - along(sums / total, values)
    centred = centred - (values - along(mean, values)) * along(scale**2 * products / total, values)
    return centred * along(scale if weight is None else scale * weight, values)


def main(rank: int, folder: str) -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_stats", stats, "CPU")
    library.impl("batch_norm_gather_stats_with_counts", gather, "CPU")
    library.impl("batch_norm_elemt", normalise, "CPU")
    library.impl("batch_norm_backward_reduce", reduce, "CPU")
    library.impl("batch_norm_backward_elemt", for_values, "CPU")
    compare(rank, folder, torch.device("cpu"), backend="gloo", tolerance=1e-11)


def on_gpus(rank: int, folder: str) -> None:
    """The same with torch's own kernels, over NCCL."""
    torch.cuda.set_device(rank)
    compare(rank, folder, torch.device("cuda", rank), backend="nccl", tolerance=1e-9)


def compare(rank: int, folder: str, device: torch.device, *, backend: str, tolerance: float) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(minutes=2)
    )
    generator = torch.Generator().manual_seed(0)
    for affine in (True, False):
        for shape, split in (((10, 4, 3, 3), (5, 5)), ((10, 4), (3, 7)), ((10, 4, 6), (8, 2))):
            values, gradient = (
                torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
            )
            reference: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](4, affine=affine)
            reference.to(device, torch.float64)
            whole = values.clone().requires_grad_()
            expected = reference(whole)
            expected.backward(gradient)
            mine = values.split(split)[rank].clone().requires_grad_()
            options: Any = {"dtype": torch.float64, "device": device}
            weight = torch.ones(4, requires_grad=True, **options) if affine else None
            bias = torch.zeros(4, requires_grad=True, **options) if affine else None
            running = torch.zeros(4, **options), torch.ones(4, **options)
            result: Any = _NormaliseOnCuda.apply(mine, weight, bias, *running, 0.1, 1e-5)
            result.backward(gradient.split(split)[rank])
            pairs = [(result, expected.split(split)[rank]), (mine.grad, whole.grad.split(split)[rank])]  # type: ignore[union-attr]
            pairs += [(running[0], reference.running_mean), (running[1], reference.running_var)]
            for one, other in ((weight, reference.weight), (bias, reference.bias)):
                if one is not None:
                    dist.all_reduce(one.grad)  # DDP's business
                    pairs.append((one.grad, other.grad))
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    dist.destroy_process_group()
