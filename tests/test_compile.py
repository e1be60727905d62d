"""torch.compile takes the whole objective, where a compiler is present."""

import shutil

import pytest
import torch
from torch import nn

from dssl import Objective, SimSiam, SimSiamConfig, named_graph


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
# torch's compiler itself looks at the gradient of what a part is given, and torch warns of that
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("by_view", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_objective_equals_eager(by_view: bool) -> None:
    """As a whole with one backward; or part by part, as `dssl train --compile` does, with a backward for each view."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    objective = Objective(
        SimSiam(encoder, feature_dim=4, settings=SimSiamConfig(hidden=8, output=8, bottleneck=4)), named_graph("dssl")
    )
    objective.double()
    views = {name: torch.randn(4, 3, 8, 8, dtype=torch.float64) for name in ("s1", "s2", "h1", "h2")}
    eager = objective(views)
    eager.total.backward()
    expected = [parameter.grad.clone() for parameter in objective.parameters() if parameter.grad is not None]
    objective.zero_grad(set_to_none=True)
    if by_view:
        for part in objective.method.children():
            part.compile(fullgraph=True)
        compiled = objective.backward(views)
    else:
        compiled = torch.compile(objective, fullgraph=True)(views)
        compiled.total.backward()
    torch.testing.assert_close(compiled.total, eager.total, rtol=1e-10, atol=1e-12)
    for ours, reference in zip(objective.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, reference, rtol=1e-8, atol=1e-10)
