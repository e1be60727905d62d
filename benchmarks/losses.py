"""VICReg's and Barlow Twins' losses beside lightly's classes, in float64: the largest relative difference, loss and gradient.

benchmarks/.venv/bin/python -m benchmarks.losses        (after make bench-setup)
"""

import torch
from torch import Tensor, nn

from dssl import BarlowTwins, BarlowTwinsConfig, Objective, VICReg, VICRegConfig, ViewGraph


def difference(method: nn.Module, theirs: nn.Module, *, scale: float) -> float:
    """On one standard pair, whose embeddings are handed in as pixels."""
    method.encoder, method.projector = nn.Flatten(), nn.Identity()
    generator = torch.Generator().manual_seed(0)
    pair = [0.6 * torch.randn(64, 32, dtype=torch.float64, generator=generator) + 0.3 for _ in range(2)]
    objective = Objective(method, ViewGraph.parse("s1<->s2"))  # type: ignore[arg-type]  # a method is a module, too
    results: list[list[Tensor]] = []
    for ours in (True, False):
        z, y = (one.clone().requires_grad_() for one in pair)
        loss = objective({"s1": z, "s2": y}).total if ours else scale * theirs(z, y)
        loss.backward()
        assert z.grad is not None
        assert y.grad is not None
        results.append([loss.detach(), z.grad, y.grad])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


def main() -> None:
    from lightly.loss import BarlowTwinsLoss, VICRegLoss

    found = {
        "VICReg": difference(
            VICReg(nn.Identity(), feature_dim=32, settings=VICRegConfig(hidden=2, output=32)), VICRegLoss(), scale=1.0
        ),
        "Barlow Twins": difference(
            BarlowTwins(
                nn.Identity(), feature_dim=32, settings=BarlowTwinsConfig(hidden=2, output=32, redundancy=0.005)
            ),
            BarlowTwinsLoss(lambda_param=0.005),
            scale=0.1,
        ),
    }
    for name, largest in found.items():
        print(f"{name}: largest relative difference to lightly, loss and gradient, {largest:.1e}")
    if max(found.values()) > 1e-12:
        raise SystemExit("expected at most 1e-12")


if __name__ == "__main__":
    main()
