"""The processes of a run: who am I, how many are we, and on which device."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dssl.errors import DsslError

_PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for the others: the first one measures kNN while they wait."""


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA, then Apple's GPU, then the CPU."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(name, True):
        raise DsslError(f"device is {name}, which this machine does not have: take auto, or see `dssl doctor`")
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """True on every process when it is true on one."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_world(device_name: str, *, batch_size: int) -> Iterator[World]:
    """One process, or one of those that torchrun started (it sets RANK, WORLD_SIZE, LOCAL_RANK)."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield World(0, 1, pick_device(device_name))
        return
    if batch_size % size or batch_size // size < 2:
        raise DsslError(
            f"batch_size is {batch_size}, the global one, and there are {size} processes: expected a multiple of {size} "
            f"with at least 2 images each, such as {max(2, round(batch_size / size)) * size}"
        )
    if torch.cuda.is_available() and device_name in ("auto", "cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = pick_device(device_name)
    backend = "nccl" if device.type == "cuda" else "gloo"
    # torchrun keeps its store when it restarts the ranks: without a name for the attempt they would call the dead
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    attempt = PrefixStore(f"dssl/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield World(rank, size, device)
    finally:
        dist.destroy_process_group()
