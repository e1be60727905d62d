"""Who am I among the processes, how they agree, and how they share the rows of a batch: a gather with gradient, and a BatchNorm
of the global batch, which makes several processes compute what one computes.
"""

import datetime
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm

from dssl.errors import DsslError, InvalidSetting

T = TypeVar("T")
_LAUNCH = "start several processes with torchrun, and one with WORLD_SIZE unset"
_PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for the others: the first one measures kNN while they wait."""
_POLL = 0.02
"""Seconds between checks for processes that have started."""


def pick_device(name: str) -> torch.device:
    """``auto`` is CUDA, then Apple's GPU, then the CPU."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, here in present.items() if here)
        return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    if not present.get(name, True):
        raise InvalidSetting("device", f"is {name}, which this machine does not have: use auto, or see `dssl doctor`")
    return torch.device(name)


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

    def first_found(self, value: T | None) -> T | None:
        """What the first process that has something has, on all of them."""
        return next((other for other in self._gather(value) if other is not None), None)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def all_or_error(self, work: Callable[[], T]) -> T:
        """Do what may fail on any process: if it fails on one, all of them stop with its line, and none waits for it."""
        if self.size == 1:
            return work()
        result, problem = None, None
        try:
            result = work()
        except (DsslError, OSError) as error:
            problem = str(error)
        for rank, text in enumerate(self._gather(problem)):
            if text is not None:
                raise DsslError(text if rank == self.rank else f"process {rank} stopped: {text}")
        return cast(T, result)

    def in_turn(self, work: Callable[[], T]) -> T:
        """The first process of each node does it before the others, which then find what it has left in the node's cache."""
        leads = os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        led = self.all_or_error(lambda: work() if leads else None)
        followed = self.all_or_error(lambda: None if leads else work())
        return cast(T, led if leads else followed)

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first process finds, on all of them."""
        box = [self.all_or_error(lambda: work() if self.first else None)]
        if self.size > 1:
            dist.broadcast_object_list(box, 0)
        return cast(T, box[0])

    def agree(self, facts: Mapping[str, str]) -> None:
        """Stop if a process has different facts from the first: another folder, other data, other code."""
        everyone = self._gather(facts)
        for rank, theirs in enumerate(everyone):
            for name, value in theirs.items():
                if value != (first := everyone[0][name]):
                    raise DsslError(
                        f"process {rank} has {name} {value}, process 0 has {first}: give every node the same --out on a shared "
                        "disk, the same data and the same version of dssl"
                    )

    def _gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, value)
        return parts


ALONE = World(0, 1, torch.device("cpu"))
"""One process, for what needs no device."""


def agree_on_attempt(store: Store, *, rank: int, size: int) -> str:
    """A name that this start of the processes shares, and that no earlier one had.

    torchrun keeps its store when it restarts the processes, so without a new name they would talk to dead ones; and its count of
    restarts is each node's own. So the first process invents the name and answers whoever asks. Every question is unique, so
    nobody reads the answers to what an earlier start left in the store.
    """
    if rank > 0:
        question = uuid.uuid4().hex
        store.set(f"dssl/question {rank}", question)
        name = str(store.get(f"dssl/answer {question}").decode())
        store.add(f"dssl/{name} heard", 1)
        return name
    name, answered, deadline = uuid.uuid4().hex, set[str](), time.monotonic() + _PATIENCE.total_seconds()
    while store.add(f"dssl/{name} heard", 0) < size - 1:
        asked = [key for other in range(1, size) if store.check([key := f"dssl/question {other}"])]
        for question in {store.get(key).decode() for key in asked} - answered:
            store.set(f"dssl/answer {question}", name)
            answered.add(question)
        if time.monotonic() > deadline:
            raise DsslError(f"not all of the {size} processes started within {_PATIENCE}: check the other nodes")
        time.sleep(_POLL)
    return name


@contextmanager
def join_world(device_name: str, *, batch_size: int) -> Iterator[World]:
    """One process, or one of those that torchrun started (it sets RANK, WORLD_SIZE, LOCAL_RANK)."""
    try:
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    except ValueError as error:
        raise DsslError(f"WORLD_SIZE and RANK of the environment are not numbers ({error}): {_LAUNCH}") from None
    if size == 1:
        yield World(0, 1, pick_device(device_name))
        return
    if batch_size % size or batch_size // size < 2:
        raise DsslError(
            f"batch_size is {batch_size} over all {size} processes: expected a multiple of {size} "
            f"with at least 2 images each, such as {max(2, round(batch_size / size)) * size}"
        )
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise DsslError(f"WORLD_SIZE is {size} in the environment, without {' and '.join(missing)}: {_LAUNCH}")
    if torch.cuda.is_available() and device_name in ("auto", "cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = pick_device(device_name)
    store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
    while isinstance(store, PrefixStore):  # of some versions of torch: a node's own count of restarts is in its name
        store = store.underlying_store
    attempt = PrefixStore(f"dssl/{agree_on_attempt(store, rank=rank, size=size)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield World(rank, size, device)
    finally:
        dist.destroy_process_group()


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
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # others may hold the same gradient
        dist.all_reduce(total)
        return total.chunk(world_size())[rank()]


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of the global batch, in the order of the ranks; the rows themselves when there is one process."""
    if world_size() == 1:
        return rows
    return cast(Tensor, _Gather.apply(rows))


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
