"""Count what a training step would do on a GPU, without one: peak bytes, host waits, collectives, devices. Run as a process.

The tests start it with the stubs preloaded (see ``test_fake_cuda``); it prints one JSON object. Tensors are fake: they have a
shape, a type and the device ``cuda``, and no memory.
"""

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dssl import BYOL, Objective, SimCLR, SimCLRConfig, SimSiam, SimSiamConfig, build_encoder, named_graph
from dssl.config import OptimizerConfig
from dssl.models.blocks import checkpoint_activations
from dssl.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from dssl.precision import autocast, half_type, loss_scaler
from tests import counting

CUDA = torch.device("cuda", 0)
WAITS = ("nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "index.Tensor")


class FakeCuda(FakeTensorMode):
    """The stub says that there is a device; constants must still be made without it."""

    avoid_device_init = True  # type: ignore[assignment]

    def __deepcopy__(self, memory: object) -> "FakeCuda":
        return self  # BYOL copies its encoder, and every tensor in it names its mode


class Counted(counting.Counted):
    """Peak bytes on the device, and every operation that makes the host wait or speaks to other ranks."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.waits: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = str(function)
        inputs = [one for one in tree_leaves((arguments, options)) if isinstance(one, Tensor)]
        if name == "aten._local_scalar_dense.default" and inputs[0].device.type == "cuda":
            self.waits["item"] += 1
            return False if inputs[0].dtype == torch.bool else 0  # any number does
        result = super().__torch_dispatch__(function, types, arguments, options)
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if name.startswith("c10d."):
            self.collectives[name.split(".")[1]] += 1
        elif name.startswith("aten."):
            operation = name.removeprefix("aten.")
            indexed = operation.startswith("index.Tensor") and any(one.dtype == torch.bool for one in inputs[1:])
            asked = operation.startswith(WAITS) and (indexed or not operation.startswith("index."))
            moved = operation.startswith(("_to_copy", "copy_")) and crosses(inputs, outputs)
            if (asked or moved) and any(one.device.type == "cuda" for one in (*inputs, *outputs)):
                self.waits[operation] += 1
        return result


def crosses(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Between host and device, with a number of elements: a pageable copy waits. A number for a kernel does not."""
    devices = {one.device.type for one in (*inputs, *outputs) if one.dim() > 0}
    return devices == {"cpu", "cuda"}


def to_channels_last(module: nn.Module) -> None:
    """``module.to`` swaps tensors, which fake ones refuse."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and value.dim() == 4:
                moved = value.detach().to(memory_format=torch.channels_last)
                part._parameters[name] = nn.Parameter(moved, requires_grad=value.requires_grad)


def tiny() -> nn.Module:
    """What an encoder is made of, once: a row of the table is about the method, the graph and the optimiser."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def method_of(name: str, encoder: str, size: int) -> SimSiam | BYOL | SimCLR:
    built = tiny() if encoder == "tiny" else build_encoder(encoder, image_size=size)
    width = {"resnet50": 2048, "small": 256, "tiny": 8}[encoder]
    if name == "simsiam":
        return SimSiam(built, feature_dim=width, settings=SimSiamConfig(projector_layers=3))
    return (
        BYOL(built, feature_dim=width)
        if name == "byol"
        else SimCLR(built, feature_dim=width, settings=SimCLRConfig(temperature=0.1))
    )


def steps(
    method_name: str,
    *,
    graph: str = "dssl",
    encoder: str = "tiny",
    size: int = 32,
    images: int = 8,
    optimizer: str = "sgd",
    precision: str = "bf16",
    clip: bool = False,
    whole: bool = False,
    checkpointed: bool = False,
    ranks: int = 1,
) -> dict[str, Any]:
    """A step as ``dssl.loop`` makes it, with the optimiser's state already there; then its state saved and loaded."""
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    view_graph = named_graph(graph)
    with Counted() as counted:
        with CUDA:
            method = method_of(method_name, encoder, size)
        to_channels_last(method)
        objective = Objective(method, view_graph)
        if checkpointed:
            checkpoint_activations(method.encoder)
        built = build_optimizer(method, OptimizerConfig(name=optimizer, decay_norms_and_biases=False))  # type: ignore[arg-type]
        scaler = loss_scaler(CUDA, precision)  # type: ignore[arg-type]
        half = half_type(precision) or torch.float32  # type: ignore[arg-type]
        bad_step = torch.full((), -1, dtype=torch.int64, device=CUDA)
        for parameter in method.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        built.step()
        built.zero_grad(set_to_none=True)
        views = {
            view.name: torch.empty(images, 3, size, size, device=CUDA, dtype=half, memory_format=torch.channels_last)
            for view in view_graph.views
        }
        counted.peak = counted.live
        counted.waits.clear()
        counted.collectives.clear()
        with autocast(CUDA, precision):  # type: ignore[arg-type]
            report = objective(views) if whole else objective.backward(views, through=objective, scaler=scaler)
        if whole:
            report.total.backward()
        if clip:
            scaler.unscale_(built)
            nn.utils.clip_grad_norm_(method.parameters(), 1.0)
        scaler.step(built)
        scaler.update()
        method.after_step(1, 10)
        torch.where((bad_step < 0) & ~torch.isfinite(report.total.detach()), 1, bad_step)
        found = {
            "peak": counted.peak,
            "waits": dict(counted.waits),
            "collectives": dict(counted.collectives),
        }
        # saved and loaded
        tensors = optimizer_tensors(built, method)
        load_optimizer_tensors(built, method, {key: value.cpu() for key, value in tensors.items()})
        reloaded = optimizer_tensors(built, method)
        elsewhere = [
            name
            for name, value in (*method.state_dict().items(), *tensors.items(), *reloaded.items())
            if value.device != CUDA
        ]
    if ranks > 1:
        dist.destroy_process_group()
    return found | {"elsewhere": elsewhere}


def register_stand_ins() -> None:
    """Shapes of the CUDA kernels that torch has no fake version of."""
    library = torch.library.Library("aten", "IMPL")

    def moments(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(values.dtype, torch.float32)
        return values.new_empty(values.shape[1], dtype=kind), values.new_empty(values.shape[1], dtype=kind)

    def reduced(gradient: Tensor, values: Tensor, mean: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(mean) for _ in range(4))

    stand_ins: dict[str, Callable[..., Any]] = {
        "batch_norm_stats": moments,
        "batch_norm_gather_stats_with_counts": moments,
        "batch_norm_elemt": lambda values, *_: torch.empty_like(values),
        "batch_norm_backward_reduce": reduced,
        "batch_norm_backward_elemt": lambda gradient, values, *_: torch.empty_like(values),
        "_fused_sgd_": lambda *_, **__: None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some may have one in a later torch: then ours is not needed, and harmless
        for name, function in stand_ins.items():
            library.impl(name, function, "Meta")
    globals()["_library"] = library  # lives as long as the process


if __name__ == "__main__":
    register_stand_ins()
    with FakeCuda():
        print(json.dumps([steps(**settings) for settings in json.loads(sys.argv[1])]), flush=True)
    # a thread that torch started for a device that does not exist aborts, now and then, as the interpreter ends
    os._exit(0)
