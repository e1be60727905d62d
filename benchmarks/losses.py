"""The losses beside lightly's classes, in float64: the largest relative difference, loss and gradient.

benchmarks/.venv/bin/python -m benchmarks.losses        (after make bench-setup)

Where lightly rounds to float32 inside (the quantiles of VISReg), the bound is that of float32. It has no loss of MoCo v3.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dssl import (
    DINO,
    BarlowTwins,
    BarlowTwinsConfig,
    DINOConfig,
    LeJEPA,
    LeJEPAConfig,
    Method,
    Objective,
    SimCLR,
    SimCLRConfig,
    SwAV,
    SwAVConfig,
    VICReg,
    VICRegConfig,
    ViewGraph,
)  # fmt: skip

WIDTH = 32
EXACT, ROUNDED = 1e-12, 1e-6


def difference(method: Method, theirs: Callable[[Tensor, Tensor], Tensor]) -> float:
    """On one standard pair, whose embeddings are handed in as pixels."""
    method.encoder, method.projector = nn.Flatten(), nn.Identity()
    generator = torch.Generator().manual_seed(0)
    pair = [0.6 * torch.randn(64, WIDTH, dtype=torch.float64, generator=generator) + 0.3 for _ in range(2)]
    objective = Objective(method.double(), ViewGraph.parse("s1<->s2"))
    results: list[list[Tensor]] = []
    for ours in (True, False):
        z, y = (one.clone().requires_grad_() for one in pair)
        loss = objective({"s1": z, "s2": y}).total if ours else theirs(z, y).squeeze()
        loss.backward()
        assert z.grad is not None
        assert y.grad is not None
        results.append([loss.detach(), z.grad, y.grad])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def lejepa() -> float:
    """Per view, and with 1 - lambda on the distance, as in the paper."""
    from lightly.loss.lejepa_loss import SIGReg, lejepa_invariance_loss

    method = LeJEPA(nn.Identity(), feature_dim=WIDTH, settings=LeJEPAConfig(hidden=2, output=WIDTH))
    sketch = SIGReg().double()
    sketch.phi = (-sketch.t.square() / 2).exp()  # its float32
    sketch.weights = torch.full((17,), 2 * 3 / 16, dtype=torch.float64) * sketch.phi
    sketch.weights[[0, -1]] /= 2
    sketch._generate_unit_vectors = lambda device, dtype, features: method.slices(torch.zeros(1, features).double())

    def theirs(z: Tensor, y: Tensor) -> Tensor:
        views = torch.stack([z, y])
        # the difference to the mean of two is half of the difference to the other
        distance: Tensor = 4 * lejepa_invariance_loss(all_proj=views, global_proj=views)
        loss: Tensor = 0.98 * distance + 0.02 * sketch(views)
        return loss

    return difference(method, theirs)


def visreg() -> float:
    from lightly.loss.visreg_loss import visreg_center_loss, visreg_scale_loss, visreg_shape_loss

    settings = LeJEPAConfig(hidden=2, output=WIDTH, regularizer="visreg", weight=0.6, slices=100)
    method = LeJEPA(nn.Identity(), feature_dim=WIDTH, settings=settings)
    torch.manual_seed(0)
    slices = F.normalize(torch.randn(WIDTH, 100, dtype=torch.float64), dim=0)
    method.slices = lambda z: slices  # type: ignore[method-assign]  # lightly's are of the default generator

    def theirs(z: Tensor, y: Tensor) -> Tensor:
        terms = []
        for view in (z, y):
            torch.manual_seed(0)
            terms.append(visreg_center_loss(view) + visreg_scale_loss(view) + visreg_shape_loss(view, 100))
        return 0.4 * (z - y).square().mean() + 0.6 * torch.stack(terms).mean()

    return difference(method, theirs)


def prototypes(method: SwAV | DINO) -> Callable[[Tensor], Tensor]:
    weight = method.prototypes.weight.detach().double()
    return lambda z: F.normalize(z, dim=1) @ F.normalize(weight, dim=1).T


def main() -> None:
    from lightly.loss import BarlowTwinsLoss, DCLLoss, DINOLoss, SwaVLoss, VICRegLoss

    vicreg = VICReg(nn.Identity(), feature_dim=WIDTH, settings=VICRegConfig(hidden=2, output=WIDTH))
    twins = BarlowTwins(
        nn.Identity(), feature_dim=WIDTH, settings=BarlowTwinsConfig(hidden=2, output=WIDTH, redundancy=0.005)
    )
    barlow = BarlowTwinsLoss(lambda_param=0.005)
    decoupled = SimCLR(nn.Identity(), feature_dim=WIDTH, settings=SimCLRConfig(output=WIDTH, decoupled=True))
    swav = SwAV(nn.Identity(), feature_dim=WIDTH, settings=SwAVConfig(hidden=2, output=WIDTH, prototypes=20))
    swaps, assign = SwaVLoss(), prototypes(swav)
    # a temperature that float32 has, which is what lightly's is
    sharp = DINOConfig(hidden=2, output=WIDTH, prototypes=20, target_temperature=0.0625)
    dino = DINO(nn.Identity(), feature_dim=WIDTH, settings=sharp)
    dino.target_encoder, dino.target_projector = nn.Flatten(), nn.Identity()
    distill, score = DINOLoss(output_dim=20).double(), prototypes(dino)
    found = {
        "VICReg": (difference(vicreg, VICRegLoss()), EXACT),
        "Barlow Twins": (difference(twins, lambda z, y: 0.1 * barlow(z, y)), EXACT),
        "SimCLR, decoupled": (difference(decoupled, DCLLoss(temperature=0.5)), EXACT),
        "LeJEPA": (lejepa(), EXACT),
        "VISReg": (visreg(), ROUNDED),
        "SwAV": (difference(swav, lambda z, y: swaps([assign(z), assign(y)], [])), EXACT),
        "DINO": (
            difference(
                dino,
                lambda z, y: distill([score(z).detach(), score(y).detach()], [score(z), score(y)], teacher_temp=0.0625),
            ),
            EXACT,
        ),
    }
    for name, (largest, bound) in found.items():
        print(f"{name}: largest relative difference to lightly, loss and gradient, {largest:.1e}")
        if largest > bound:
            raise SystemExit(f"expected at most {bound:.0e}")


if __name__ == "__main__":
    main()
