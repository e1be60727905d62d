"""One rank of a two-process test: the same three steps on its share of the global batch, results written to a file."""

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dssl import (
    BYOL,
    BYOLConfig,
    Method,
    Objective,
    Relation,
    RelationConfig,
    SimSiam,
    SimSiamConfig,
    Teacher,
    named_graph,
)  # fmt: skip
from dssl.distributed import batchnorm_across_ranks
from dssl.methods import METHODS

STEPS = 5
_TYPES = (torch.float64, torch.float32, torch.bfloat16)
_MORE = (
    "vicreg",
    "barlowtwins",
    "simsiam guarded",
    "byol guarded",
    "simsiam beyond",
    "simsiam timm",
    "moco",
    "lejepa",
    "swav",
)
_MORE += ("dino", "lejepa visreg", "simclr decoupled", "moco related", "swav related")
CASES = [
    *((name, dtype) for name in ("simsiam", "byol", "simclr") for dtype in _TYPES),
    *((name, torch.float64) for name in _MORE),
]
BEYOND = "s1<->s2, s1->teacher(s1), h1->mean(s1,s2):0..1, h2->s2"
"""The graph of ``beyond``, with a predictor for each kind of view."""
RELATED = "s1<->s2, h1->s1[relation], h2->mean(s1,s2)[relation]"
"""The graph of ``related``, whose queue is longer than a batch."""
_SETTINGS: dict[str, Any] = {"visreg": {"regularizer": "visreg", "weight": 0.6}, "decoupled": {"decoupled": True}}


def build(name: str) -> Method:
    torch.manual_seed(0)
    name, _, more = name.partition(" ")
    guard = 0.7 if more == "guarded" else 0.0
    encoder = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    if more == "timm":  # one layer for norm, dropout and activation
        encoder = nn.Sequential(nn.Conv2d(3, 6, 3), BatchNormAct2d(6), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    if more == "beyond":
        method = SimSiam(
            encoder, feature_dim=24, settings=SimSiamConfig(hidden=16, output=16, bottleneck=8, predictor="per-kind")
        )
        frozen = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        method.teacher = Teacher(frozen, width=16, features=5)
        return method
    if name == "simsiam":
        return SimSiam(encoder, feature_dim=24, settings=SimSiamConfig(hidden=16, output=16, bottleneck=8, guard=guard))
    if name == "byol":
        return BYOL(encoder, feature_dim=24, settings=BYOLConfig(hidden=16, output=8, momentum=0.9, guard=guard))
    widths = {"hidden": 16, "output": 8, "prototypes": 8, "slices": 12}
    own = {key: width for key, width in widths.items() if key in vars(METHODS[name]())}
    other = Method.of(METHODS[name](**own, **_SETTINGS.get(more, {})), encoder, feature_dim=24)
    if more == "related":
        other.relation = Relation(RelationConfig(queue=12), width=8)
    return other


def views(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 3, 8, 8, generator=generator, dtype=dtype) for name in ("s1", "s2", "h1", "h2")}


def steps(name: str, dtype: torch.dtype, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Five steps of DSSL; returns the losses, the first gradients and the final state. bfloat16: by autocast, as in training."""
    torch.set_num_threads(1)
    mixed = dtype == torch.bfloat16
    dtype = torch.float32 if mixed else dtype
    method = build(name).to(dtype)
    graph = {"beyond": BEYOND, "related": RELATED}.get(name.partition(" ")[2], "dssl")
    objective = Objective(method, named_graph(graph))
    wrapped: nn.Module = objective
    if world > 1:
        batchnorm_across_ranks(objective)
        wrapped = DistributedDataParallel(objective)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1, momentum=0.9)
    result: dict[str, Tensor] = {}
    for step in range(STEPS):
        share = {key: value.chunk(world)[rank] for key, value in views(step, dtype).items()}
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            report = objective.backward(share, progress=step / (STEPS - 1), through=wrapped)
        loss = report.total.clone()
        if world > 1:
            dist.all_reduce(loss)
        result[f"loss {step}"] = loss / world
        if step == 0:
            result |= {f"gradient {key}": p.grad.clone() for key, p in method.named_parameters() if p.grad is not None}
        optimizer.step()
        method.after_step(step, STEPS)
    return result | {key: value.clone() for key, value in method.state_dict().items()}


def join(rank: int, folder: str, *, backend: str = "gloo") -> None:
    """Two ranks meet in a folder."""
    patience = datetime.timedelta(minutes=2)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=patience)


def main(rank: int, folder: str) -> None:
    join(rank, folder)
    results = {f"{name} {dtype}": steps(name, dtype, rank=rank, world=2) for name, dtype in CASES}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
