"""The paper's way to train: fp32, Pillow in worker processes, default memory layout, one pass a view, BYOL's eight passes."""

import atexit
import contextlib
import os
import signal
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks import pillow_views
from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.methods.byol import BYOL
from dssl.methods.simclr import SimCLR
from dssl.methods.simsiam import SimSiam
from dssl.training.prepare import build_method

WORKERS = 2


class PaperViews(Dataset[tuple[Tensor, ...]]):
    """Four Pillow views of image after image, for ever: two standard and RandAugment of each (``dssl``), or four standard."""

    def __init__(self, images: np.ndarray, graph: str) -> None:
        self.images, self.heavy = images, graph == "dssl"
        self.standard = transforms.Compose(pillow_views.standard(32, blurred=False))
        self.augment = pillow_views.RandAugment(2, 5)
        self.tensor = transforms.Compose(pillow_views.to_tensor(CIFAR10))

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = Image.fromarray(self.images[index % len(self.images)])
        views = [self.standard(image) for _ in range(2 if self.heavy else 4)]
        if self.heavy:
            views += [self.augment(view) for view in views]
        return tuple(self.tensor(view) for view in views)


def distance(z: Tensor, y: Tensor) -> Tensor:
    return -(F.normalize(z, dim=1) * F.normalize(y.detach(), dim=1)).sum(1).mean()


def contrast(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    z = F.normalize(torch.cat([first, second]), dim=1)
    logits = z @ z.T / temperature
    logits.fill_diagonal_(-torch.inf)
    count = len(first)
    return F.cross_entropy(logits, torch.cat([torch.arange(count) + count, torch.arange(count)]))


def paper_loss(method: SimSiam | BYOL | SimCLR, v: Sequence[Tensor], graph: str) -> Tensor:
    """Algorithms 1 and 2 as the published scripts write them; BYOL's target network makes a pass for each of the four terms."""
    y = [method.projector(method.encoder(images)) for images in v]
    if isinstance(method, SimCLR):
        if graph == "standard2":
            return (contrast(y[0], y[1], 0.5) + contrast(y[2], y[3], 0.5)) / 2
        return contrast(y[0], y[1], 0.5) + (distance(y[2], y[0]) + distance(y[3], y[1])) / 2
    z = [method.predictor(row) for row in y]
    ends = (1, 0, 3, 2) if graph == "standard2" else (1, 0, 0, 1)  # the view that each one is pulled to
    if isinstance(method, BYOL):
        with torch.no_grad():
            targets = [method.target_projector(method.target_encoder(v[end])) for end in ends]
    else:
        targets = [y[end] for end in ends]
    terms = [distance(row, target) for row, target in zip(z, targets, strict=True)]
    return torch.stack(terms).sum() / (4 if graph == "standard2" else 2)


class Workers:
    """A loader whose worker processes stand still while somebody else is measured."""

    def __init__(self, dataset: Dataset[tuple[Tensor, ...]], batch: int) -> None:
        self.iterator = iter(DataLoader(dataset, batch_size=batch, num_workers=WORKERS))
        # a worker that stands still would not hear that it should end, and the interpreter would wait for it for ever
        atexit.register(self.signal, signal.SIGCONT)

    def __next__(self) -> list[Tensor]:
        views: list[Tensor] = next(self.iterator)
        return views

    def signal(self, number: int) -> None:
        for worker in self.iterator._workers:  # type: ignore[attr-defined]  # of the iterator with processes
            if worker.is_alive():
                os.kill(worker.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.iterator._shutdown_workers()  # type: ignore[attr-defined]  # as above
        atexit.unregister(self.signal)


class WithWorkers:
    """Somebody who loads in worker processes, which stand still while others are measured."""

    loader: Workers

    def pause(self) -> None:
        self.loader.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.loader.signal(signal.SIGCONT)

    def close(self) -> None:
        self.loader.close()


class PaperWay(WithWorkers):
    def __init__(self, config: RunConfig, name: str, images: np.ndarray, *, bf16: bool = False) -> None:
        self.graph, self.bf16 = config.graph, bf16
        method = build_method(config)
        assert isinstance(method, SimSiam | BYOL | SimCLR)
        self.method = method
        self.optimizer = torch.optim.SGD(
            [p for p in method.parameters() if p.requires_grad], lr=0.03, momentum=0.9, weight_decay=5e-4
        )
        self.loader = Workers(PaperViews(images, config.graph), config.batch_size)

    def step(self) -> None:
        self.train_on(next(self.loader))

    def train_on(self, views: Sequence[Tensor]) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            loss = paper_loss(self.method, views, self.graph)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        if isinstance(self.method, BYOL):
            with torch.no_grad():
                for online, target in (
                    (self.method.encoder, self.method.target_encoder),
                    (self.method.projector, self.method.target_projector),
                ):
                    for new, old in zip(online.parameters(), target.parameters(), strict=True):
                        old.mul_(0.996).add_(new, alpha=0.004)
        return loss.item()
