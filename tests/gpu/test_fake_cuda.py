"""A step on fake CUDA: where tensors live, how much memory it takes, how often the host waits, what ranks exchange."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
METHODS = ("simsiam", "byol", "simclr")
MIB = 2**20
IMAGES = 512
RESNET = {"encoder": "resnet50", "size": 224, "images": IMAGES}


def _optimised(method: str, optimizer: str, precision: str) -> dict[str, dict[str, Any]]:
    settings = {"method_name": method, "optimizer": optimizer, "precision": precision}
    return {f"{method} {optimizer} {precision}": settings}


OPTIMISED = (("lars", "bf16"), ("adamw", "bf16"), ("sgd", "fp32"), ("adamw", "fp16"), ("lars", "fp16"))
# every method with every kind of graph; every optimiser, precision and way of training with one of them
TABLE: dict[str, dict[str, Any]] = {
    **{
        f"{method} {graph}": {"method_name": method, "graph": graph}
        for method in METHODS
        for graph in ("standard", "standard2", "heavy", "dssl", "ablation-f", "ablation-g", "ablation-h")
    },
    **{name: row for pair in OPTIMISED for name, row in _optimised("simsiam", *pair).items()},
    **_optimised("byol", "lars", "bf16"),
    **_optimised("simclr", "lars", "bf16"),
    "clipped": {"method_name": "simsiam", "clip": True},
    "whole": {"method_name": "simsiam", "whole": True},
    "simsiam small": {"method_name": "simsiam", "encoder": "small", "images": 8 * IMAGES},
    "simsiam small whole": {"method_name": "simsiam", "encoder": "small", "images": 8 * IMAGES, "whole": True},
    "simsiam R50": {"method_name": "simsiam", **RESNET},
    "byol R50": {"method_name": "byol", **RESNET},
    "simsiam R50 checkpointed": {"method_name": "simsiam", "checkpointed": True, **RESNET},
    **{f"{method} of 8": {"method_name": method, "ranks": 8} for method in METHODS},
}
# the rest of the pairs, and the memory that follows from the rows above
SLOW: dict[str, dict[str, Any]] = {
    **{
        name: row
        for method in ("byol", "simclr")
        for pair in OPTIMISED[1:]
        for name, row in _optimised(method, *pair).items()
    },
    "simclr R50": {"method_name": "simclr", **RESNET},
    "simsiam R50 whole": {"method_name": "simsiam", "whole": True, **RESNET},
}
ROWS = [*TABLE, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)]


@pytest.fixture(scope="session")
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All rows in one process that has the stubs preloaded; the slow ones only where a slow test runs."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        pytest.skip("fake CUDA needs gcc and Linux")
    if torch.version.cuda is None:
        pytest.skip("fake CUDA needs a CUDA build of torch")
    if torch.__version__.startswith("2.9."):
        pytest.skip("FakeTensorMode of torch 2.9 has no all_gather")
    table = TABLE | (SLOW if any(item.get_closest_marker("slow") for item in request.session.items) else {})
    folder = tmp_path_factory.mktemp("stub")
    options = ["-shared", "-fPIC", "-O1", f"-DCUDA_MAJOR={torch.version.cuda.split('.')[0]}"]
    for source, library in (("cuda_stub.c", "cuda_stub.so"), ("driver_stub.c", "libcuda.so.1")):
        subprocess.run([compiler, *options, "-o", str(folder / library), str(HERE / source)], check=True, timeout=60)
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fake_cuda", json.dumps(list(table.values()))],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parents[1],
        env=os.environ | {"LD_PRELOAD": str(folder / "cuda_stub.so"), "LD_LIBRARY_PATH": str(folder)},
    )
    assert found.returncode == 0, found.stderr[-5000:]
    return dict(zip(table, json.loads(found.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_state_stays_on_the_device_and_the_host_does_not_wait(counted: dict[str, dict[str, Any]], row: str) -> None:
    assert counted[row]["elsewhere"] == []
    # in fp16 the scaler asks whether LARS should skip the step; the fused optimisers see it on the device
    assert counted[row]["waits"] == ({"item": 1} if "lars fp16" in row else {})


@pytest.mark.parametrize(
    ("method", "budget"), [("simsiam", 86), pytest.param("simclr", 86, marks=pytest.mark.slow), ("byol", 50)]
)
def test_memory_of_a_step(counted: dict[str, dict[str, Any]], method: str, budget: float) -> None:
    """MiB for each of 512 images at 224 px in bf16, ResNet-50 and DSSL: weights, optimiser and views included."""
    assert counted[f"{method} R50"]["peak"] / MIB / IMAGES <= budget


def test_memory_with_checkpointed_activations(counted: dict[str, dict[str, Any]]) -> None:
    assert counted["simsiam R50 checkpointed"]["peak"] < 0.5 * counted["simsiam R50"]["peak"]


@pytest.mark.parametrize("row", ["simsiam small", pytest.param("simsiam R50", marks=pytest.mark.slow)])
def test_memory_view_by_view(counted: dict[str, dict[str, Any]], row: str) -> None:
    assert counted[row]["peak"] < 0.55 * counted[f"{row} whole"]["peak"]


@pytest.mark.parametrize(("method", "gathers"), [("simsiam", 0), ("byol", 0), ("simclr", 2 * 4)])
def test_collectives_of_a_step(counted: dict[str, dict[str, Any]], method: str, gathers: int) -> None:
    """Two edges of SimCLR gather both ends, with gradient; DDP's exchange and that of BatchNorm come on top."""
    assert sum(counted[f"{method} of 8"]["collectives"].values()) == gathers
