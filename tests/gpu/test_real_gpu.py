"""What only a GPU can show (``make test-gpu``); checks that mean something on the CPU run there too, in ``make test``."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dssl import Objective, named_graph
from dssl.config import OptimizerConfig, RunConfig
from dssl.data import open_source
from dssl.data.loader import Batches, DeviceTransfer
from dssl.optim import build_optimizer
from dssl.precision import autocast, choose_precision, loss_scaler
from dssl.recipes import recipe
from dssl.training.prepare import build_method, normalization_of, view_maker
from dssl.training.pretrain import train
from tests.distributed import backward_worker
from tests.distributed.test_torchrun import assert_same_weights, survive, torchrun
from tests.gpu.conftest import Row
from tests.train.running import command, fork, run
from tests.train.test_continue import EVERY_STEP, cut
from tests.train.test_train import TINY

METHODS = ("simsiam", "byol", "simclr")
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
BOTH = pytest.mark.parametrize("device", ["cpu", ON_GPU])


@pytest.fixture(autouse=True)
def device_is_there(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("gpus")


@contextmanager
def host_waits_are_errors(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_device(config: RunConfig, device: torch.device, *, dtype: torch.dtype = torch.float32) -> Objective:
    method = build_method(config)
    assert isinstance(method, nn.Module)
    method.to(device, dtype).to(memory_format=torch.channels_last)
    return Objective(method, named_graph(config.graph))


@BOTH
@pytest.mark.parametrize("optimizer", ["sgd", "lars", "adamw"])
def test_the_host_does_not_wait_in_a_step(device: str, optimizer: str, row: Row) -> None:
    """Steps as ``dssl.loop`` makes them, from the loader's bytes to the moved weights; CUDA itself reports every wait."""
    where = torch.device(device)
    config = replace(TINY, optimizer=OptimizerConfig(name=optimizer, warmup_epochs=1))  # type: ignore[arg-type]
    objective = on_device(config, where)
    built = build_optimizer(objective.method, config.optimizer)  # type: ignore[arg-type]
    precision, _ = choose_precision(
        objective.method.encoder, image_size=config.image_size, channels=3, device=where, measure=lambda *_: (1.0, 1.0)
    )
    scaler = loss_scaler(where, precision)
    asks = precision == "fp16" and optimizer == "lars"  # the scaler asks the device whether to skip the step
    normalization = normalization_of(config, None)
    feed = DeviceTransfer(where, normalization=normalization)
    maker = view_maker(config, objective.graph, None if feed.as_bytes else normalization)
    bad_step = torch.full((), -1, dtype=torch.int64, device=where)
    losses: list[Tensor] = []
    with Batches(
        open_source("shapes:64"), maker, batch_size=16, seed=0, steps=4, threads=1, pinned=feed.as_bytes
    ) as batches:
        for step in range(4):
            batch = batches.at(step)
            # the first steps make state, and cuDNN looks for its algorithms
            with host_waits_are_errors(where) if step >= 2 and not asks else nullcontext():
                views = feed.to_device(batch)
                built.zero_grad(set_to_none=True)
                with autocast(where, precision):
                    report = objective.backward(views, through=objective, scaler=scaler)
                scaler.step(built)
                scaler.update()
                objective.method.after_step(step, 4)
                bad_step = torch.where((bad_step < 0) & ~torch.isfinite(report.total), step, bad_step)
                losses.append(report.total)
    assert int(bad_step) == -1
    assert len({float(loss) for loss in losses}) == 4
    row(f"host waits in a step, {optimizer}, {precision}", "1, allowed" if asks else "0")


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_computes_what_the_cpu_does(method: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of one step in float64 to 1e-9; what fp32 and bf16 are off by goes into the table."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as without --tf32
    config = recipe("cifar10", method=method)
    generator = torch.Generator().manual_seed(0)
    views = {
        view.name: torch.randn(16, 3, 32, 32, generator=generator, dtype=torch.float64)
        for view in named_graph(config.graph).views
    }

    def gradients(where: str, dtype: torch.dtype, half: bool = False) -> Tensor:
        objective = on_device(config, torch.device(where), dtype=dtype)
        with torch.autocast(where, torch.bfloat16, enabled=half):
            objective.backward({name: view.to(where, dtype) for name, view in views.items()})
        return torch.cat([p.grad.double().flatten().cpu() for p in objective.parameters() if p.grad is not None])

    expected = gradients("cpu", torch.float64)
    off = {
        "fp64": gradients("cuda", torch.float64),
        "fp32": gradients("cuda", torch.float32),
        "bf16": gradients("cuda", torch.float32, half=True),
    }
    errors = {name: float((found - expected).norm() / expected.norm()) for name, found in off.items()}
    row(f"{method}: gradient, relative error", ", ".join(f"{name} {value:.0e}" for name, value in errors.items()))
    assert errors["fp64"] < 1e-9
    assert errors["fp32"] < 0.05  # 4e-3 on a CPU: 16 images of noise and BatchNorm carry the rounding far


@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_view_by_view_equals_the_whole(device: str, method: str) -> None:
    config = replace(TINY, method=recipe("shapes", method=method).method)
    objective = on_device(config, torch.device(device), dtype=torch.float64)
    other = copy.deepcopy(objective)
    generator = torch.Generator().manual_seed(0)
    views = {
        view.name: torch.randn(8, 3, config.image_size, config.image_size, generator=generator, dtype=torch.float64).to(
            device
        )
        for view in objective.graph.views
    }
    objective.backward(views)
    other(views).total.backward()
    for (name, ours), theirs in zip(objective.named_parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10, msg=name)


@BOTH
def test_adamw_resumes(device: str, tmp_path: Path, row: Row) -> None:
    """A run cut at its second step ends as the whole one; CUDA adds in no fixed order, so float64 to 1e-8."""
    config = replace(
        TINY, device=device, precision="fp64", epochs=1, knn_every=0, checkpoint=EVERY_STEP,
        optimizer=OptimizerConfig(name="adamw", rate=1e-3, warmup_epochs=1),
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(config, whole)
    cut(whole, broken, step=2)
    train(config, broken)
    assert_same_weights(whole, broken, tolerance=1e-8)
    row("AdamW resumes", "equal to 1e-8 in fp64")


COUNTED = {"simsiam": {256: 21.5, 64: 5.7}, "byol": {256: 11.3, 64: 3.3}, "simclr": {256: 21.4, 64: 5.5}}
"""GiB of a step by images, counted on fake CUDA (docs/howto/gpu.md)."""


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_what_was_counted(method: str, row: Row) -> None:
    """ResNet-50 at 224 px, as many images as fit: the peak that torch allocated, against the count and a tenth on top of it."""
    where = torch.device("cuda")
    memory = torch.cuda.mem_get_info()[0] / 2**30
    images, counted = next(((n, gib) for n, gib in COUNTED[method].items() if 1.1 * gib < memory), (0, 0.0))
    if not images:
        pytest.skip(f"needs {COUNTED[method][64]} GiB and a tenth, {memory:.1f} are free")
    config = recipe("imagenet", method=method, batch_size=images)
    precision, _ = choose_precision(nn.Identity(), image_size=224, channels=3, device=where)
    objective = on_device(config, where)
    built = build_optimizer(objective.method, config.optimizer)  # type: ignore[arg-type]
    scaler = loss_scaler(where, precision)
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    views = {
        view.name: torch.randn(images, 3, 224, 224, device=where, dtype=half).to(memory_format=torch.channels_last)
        for view in objective.graph.views
    }
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        built.zero_grad(set_to_none=True)
        with autocast(where, precision):
            objective.backward(views, scaler=scaler)
        scaler.step(built)
        scaler.update()
    peak = torch.cuda.max_memory_allocated() / 2**30
    row(f"{method}: peak of a step, R50, {images} images", f"{peak:.2f} GiB, counted {counted:.1f} GiB")
    assert peak <= 1.1 * counted


@pytest.mark.gpu
def test_batchnorm_across_gpus_is_that_of_the_global_batch(gpus: int, tmp_path: Path, row: Row) -> None:
    two(gpus)
    ranks = [fork(backward_worker.on_gpus, rank, str(tmp_path), log=tmp_path / f"{rank}.log") for rank in range(2)]
    for child in ranks:
        assert child.wait() == 0, child.said()
    row("BatchNorm across 2 GPUs = 1 GPU", "equal to 1e-9 in fp64")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), ON_GPU])
def test_two_processes_give_the_weights_of_one(
    device: str, request: pytest.FixtureRequest, tmp_path: Path, row: Row
) -> None:
    """The whole program with torchrun, then once more with a killed process that torchrun starts again."""
    if device == "cuda":
        two(request.getfixturevalue("gpus"))
    extra = ("--precision", "fp64", "--epochs", "2", "--device", device)
    alone = run(command("byol", tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    together = run(torchrun(command("byol", tmp_path / "two", *extra)))
    assert together.returncode == alone.returncode, together.stderr
    assert survive(tmp_path / "killed", *extra) == alone.returncode
    for other in ("two", "killed"):
        assert_same_weights(tmp_path / "one", tmp_path / other, tolerance=1e-8)
    row("2 processes = 1, also after a killed one", "equal to 1e-8 in fp64")


def two(gpus: int) -> None:
    if gpus < 2:
        pytest.skip(f"needs 2 GPUs, {gpus} was found")
