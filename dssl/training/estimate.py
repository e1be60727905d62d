"""What a run would cost: real steps and the loader timed here, and a step on a GPU counted without one."""

import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dssl.config import Precision, RunConfig
from dssl.data import open_source
from dssl.data.loader import Batches
from dssl.distributed import World
from dssl.loop import take_step
from dssl.models.blocks import checkpoint_activations
from dssl.objective import Objective
from dssl.optim import build_optimizer, optimizer_tensors
from dssl.precision import half_type, loss_scaler, precision_of
from dssl.training.prepare import build_method, normalization_of, view_maker

_SMALL, _PHOTOS = 64, 64
"""Pixels up to which a recipe's images are in memory, and how many drawn images stand for a data set."""
ON_TOP = 0.1
"""Share of the counted bytes that workspaces of cuDNN, buffers of NCCL and fragmentation are allowed."""
_REFERENCE = 3 * 2 * 4.09e9
"""Operations of one training view of ResNet-50 at 224 px: forward, and twice that for the backward."""


@dataclass(frozen=True, slots=True)
class Speed:
    images_per_second: float
    on_one_thread: float | None
    """Images a second with one torch thread; None on a GPU, or if one thread is all there is."""
    views_per_second: float
    checkpoint_bytes: int
    precision: Precision
    why: str
    """What was measured to choose the precision."""
    views: tuple[str, ...]


def _rate(work: Callable[[int], object], *, images: int, seconds: float, clock: Callable[[], float]) -> float:
    """Images a second of ``work(step)``, which handles so many at each call and is called at least twice."""
    started, done = clock(), 0
    while done < 2 or clock() - started < seconds:
        work(done)
        done += 1
    return done * images / (clock() - started)


def loader_rate(
    config: RunConfig, data: str | None, *, seconds: float = 4.0, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Images a second that the loader makes into bytes for a GPU, on all threads of this machine.

    Without ``data``: JPEG files of 500 x 375 pixels for recipes with large views, else images in memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        if data is None and config.image_size > _SMALL:
            _draw_photos(Path(folder))
            data = folder
        source = open_source(data or f"shapes:{_PHOTOS}", channels=config.channels, value_range=config.range)
        batch = min(config.batch_size, len(source), _PHOTOS)
        maker = view_maker(config, config.view_graph, None)
        with Batches(source, maker, batch_size=batch, seed=0, steps=10**9, threads=config.threads) as batches:
            for step in range(2):  # the threads start, and the kernels are loaded
                batches.at(step)
            return _rate(lambda step: batches.at(2 + step), images=batch, seconds=seconds, clock=clock)


def _draw_photos(folder: Path) -> None:
    """Drawn images of a photo's size and file length, with the noise of a camera."""
    source = open_source(f"shapes:{_PHOTOS}")
    generator = np.random.Generator(np.random.Philox(0))
    for index in range(_PHOTOS):
        drawn = Image.fromarray(source.image(index)).resize((500, 375), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(drawn) + generator.normal(0, 8, (375, 500, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{index}.jpg", quality=90)


def measure_speed(
    config: RunConfig, device: torch.device, *, seconds: float = 4.0, batch_size: int | None = None
) -> Speed:
    """Steps of the real objective on random images, and the rate at which one process makes the views."""
    batch = batch_size or min(config.batch_size, 64 if device.type == "cpu" else config.batch_size)
    side = config.image_size if config.image_size <= _SMALL else 2 * config.image_size
    generator = np.random.Generator(np.random.Philox(0))
    images = generator.integers(0, 256, (batch, side, side, config.channels), dtype=np.uint8)
    normalization = None
    if config.normalization != "measure":
        normalization = normalization_of(replace(config, init=None, adapt=None), None)
    maker = view_maker(config, config.view_graph, normalization)
    buffers = maker.allocate(batch)

    def make_views() -> None:
        plan = maker.plan(np.arange(batch), epoch=0)
        for row in range(batch):
            maker.apply_many(plan, row, [images[row]], buffers, row)

    make_views()
    started = time.perf_counter()
    make_views()
    view_rate = batch * len(maker.names) / (time.perf_counter() - started)

    method = build_method(config)
    precision, why = precision_of(
        config.precision, None, World(0, 1, device),
        encoder=method.encoder, image_size=config.image_size, channels=config.channels,
    )  # fmt: skip
    method.to(device).to(memory_format=torch.channels_last)
    if config.checkpoint_activations:
        checkpoint_activations(method.encoder)
    objective = Objective(method, config.view_graph)
    optimizer = build_optimizer(method, config.optimizer)
    scaler = loss_scaler(device, precision)
    scale = 255 if normalization is None else 1
    views = {
        name: torch.from_numpy(buffers[name]).permute(0, 3, 1, 2).to(device, torch.float32) / scale
        for name in maker.names
    }

    def step(number: int) -> float:
        loss = take_step(
            objective, views, optimizer, scaler, progress=0.0, through=objective, device=device, precision=precision
        )
        return float(loss.total)

    def rate(seconds: float) -> float:
        step(0)
        return _rate(step, images=batch, seconds=seconds, clock=time.perf_counter)

    all_threads, one_thread = rate(seconds), None
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        try:
            one_thread = rate(seconds / 2)
        finally:
            torch.set_num_threads(threads)
    tensors = [*method.state_dict().values(), *optimizer_tensors(optimizer, method).values()]
    size = sum(value.nbytes for value in tensors)
    return Speed(all_threads, one_thread, view_rate, size, precision, why, maker.names)


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
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        if (formula := flop_registry.get(function._overloadpacket)) is not None:
            self.operations += formula(*arguments, **(options or {}), out_val=result)
        return result

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self._device or key in self._sizes:
            return
        self._sizes[key] = -(-storage.nbytes() // 512) * 512
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def step_budget(config: RunConfig, *, gpus: int = 1, precision: Precision = "bf16") -> Budget:
    """One step of this run on one of some GPUs, in the arithmetic that they would use.

    Tensors that have a shape and no memory go through a real step. They call themselves the CPU's, so that neither a driver nor
    a CUDA build of torch is needed; shapes and types are those of CUDA (``tests/gpu`` compares).
    """
    images, graph, half = config.batch_size // gpus, config.view_graph, half_type(precision)
    method = build_method(config)
    if config.checkpoint_activations:
        checkpoint_activations(method.encoder)
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
        counted.operations, counted.peak = 0.0, counted.live
        with nullcontext() if half is None else torch.autocast("cpu", dtype=torch.bfloat16):
            objective.backward(views, progress=0.0, through=objective)
        optimizer.step()
        method.after_step(1, 2)
    return Budget(counted.peak, counted.operations, images)


def _without_memory(module: nn.Module) -> None:
    """Put tensors of the same shapes in the place of the module's own; one that is shared stays shared."""
    fakes: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    shared = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                    fakes[id(tensor)] = shared
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]  # a parameter for a parameter
