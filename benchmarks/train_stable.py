"""stable-pretraining's training loop: its module in Lightning's trainer, with its transforms, losses and teacher.

Lightning owns the loop, so it runs in a process of its own (this module, as a program), which stands still at the start of every
batch until it is given a step; a step is the time from one batch's start to the next one's. Logging, checkpoints and the progress
bar are off. It has no directed graph and no RandAugment: the loss of ``dssl`` is a forward function of ours made of its parts,
as it asks its users to write, and heavy views have torchvision's RandAugment first.
"""

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from benchmarks.record import reason
from benchmarks.train_ours import settings
from benchmarks.train_paper import WORKERS
from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.methods.method import mlp
from dssl.methods.simclr import simclr_projector
from dssl.methods.simsiam import simsiam_projector
from dssl.models import feature_dim
from dssl.training.prepare import build_method

_PATIENCE = 180.0


class StableViews(Dataset[dict[str, Tensor]]):
    def __init__(self, images: np.ndarray, graph: str) -> None:
        from stable_pretraining.data import transforms

        def chain(*first: object) -> Any:
            return transforms.Compose(
                *first,
                transforms.RandomResizedCrop((32, 32), scale=(0.2, 1.0)),
                transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8),
                transforms.RandomGrayscale(p=0.2),
                transforms.RandomHorizontalFlip(p=0.5),
                transforms.ToImage(mean=list(CIFAR10.mean), std=list(CIFAR10.std)),
            )

        standard = chain()
        heavy = chain(transforms.WrapTorchTransform(v2.RandAugment(2, 5)))
        self.images = images
        self.transform = transforms.MultiViewTransform(
            [standard, standard, *([heavy, heavy] if graph == "dssl" else [standard, standard])]
        )

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {"image": Image.fromarray(self.images[index % len(self.images)])}
        return {f"view{i}": view["image"] for i, view in enumerate(self.transform(sample)["views"])}


def forward(self: Any, batch: dict[str, Tensor], stage: str) -> dict[str, Tensor]:
    """What stable-pretraining calls for every batch; ``self`` is its module with our parts on it."""
    views = [batch[f"view{i}"] for i in range(4)]
    directed = self.graph == "dssl"
    if self.kind == "byol":
        student = [self.projector.forward_student(self.backbone.forward_student(view)) for view in views]
        with torch.no_grad():
            y = [
                self.projector.forward_teacher(self.backbone.forward_teacher(view))
                for view in (views[:2] if directed else views)
            ]
    else:
        student = y = [self.projector(self.backbone(view)) for view in views]
    if self.kind == "simclr":
        loss = self.contrast(y[0], y[1])
        if directed:
            return {"loss": loss + (self.distance(y[2], y[0].detach()) + self.distance(y[3], y[1].detach())) / 2}
        return {"loss": (loss + self.contrast(y[2], y[3])) / 2}
    z = [self.predictor(projection) for projection in student]
    pairs = ((0, 1), (1, 0), (2, 0), (3, 1)) if directed else ((0, 1), (1, 0), (2, 3), (3, 2))
    return {"loss": sum((self.distance(z[a], y[b].detach()) for a, b in pairs), torch.zeros(())) / 2}


class StablePretraining:
    """The parent's side: one process for each precision, which trains one setting after the other."""

    _servers: ClassVar[dict[bool, subprocess.Popen[str]]] = {}

    def __init__(self, config: RunConfig, name: str, images: np.ndarray, *, bf16: bool) -> None:
        if bf16 not in self._servers:
            self._servers[bf16] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.train_stable"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, bufsize=1, start_new_session=True,
                cwd=Path(__file__).parent.parent,
            )  # fmt: skip
            atexit.register(_kill, self._servers[bf16])
        self._server = self._servers[bf16]
        self.resume()
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file, images)
            file.flush()
            self._ask(
                {"method": name, "graph": config.graph, "encoder": config.encoder, "batch": config.batch_size,
                 "bf16": bf16, "threads": torch.get_num_threads(), "images": file.name}
            )  # fmt: skip

    def _ask(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        try:
            self._server.stdin.write(json.dumps(message) + "\n")
            if not select.select([self._server.stdout], [], [], _PATIENCE)[0]:
                raise TimeoutError(f"stable-pretraining did not answer in {_PATIENCE:.0f} s")
            answer = json.loads(self._server.stdout.readline())
        except (TimeoutError, OSError, ValueError):
            _kill(self._server)
            for bf16 in [key for key, server in self._servers.items() if server is self._server]:
                del self._servers[bf16]
            raise
        if "problem" in answer:
            raise RuntimeError(answer["problem"])

    def step(self) -> None:
        self._ask({"do": "step"})

    def pause(self) -> None:
        os.killpg(self._server.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._server.pid, signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        self._ask({"do": "end"})


def _kill(server: "subprocess.Popen[str]") -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def build(kind: str, config: RunConfig) -> Any:
    """Its module, of its own losses and teacher, around our encoder and heads of our shape."""
    import stable_pretraining
    from stable_pretraining.backbone import TeacherStudentWrapper
    from stable_pretraining.losses import BYOLLoss, NegativeCosineSimilarity, NTXEntLoss

    encoder = build_method(config).encoder  # the same encoder as everybody's
    width = feature_dim(encoder, image_size=32)
    heads: dict[str, nn.Module] = {
        "simsiam": simsiam_projector(width, hidden=2048, output=2048, layers=2),
        "byol": mlp(width, 4096, 256),
        "simclr": simclr_projector(width, output=128),
    }
    teacher = {"warm_init": True, "base_ema_coefficient": 0.996, "final_ema_coefficient": 1.0}
    parts: dict[str, Any] = {
        "backbone": TeacherStudentWrapper(encoder, **teacher) if kind == "byol" else encoder,
        "projector": TeacherStudentWrapper(heads[kind], **teacher) if kind == "byol" else heads[kind],
    }
    if kind != "simclr":
        parts["predictor"] = mlp(2048, 512, 2048) if kind == "simsiam" else mlp(256, 4096, 256)
    sgd = {"type": "SGD", "lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4}
    return stable_pretraining.Module(
        forward=forward,
        **parts,
        contrast=NTXEntLoss(temperature=0.5),
        distance=BYOLLoss() if kind == "byol" else NegativeCosineSimilarity(),
        kind=kind,
        graph=config.graph,
        optim={"optimizer": sgd, "scheduler": {"type": "CosineAnnealingLR", "T_max": 10**6}, "interval": "step"},
    )


class _Enough(Exception):
    """The parent wants no more steps."""


def train(message: dict[str, Any], answers: TextIO) -> None:
    """One setting, until the parent has seen enough."""
    import lightning
    from stable_pretraining.callbacks import TeacherStudentCallback

    torch.set_num_threads(message["threads"])
    kind = message["method"]
    config = settings(kind, message["graph"], message["encoder"], message["batch"])

    class Gate(lightning.Callback):  # type: ignore[misc]  # mypy never sees lightning
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            assert torch.get_num_threads() == message["threads"]
            answers.write("{}\n")
            if json.loads(sys.stdin.readline())["do"] == "end":
                raise _Enough

    dataset = StableViews(np.load(message["images"]), config.graph)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            callbacks=[Gate(), *([TeacherStudentCallback()] if kind == "byol" else [])], enable_progress_bar=False,
            enable_model_summary=False, precision="bf16-mixed" if message["bf16"] else "32-true",
            default_root_dir=folder,
        )  # fmt: skip
        loader = DataLoader(dataset, batch_size=config.batch_size, num_workers=WORKERS)
        with suppress(_Enough):
            trainer.fit(build(kind, config), train_dataloaders=loader)


def main() -> int:
    from loguru import logger

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print is no answer
    logger.remove()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            train(json.loads(line), answers)
            answers.write("{}\n")
        except Exception as problem:  # goes to the parent, which names it on the page
            answers.write(json.dumps({"problem": reason(problem)}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
