"""One rank of two: under DDP, view by view equals one whole backward, for every method, preset and kind of BatchNorm."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from dssl import DsslError, Objective, named_graph
from dssl.distributed import batchnorm_across_ranks
from tests.distributed.worker import join
from tests.test_objective import METHOD_NAMES, build, taught, views_of

GRAPHS = ("standard", "standard2", "dssl", "ablation-d", "ablation-f", "ablation-g", "ablation-h")
"""The other presets have the edges of one of these, between views of other names."""


BEYOND = "s1<->s2, s1->teacher(s1), h1->mean(s1,s2):0..1"
"""The last view's graph reaches neither the teacher's map nor, with one for each kind, the predictor of standard views."""


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if str(function).startswith("c10d."):
            self.names[str(function).split(".")[1]] += 1
        return function(*arguments, **(options or {}))


def compare(name: str, preset: str, *, rank: int, across: bool) -> None:
    graph = named_graph(preset)
    states = []
    for early in (False, True):
        method = taught(name, graph)
        objective = Objective(method, graph)
        if across:
            batchnorm_across_ranks(objective)
        wrapped = DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)
        for step in range(2):  # DDP rebuilds its buckets after the first
            share = {key: value.chunk(2)[rank] for key, value in views_of(graph, count=8, seed=step).items()}
            method.zero_grad(set_to_none=True)
            with Collectives() as collectives:
                if early:
                    total = objective.backward(share, progress=0.25, through=wrapped).total
                else:
                    report = wrapped(share, progress=0.25)
                    report.total.backward()
                    total = report.total.detach()
            with torch.no_grad():
                for parameter in method.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
        states.append((method, total, collectives.names))
    (plain, expected, _), (ours, loss, names) = states
    what = f"{name} {preset} across={across}"
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, msg=what)
    for (key, one), two in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), (what, key)
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12, msg=f"{what} {key}")
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-12, msg=f"{what} {key}")
            both = [torch.empty_like(one) for _ in range(2)]
            dist.all_gather(both, one.detach().contiguous())
            assert torch.equal(*both), f"{what}: {key} differs between the ranks"
    for (key, one), two in zip(ours.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12, msg=f"{what} {key}")
    if name in ("simsiam", "byol") and not across:  # the others gather the rows of the global batch, as a guard does
        assert names["allreduce_"] == 1, f"{what}: gradients are exchanged once in a step, not {names}"


def main(rank: int, folder: str, every_pair: bool = False) -> None:
    """Every method and every preset; ``every_pair`` of the paper's methods and presets takes a quarter of a minute."""
    join(rank, folder)
    torch.set_num_threads(1)
    alone = Objective(build("simsiam"), named_graph("dssl"))
    with pytest.raises(DsslError, match=r"2 processes.*through="):
        alone.backward(views_of(alone.graph))  # would train on gradients that nobody averaged
    for name in (*METHOD_NAMES, "simsiam guarded", "byol guarded", "simsiam per-kind", "byol per-kind"):
        whole = name == "simsiam" or (every_pair and name in ("byol", "simclr"))
        for preset in (*GRAPHS, BEYOND) if whole else (BEYOND,):
            compare(name, preset, rank=rank, across=True)
        for preset in ("dssl", "ablation-h") if every_pair else ("dssl",):
            # BatchNorm on its own knows nothing of the order of the views
            compare(name, preset, rank=rank, across=False)
    dist.destroy_process_group()


def on_gpus(rank: int, folder: str) -> None:
    """The BatchNorm across the ranks of two GPUs, against torch's own on the global batch."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    join(rank, folder, backend="nccl")
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
