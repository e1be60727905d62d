"""The peers' rows of the CPU speedrun: SimCLR as lightly and stable-pretraining train it, for given minutes of one core.

benchmarks/.venv/bin/python -m benchmarks.speedrun_peers lightly --data FOLDER --minutes 15 --seed 0 --core 0

Encoder, batch, temperature, optimiser, schedule and precision are those of our networks (:func:`benchmarks.speedrun.config_of`).
The two views of an image, heads, loss and loop are the peer's. The schedule follows the clock, so that it ends when the minutes
do. The process and its worker run on one core, as each of our networks does.
"""

import argparse
import dataclasses
import os
import sys
import warnings
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks import speedrun
from benchmarks.record import CORES
from dssl.augment import CIFAR10
from dssl.config import Precision
from dssl.data.cifar10 import Cifar10
from dssl.models import feature_dim
from dssl.models.for_cpus import WhitenedEncoder, whiten
from dssl.optim import learning_rate, peak_rate
from dssl.precision import autocast, choose_precision
from dssl.training.prepare import build_method, images_to_whiten
from dssl.weights.encoder import Encoder

_CPU = torch.device("cpu")
_PARTS = 10_000
"""Into how many parts the schedule divides the minutes."""


class Views(Dataset[Any]):
    """What a peer's transform makes of each image."""

    def __init__(self, images: np.ndarray, transform: Any, *, named: bool) -> None:
        self.images, self.transform, self.named = images, transform, named

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(self.images[index])
        return self.transform({"image": image} if self.named else image)


class Schedule:
    """The rate at this moment, and whether the minutes are over."""

    def __init__(self, peak: float, minutes: float) -> None:
        self.peak, self.minutes, self.images = peak, minutes, 0

    def rate(self) -> float:
        part = int(_PARTS * speedrun.seconds_since_start() / 60 / self.minutes)
        return learning_rate(min(part, _PARTS), peak=self.peak, total=_PARTS, warmup=_PARTS // 20)

    def over(self) -> bool:
        return speedrun.seconds_since_start() > 60 * self.minutes


def train_lightly(
    encoder: nn.Module, images: np.ndarray, settings: dict[str, Any], schedule: Schedule, precision: Precision
) -> None:
    """Its transform, projection head and loss in a loop as its examples write it."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    width = feature_dim(encoder, image_size=32)
    head = SimCLRProjectionHead(width, width, settings["output"])
    criterion = NTXentLoss(temperature=settings["temperature"])
    normalize = {"mean": list(CIFAR10.mean), "std": list(CIFAR10.std)}
    transform = SimCLRTransform(input_size=32, gaussian_blur=0.0, normalize=normalize)
    loader = DataLoader(
        Views(images, transform, named=False), batch_size=settings["batch"], shuffle=True, drop_last=True, num_workers=1,
        persistent_workers=True,
    )  # fmt: skip
    learned = [p for module in (encoder, head) for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=schedule.peak, momentum=0.9, weight_decay=settings["weight_decay"])
    while True:
        for first, second in loader:
            optimizer.param_groups[0]["lr"] = schedule.rate()
            with autocast(_CPU, precision):
                loss: Tensor = criterion(*(head(encoder(view).flatten(start_dim=1)) for view in (first, second)))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.images += len(first)
            if schedule.over():
                return


def train_stable(
    encoder: nn.Module, images: np.ndarray, settings: dict[str, Any], schedule: Schedule, precision: Precision
) -> None:
    """Its transforms, module and loss in Lightning's trainer."""
    import lightning
    import stable_pretraining
    from stable_pretraining.data import transforms
    from stable_pretraining.losses import NTXEntLoss

    width = feature_dim(encoder, image_size=32)
    standard = transforms.Compose(
        transforms.RGB(),
        transforms.RandomResizedCrop((32, 32), scale=(0.2, 1.0)),
        transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.RandomHorizontalFlip(p=0.5),
        transforms.ToImage(mean=list(CIFAR10.mean), std=list(CIFAR10.std)),
    )
    views = Views(images, transforms.MultiViewTransform([standard, standard]), named=True)
    loader = DataLoader(
        views, batch_size=settings["batch"], shuffle=True, drop_last=True, num_workers=1, persistent_workers=True
    )

    def forward(self: Any, batch: dict[str, Any], stage: str) -> dict[str, Tensor]:
        first, second = (self.projector(self.backbone(view["image"])) for view in batch["views"])
        return {"loss": self.contrast(first, second)}

    class Clock(lightning.Callback):  # type: ignore[misc]  # mypy never sees lightning
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = schedule.rate()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            schedule.images += settings["batch"]
            trainer.should_stop = schedule.over()

    sgd = {"type": "SGD", "lr": schedule.peak, "momentum": 0.9, "weight_decay": settings["weight_decay"]}
    module = stable_pretraining.Module(
        forward=forward,
        backbone=encoder,
        projector=nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, settings["output"])
        ),
        contrast=NTXEntLoss(temperature=settings["temperature"]),
        # the clock sets the rate; its own scheduler may as well stand still
        optim={"optimizer": sgd, "scheduler": {"type": "CosineAnnealingLR", "T_max": 10**9}, "interval": "step"},
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=10**6, logger=False, enable_checkpointing=False, callbacks=[Clock()],
        enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed" if precision == "bf16" else 32,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=loader)


PEERS = {"lightly": train_lightly, "stable-pretraining": train_stable}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--data", required=True, help="the folder of CIFAR-10")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    about = speedrun.about(options.seed)
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    config = speedrun.config_of(f"cifar10:{options.data}", epochs=1, seed=CORES * options.seed)
    source = Cifar10(options.data)
    encoder = build_method(config).encoder
    assert isinstance(encoder, WhitenedEncoder)
    whiten(encoder, images_to_whiten(config, source, CIFAR10))
    schedule = Schedule(peak_rate(config.optimizer.rate, config.batch_size), options.minutes)
    settings = dataclasses.asdict(config.method) | {
        "batch": config.batch_size, "weight_decay": config.optimizer.weight_decay,
    }  # fmt: skip
    images = np.stack([source.image(index) for index in range(len(source))])
    encoder.train()
    precision, _ = choose_precision(encoder, image_size=32, channels=3, device=_CPU)
    about["precision"] = precision
    PEERS[options.peer](encoder, images, settings, schedule, precision)
    minutes = speedrun.seconds_since_start() / 60
    print(f"{options.peer}: {schedule.images} images in {minutes:.1f} minutes", file=sys.stderr, flush=True)
    final = Encoder(network=encoder.eval(), name=options.peer, image_size=32, normalization=CIFAR10)
    rows = {f"{options.peer}'s SimCLR, one core, {name}": value for name, value in speedrun.OF_ONE_NETWORK.items()}
    for name, result in speedrun.measure([final], None, config.data, rows=rows, held_out=False, seed=options.seed):
        print(f"{name}: {result}", flush=True)
        speedrun.note(name, result, epochs=round(schedule.images / len(source), 1), minutes=minutes, about=about)


if __name__ == "__main__":
    main()
