"""The safety kit on other people's code: collapses injected into peers' methods, and peers' losses on two processes.

benchmarks/.venv/bin/python -m benchmarks.safety        (after make bench-setup)

Methods of lightly and stable-pretraining are trained as they are and without what prevents their collapse; ``HealthMonitor`` with
its defaults should report the second within 500 steps and never the first. Losses are compared by ``dssl.testing.compare_on``;
``--earlier`` names a folder with another version of lightly (pip install --no-deps --target FOLDER lightly==1.5.23 aenum).
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from benchmarks import record
from dssl import (
    BarlowTwins,
    BarlowTwinsConfig,
    HealthMonitor,
    Objective,
    SimCLR,
    SimCLRConfig,
    VICReg,
    VICRegConfig,
    ViewGraph,
)  # fmt: skip
from dssl.data import open_source
from dssl.integrations import WatchedOutputs
from dssl.testing import Loss, compare_on

BATCH, IMAGES, DRAWS, WIDTH = 64, 1024, 4, 64
BAD = ("partial collapse", "collapsed", "diverged")


# Losses


class Ours(nn.Module):
    """A method of dssl on a standard pair, whose embeddings are handed in as pixels."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        method.encoder, method.projector = nn.Flatten(), nn.Identity()
        self.objective = Objective(method, ViewGraph.parse("s1<->s2"))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.objective({"s1": z, "s2": y}).total
        return loss


def lightly_sigreg(z: Tensor, y: Tensor) -> Tensor:
    from lightly.loss.lejepa_loss import SIGReg

    loss: Tensor = SIGReg(num_vectors=64, gather_distributed=True)(torch.stack([z, y]))
    return loss


def lightly_lejepa(z: Tensor, y: Tensor) -> Tensor:
    from lightly.loss.lejepa_loss import LeJEPALoss

    criterion = LeJEPALoss(gather_distributed=True, sigreg_num_vectors=64)
    return criterion(local_proj=y[None], global_proj=z[None])  # type: ignore[no-any-return]


def lightly_visreg(z: Tensor, y: Tensor) -> Tensor:
    from lightly.loss.visreg_loss import VISRegLoss

    criterion = VISRegLoss(num_slices=64, gather_distributed=True)
    return criterion(local_proj=y[None], global_proj=z[None])  # type: ignore[no-any-return]


def stable_sigreg(z: Tensor, y: Tensor) -> Tensor:
    """Its LeJEPA's regularizer, built where it runs: it asks for the processes when it is made."""
    from stable_pretraining.methods.lejepa import SlicedEppsPulley

    return SlicedEppsPulley(num_slices=64)(z) + SlicedEppsPulley(num_slices=64)(y)  # type: ignore[no-any-return]


def losses(*, earlier: bool) -> Iterator[tuple[str, str, Loss]]:
    """Library, name and loss; what a version does not have is left out."""
    from lightly import loss as lightly_loss

    for name in ("NTXentLoss", "DCLLoss", "VICRegLoss", "BarlowTwinsLoss", "TiCoLoss"):
        yield "lightly", name, getattr(lightly_loss, name)(gather_distributed=True)
    with suppress(ImportError):
        from lightly.loss import lejepa_loss

        yield "lightly", "SIGReg", lightly_sigreg
        if "LeJEPALoss" in vars(lejepa_loss):
            yield "lightly", "LeJEPALoss", lightly_lejepa
    if earlier:
        return
    with suppress(ImportError):
        from lightly.loss import visreg_loss  # noqa: F401

        yield "lightly", "VISRegLoss", lightly_visreg
    from stable_pretraining import losses as stable

    for name in ("NTXEntLoss", "VICRegLoss", "BarlowTwinsLoss"):
        yield "stable-pretraining", name, getattr(stable, name)()
    yield "stable-pretraining", "SlicedEppsPulley (LeJEPA)", stable_sigreg
    heads = {"feature_dim": 16}
    yield "dssl", "SimCLR", Ours(SimCLR(nn.Identity(), **heads, settings=SimCLRConfig(output=16)))
    yield "dssl", "VICReg", Ours(VICReg(nn.Identity(), **heads, settings=VICRegConfig(hidden=2, output=16)))
    yield (
        "dssl",
        "Barlow Twins",
        Ours(BarlowTwins(nn.Identity(), **heads, settings=BarlowTwinsConfig(hidden=2, output=16))),
    )


def compare_losses(*, earlier: bool = False) -> list[record.Record]:
    given = {(library, name): loss for library, name, loss in losses(earlier=earlier)}
    found = compare_on({" ".join(key): loss for key, loss in given.items()}, timeout=600)
    return [
        {"library": library, "version": version(library), "loss": name, **asdict(found[f"{library} {name}"])}
        for library, name in given
    ]


def compare_earlier(folder: Path) -> list[record.Record]:
    """The same in a process that finds another version of lightly first."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "losses.json")
        words = [sys.executable, "-m", "benchmarks.safety", "--losses-to", str(file)]
        subprocess.run(
            words, check=True, env={**os.environ, "PYTHONPATH": str(folder)}, cwd=Path(__file__).parent.parent
        )
        rows: list[record.Record] = json.loads(file.read_text(encoding="utf-8"))
    return rows


# Collapses


def pool(library: str, data: str) -> Tensor:
    """Views of the same images by the library's own transform: images x draws x pixels; drawn once for all of its runs."""
    source = open_source(data)
    pictures = [Image.fromarray(source.image(index)) for index in range(min(IMAGES, len(source)))]
    torch.manual_seed(0)
    if library == "lightly":
        from lightly.transforms.simsiam_transform import SimSiamViewTransform

        make: Callable[[Any], Tensor] = SimSiamViewTransform(input_size=32, gaussian_blur=0.0)
        return torch.stack([torch.stack([make(picture) for _ in range(DRAWS)]) for picture in pictures])
    from stable_pretraining.data import transforms

    chain = transforms.Compose(
        transforms.RandomResizedCrop((32, 32), scale=(0.2, 1.0)),
        transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.RandomHorizontalFlip(p=0.5),
        transforms.ToImage(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    )
    return torch.stack(
        [torch.stack([chain({"image": picture})["image"] for _ in range(DRAWS)]) for picture in pictures]
    )


class Pairs(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of two different views of random images."""

    def __init__(self, pool: Tensor, steps: int) -> None:
        self.pool, self.steps = pool, steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.steps):
            rows = torch.randperm(len(self.pool), generator=generator)[:BATCH]
            first = torch.randint(DRAWS, (BATCH,), generator=generator)
            second = (first + torch.randint(1, DRAWS, (BATCH,), generator=generator)) % DRAWS
            yield self.pool[rows, first], self.pool[rows, second]


def encoder() -> nn.Module:
    """Three convolutions: a run takes seconds on an idle core."""
    torch.manual_seed(0)
    widths = (3, 16, 32, WIDTH)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


Run = Iterator[tuple[HealthMonitor, Tensor]]


def lightly_module(method: str, *, broken: bool) -> Any:
    """lightly's heads and losses with the sizes, optimizer and rate of its examples, around a small encoder."""
    import lightning
    from lightly.loss import BarlowTwinsLoss, NegativeCosineSimilarity, NTXentLoss, VICRegLoss
    from lightly.models.modules import heads
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    backbone, width = encoder(), WIDTH
    momentum = 0.9 if "momentum" in method else 0.0  # the paper's, or none, as in the examples
    method = method.partition(",")[0]

    class Module(lightning.LightningModule):  # type: ignore[misc]  # mypy never sees lightning
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.prediction_head = backbone, nn.Identity()
            self.criterion: nn.Module = NegativeCosineSimilarity()
            if method == "SimSiam":
                self.projection_head: nn.Module = heads.SimSiamProjectionHead(width, 512, 128)
                self.prediction_head = heads.SimSiamPredictionHead(128, 64, 128)
            elif method == "BYOL":
                self.projection_head = heads.BYOLProjectionHead(width, 1024, 256)
                if not broken:
                    self.prediction_head = heads.BYOLPredictionHead(256, 1024, 256)
            elif method == "SimCLR":
                self.projection_head = heads.SimCLRProjectionHead(width, 512, 128)
                self.criterion = self.criterion if broken else NTXentLoss()
            else:
                self.projection_head = heads.VICRegProjectionHead(width, 512, 512, num_layers=2)
                self.criterion = VICRegLoss(mu_param=0.0, nu_param=0.0) if broken else VICRegLoss()
            if method == "Barlow Twins":
                self.projection_head = heads.BarlowTwinsProjectionHead(width, 512, 512)
                self.criterion = BarlowTwinsLoss()
            self.target = copy.deepcopy(nn.Sequential(self.backbone, self.projection_head))
            deactivate_requires_grad(self.target)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            z0, z1 = (self.projection_head(self.backbone(view).flatten(start_dim=1)) for view in batch)
            if method in ("SimCLR", "VICReg", "Barlow Twins"):
                return self.criterion(z0, z1)  # type: ignore[no-any-return]
            p0, p1 = self.prediction_head(z0), self.prediction_head(z1)
            if method == "BYOL" and not broken:
                update_momentum(nn.Sequential(self.backbone, self.projection_head), self.target, m=0.996)
                with torch.no_grad():
                    z0, z1 = (self.target(view) for view in batch)
            elif not broken:
                z0, z1 = z0.detach(), z1.detach()
            return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06, momentum=momentum)

    return Module()


def train_lightly(method: str, views: Tensor, *, steps: int, broken: bool) -> Run:
    """The module's own training step; forward hooks listen to its heads, as dssl's callback for Lightning does."""
    module = lightly_module(method, broken=broken)
    monitor = HealthMonitor(predictions_from=1000 if method == "BYOL" else 0)
    watched = WatchedOutputs(
        "projection_head", predictor="prediction_head" if method.startswith("SimSiam") else None, monitor=monitor
    )
    watched.attach(module)
    module.train()
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(Pairs(views, steps)):
        watched.begin(step)
        loss = module.training_step(list(batch), step)
        watched.end(loss=loss)
        yield monitor, loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def without_stop_gradient(p: Tensor, z: Tensor) -> Tensor:
    return -F.cosine_similarity(p, z).mean()


def train_stable(method: str, views: Tensor, *, steps: int, broken: bool) -> Run:
    from stable_pretraining import methods
    from stable_pretraining.methods import simsiam

    backbone = encoder()
    weights = {"std_coeff": 0.0, "cov_coeff": 0.0} if broken else {}
    model: Any = {
        "SimSiam": lambda: methods.SimSiam(backbone, projector_dim=512, predictor_hidden_dim=128),
        "BYOL": lambda: methods.BYOL(backbone, projector_dims=(1024, 256), predictor_dims=(1024, 256)),
        "VICReg": lambda: methods.VICReg(backbone, projector_dims=(512, 512, 512), **weights),
        "SimCLR": lambda: methods.SimCLR(backbone, projector_dims=(512, 128)),
    }[method]()
    if method == "BYOL" and broken:
        model.predictor = nn.Identity()
    model.train()
    monitor = HealthMonitor(predictions_from=1000 if method == "BYOL" else 0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.06, momentum=0.9)
    with mock.patch.object(simsiam, "_neg_cos_sim", without_stop_gradient if broken else simsiam._neg_cos_sim):
        for step, (first, second) in enumerate(Pairs(views, steps)):
            output = model(first, second)
            projected = output.projection if method in ("VICReg", "SimCLR") else output.target
            predictions = {} if method in ("VICReg", "SimCLR") else {"both": output.prediction}
            monitor.check(step, {"both": projected}, predictions=predictions, loss=output.loss)
            yield monitor, output.loss
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            if method == "BYOL":
                for part in (model.backbone, model.projector):
                    if broken:  # the target is the network itself
                        part.ema_coefficient.zero_()
                    part.update_teacher()


INJECTED = {
    ("lightly", "SimSiam"): "no stop-gradient",
    ("lightly", "SimSiam, momentum 0.9"): "no stop-gradient",
    ("lightly", "BYOL"): "no predictor, no stop-gradient, no moving average",
    ("lightly", "VICReg"): "weights of variance and covariance 0",
    ("lightly", "SimCLR"): "no negatives",
    ("lightly", "Barlow Twins"): "",
    ("stable-pretraining", "SimSiam"): "no stop-gradient",
    ("stable-pretraining", "BYOL"): "no predictor, no moving average",
    ("stable-pretraining", "VICReg"): "weights of variance and covariance 0",
    ("stable-pretraining", "SimCLR"): "",
}


LONGER = {("lightly", "SimSiam"): 2, ("lightly", "VICReg"): 3, ("stable-pretraining", "VICReg"): 3}
"""Times the usual steps: these collapse slowly."""


def collapses(data: str, steps: int, only: list[str]) -> list[record.Record]:
    rows, views = [], dict[str, Tensor]()
    for (library, method), injected in INJECTED.items():
        if only and method.partition(",")[0] not in only:
            continue
        if library not in views:
            views[library] = pool(library, data)
        for broken in (False, True) if injected else (False,):
            train = train_lightly if library == "lightly" else train_stable
            statuses: dict[int, str] = {}
            length = LONGER.get((library, method), 1) * steps
            for monitor, loss in train(method, views[library], steps=length, broken=broken):
                statuses[monitor.verdict.step] = monitor.verdict.status
                last = float(loss.detach())
            bad = [step for step, status in statuses.items() if status in BAD]
            memory = monitor.state_dict()
            row = {
                "library": library, "version": version(library), "method": method,
                "injected": injected if broken else "", "reported_at": bad[0] if bad else None,
                "checks_that_reported": len(bad), "checks": len(statuses), "last_status": monitor.verdict.status,
                "steps": length, "loss": last, "spread": min(values[-1] for values in memory["spreads"].values()),
                "rank_share": min(values[-1] for values in memory["ranks"].values()),
            }  # fmt: skip
            rows.append(row)
            right = "as it should be" if bool(bad) == broken else "WRONG"
            print(f"{library} {method}, {row['injected'] or 'as it is'}: {row['last_status']}, loss {last:.3f}, "
                f"spread {row['spread']:.2f}, rank {row['rank_share']:.2f}, "
                  f"reported at {row['reported_at']}: {right}",
                  flush=True)  # fmt: skip
    return rows


def main() -> int:
    parser = record.parser(__doc__)
    parser.add_argument("--data", default="shapes:1024", help="or cifar10:FOLDER")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--methods", nargs="*", default=[], help="only these")
    parser.add_argument("--only", choices=["losses", "runs"], help="measure this and keep the other from before")
    parser.add_argument("--earlier", type=Path, help="a folder with another version of lightly")
    parser.add_argument("--losses-to", type=Path, help="only compare the losses of lightly, and write them here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.losses_to is not None:
        options.losses_to.write_text(json.dumps(compare_losses(earlier=True)), encoding="utf-8")
        return 0
    clock = record.Clock()
    torch.set_num_threads(1)
    before = record.read("safety", folder=options.out) or {}
    content = {name: before.get(name, []) for name in ("losses", "runs")}
    if options.only != "runs":
        content["losses"] = compare_losses() + ([] if options.earlier is None else compare_earlier(options.earlier))
        for row in content["losses"]:
            problem = row["problem"] or "same on one and two processes"
            print(f"{row['library']} {row['version']} {row['loss']}: {problem}", flush=True)
    if options.only != "losses":
        rows = collapses(options.data, options.steps, options.methods)
        measured = {(row["library"], row["method"]) for row in rows}
        content["runs"] = [row for row in content["runs"] if (row["library"], row["method"]) not in measured] + rows
    about = {"steps": options.steps, "batch": BATCH, "images": IMAGES, "data": options.data.partition(":")[0]}
    record.write("safety", clock, {**content, **about}, folder=options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
