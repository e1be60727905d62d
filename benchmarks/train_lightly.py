"""lightly's training loop, as its examples write it, with its modules, losses and transforms; four views like everybody.

It has no directed graph and no RandAugment: the loss of ``dssl`` is written with its own criteria, and heavy views are its
transform with torchvision's RandAugment before it. BYOL's target sees only the views that are targets, which is less work than
its example does.
"""

import contextlib
import copy

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms

from benchmarks.train_paper import WithWorkers, Workers
from dssl.augment import CIFAR10
from dssl.config import RunConfig
from dssl.models import feature_dim
from dssl.training.prepare import build_method


class LightlyViews(Dataset[tuple[Tensor, ...]]):
    def __init__(self, images: np.ndarray, graph: str) -> None:
        from lightly.transforms.simsiam_transform import SimSiamViewTransform

        normalize = {"mean": list(CIFAR10.mean), "std": list(CIFAR10.std)}
        standard = SimSiamViewTransform(input_size=32, gaussian_blur=0.0, normalize=normalize)
        heavy = transforms.Compose([transforms.RandAugment(2, 5), standard])
        self.images = images
        self.chains = [standard, standard, *([heavy, heavy] if graph == "dssl" else [standard, standard])]

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image = Image.fromarray(self.images[index % len(self.images)])
        return tuple(chain(image) for chain in self.chains)


class Lightly(WithWorkers):
    def __init__(self, config: RunConfig, name: str, images: np.ndarray, *, bf16: bool) -> None:
        from lightly.loss import NegativeCosineSimilarity, NTXentLoss
        from lightly.models.modules import heads
        from lightly.models.utils import deactivate_requires_grad

        self.name, self.graph, self.bf16 = name, config.graph, bf16
        self.encoder = build_method(config).encoder  # the same encoder as everybody's
        width = feature_dim(self.encoder, image_size=32)
        self.cosine, self.contrast = NegativeCosineSimilarity(), NTXentLoss(temperature=0.5)
        self.predictor: nn.Module = nn.Identity()
        if name == "simsiam":  # heads of the same shape as ours: two layers on CIFAR-10
            self.projector: nn.Module = heads.ProjectionHead([
                (width, 2048, nn.BatchNorm1d(2048), nn.ReLU(inplace=True)),
                (2048, 2048, nn.BatchNorm1d(2048, affine=False), None),
            ])  # fmt: skip
            self.predictor = heads.SimSiamPredictionHead(2048, 512, 2048)
        elif name == "byol":
            self.projector = heads.BYOLProjectionHead(width, 4096, 256)
            self.predictor = heads.BYOLPredictionHead(256, 4096, 256)
        else:
            self.projector = heads.SimCLRProjectionHead(width, width, 128)
        self.target = nn.Sequential(copy.deepcopy(self.encoder), copy.deepcopy(self.projector))
        deactivate_requires_grad(self.target)
        learnt = [*self.encoder.parameters(), *self.projector.parameters(), *self.predictor.parameters()]
        self.optimizer = torch.optim.SGD(learnt, lr=0.03, momentum=0.9, weight_decay=5e-4)
        self.loader = Workers(LightlyViews(images, config.graph), config.batch_size)

    def loss(self, views: list[Tensor]) -> Tensor:
        projections = [self.projector(self.encoder(view).flatten(start_dim=1)) for view in views]
        directed = self.graph == "dssl"
        if self.name == "simclr":
            loss: Tensor = self.contrast(projections[0], projections[1])
            if not directed:
                second: Tensor = self.contrast(projections[2], projections[3])
                return (loss + second) / 2
            aligned: list[Tensor] = [self.cosine(projections[2 + i], projections[i].detach()) for i in range(2)]
            return loss + 0.5 * (aligned[0] + aligned[1])
        z = projections
        if self.name == "byol":
            with torch.no_grad():
                z = [self.target(view).detach() for view in (views[:2] if directed else views)]
        p = [self.predictor(projection) for projection in projections]
        pairs = ((0, 1), (1, 0), (2, 0), (3, 1)) if directed else ((0, 1), (1, 0), (2, 3), (3, 2))
        return 0.5 * sum((self.cosine(p[a], z[b].detach()) for a, b in pairs), torch.zeros(()))

    def step(self) -> None:
        from lightly.models.utils import update_momentum

        views = next(self.loader)
        if self.name == "byol":
            update_momentum(self.encoder, self.target[0], m=0.996)
            update_momentum(self.projector, self.target[1], m=0.996)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.bf16 else contextlib.nullcontext():
            loss = self.loss(views)
        loss.detach()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
