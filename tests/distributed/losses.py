"""Losses for two processes, right ones and the usual mistakes; a module of its own, which a spawned process imports."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn


def contrast(z: Tensor, y: Tensor, rows: Tensor, offset: int) -> Tensor:
    """InfoNCE of z's rows against ``rows``, among which those of y begin at ``offset``."""
    logits = F.normalize(z, dim=1) @ F.normalize(rows, dim=1).T / 0.5
    return F.cross_entropy(logits, offset + torch.arange(len(y)))


def right(z: Tensor, y: Tensor) -> Tensor:
    rows = torch.cat(list(torch.distributed.nn.all_gather(y)))
    return contrast(z, y, rows, dist.get_rank() * len(y))


def own_rows_only(z: Tensor, y: Tensor) -> Tensor:
    return contrast(z, y, y, 0)


def gather_without_gradient(z: Tensor, y: Tensor) -> Tensor:
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y.detach())
    parts[dist.get_rank()] = y
    return contrast(z, y, torch.cat(parts), dist.get_rank() * len(y))


def mean_squared(z: Tensor, y: Tensor, *, divide: bool, gradient: bool) -> Tensor:
    """The squared norm of the mean over the global batch."""
    total = (z + y).sum(dim=0)
    if gradient:
        total = torch.distributed.nn.all_reduce(total)
    else:
        dist.all_reduce(total.data)
    squared = (total / (len(z) * dist.get_world_size())).square().sum()
    return squared / dist.get_world_size() if divide else squared


def reduce_right(z: Tensor, y: Tensor) -> Tensor:
    return mean_squared(z, y, divide=False, gradient=True)


def reduce_without_gradient(z: Tensor, y: Tensor) -> Tensor:
    """lightly's issues 1920 and 1977: the value is right, the gradient is divided by the number of processes."""
    return mean_squared(z, y, divide=False, gradient=False)


def divided_once_too_often(z: Tensor, y: Tensor) -> Tensor:
    return mean_squared(z, y, divide=True, gradient=True)


class WithPrototypes(nn.Module):
    """A loss with a parameter and a state; its prototypes get a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.linspace(-1, 1, 4 * 16).reshape(4, 16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        scores = [rows @ self.prototypes.T for rows in (z, y)]
        return self.calls * F.mse_loss(*scores)


def failing(z: Tensor, y: Tensor) -> Tensor:
    if dist.get_world_size() > 1 and dist.get_rank() == 1:
        raise FloatingPointError("seven")
    rows = torch.cat(list(torch.distributed.nn.all_gather(y))) if dist.get_world_size() > 1 else y
    return rows.square().mean() + z.mean()


def stuck(z: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))  # the others never call it
    else:
        torch.distributed.nn.all_gather(y)
    return (z * y).mean()
