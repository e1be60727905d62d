"""What a step would need on a GPU, counted without one: tensors that have a shape and no memory go through a real step."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dssl.config import Precision, RunConfig
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer
from dssl.precision import half_type
from dssl.training.prepare import build_method

ON_TOP = 0.1
"""Share of the counted bytes that workspaces of cuDNN, buffers of NCCL and fragmentation are allowed."""
_REFERENCE = 3 * 2 * 4.09e9
"""Operations of one training view of ResNet-50 at 224 px: forward, and twice that for the backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU and what it is known to train: images a second of ResNet-50 at 224 px in mixed precision, one view each."""

    name: str
    memory: int
    """GiB, sold as GB."""
    rate: float
    source: str


_NVIDIA = "NVIDIA DeepLearningExamples, ResNet-50 v1.5, PyTorch 21.03"
CARDS = (
    Card(name="V100", memory=32, rate=1156, source=_NVIDIA),
    Card(name="A100", memory=80, rate=2470, source=_NVIDIA),
    Card(name="H100", memory=80, rate=4940, source="assumed: twice an A100"),
)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one GPU does in a step."""

    peak: int
    """Bytes of all tensors at the peak of a step: weights, optimiser, views, activations, gradients."""
    operations: float
    """Floating-point operations of matrix products and convolutions."""
    images: int

    @property
    def needed(self) -> float:
        """Bytes that the card should have."""
        return self.peak * (1 + ON_TOP)

    def most(self, memory: float) -> int:
        """Images in a step that fit into so many bytes; a few less than do, as if weights grew with the batch."""
        return int(memory * self.images / self.needed)

    def rate(self, card: Card) -> float:
        """Images a second that the card would ask for, by arithmetic alone: small encoders and small batches reach less."""
        return card.rate * _REFERENCE * self.images / self.operations


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Live and peak bytes of the storages that operations make on a device, as the allocator rounds them, and operations."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._device = device
        self.live = self.peak = 0
        self.operations = 0.0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        formula: Callable[..., int] | None = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.operations += formula(*arguments, **(options or {}), out_val=result)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self._device or key in self._seen:
            return
        size = -(-storage.nbytes() // 512) * 512
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)


def step_budget(config: RunConfig, *, gpus: int = 1, precision: Precision = "bf16") -> Budget:
    """One step of this run on one of some GPUs, in the arithmetic that they would use.

    The tensors call themselves the CPU's, so that neither a driver nor a CUDA build of torch is needed; shapes and types are
    those of CUDA (``tests/gpu`` compares).
    """
    images = config.batch_size // gpus
    method = build_method(config)
    if config.checkpoint_activations:
        checkpoint_activations(method.encoder)
    graph = config.view_graph
    half = half_type(precision)
    with FakeTensorMode(), Counted("cpu") as counted:
        _without_memory(method)
        if method.taught_by is not None:
            _without_memory(method.taught_by.encoder)
        objective = Objective(method, graph)
        optimizer = build_optimizer(method, config.optimizer)
        for parameter in method.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()  # its state is made in the first step
        optimizer.zero_grad(set_to_none=True)
        sizes = {view.name: graph.size(view.name) or config.image_size for view in graph.views}
        views = {
            name: torch.empty((images, config.channels, size, size), dtype=half or torch.float32)
            for name, size in sizes.items()
        }
        counted.operations = 0.0
        counted.peak = counted.live
        with nullcontext() if half is None else torch.autocast("cpu", dtype=torch.bfloat16):
            objective.backward(views, progress=0.0, through=objective)
        optimizer.step()
        method.after_step(1, 2)
    return Budget(counted.peak, counted.operations, images)


def _without_memory(module: nn.Module) -> None:
    """Put tensors of the same shapes in the place of the module's own."""
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            known[id(tensor)] = (
                nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            )
        return known[id(tensor)]

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is not None:
                    table[name] = fake(value)  # type: ignore[assignment]  # a parameter for a parameter
