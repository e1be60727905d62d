"""torch.compile takes the whole objective."""

import shutil

import pytest
import torch
from torch import nn

from dssl import Objective, SimSiam, SimSiamConfig, named_graph

_COMPILER = shutil.which("g++") or shutil.which("clang++")
INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler")]


# torch's compiler itself looks at the gradient of what a part is given, and torch warns of that
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # not on 3.13.1 and later
@pytest.mark.parametrize(
    ("by_view", "backend"),
    [
        (True, "aot_eager"),  # what is traced and differentiated is the same, without half a minute of C++
        pytest.param(True, "inductor", marks=INDUCTOR),
        pytest.param(False, "inductor", marks=INDUCTOR),
    ],
)
def test_compiled_objective_equals_eager(by_view: bool, backend: str) -> None:
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
            part.compile(fullgraph=True, backend=backend)
        compiled = objective.backward(views)
    else:
        compiled = torch.compile(objective, fullgraph=True, backend=backend)(views)
        compiled.total.backward()
    torch.testing.assert_close(compiled.total, eager.total, rtol=1e-10, atol=1e-12)
    for ours, reference in zip(objective.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, reference, rtol=1e-8, atol=1e-10)
