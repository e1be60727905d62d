"""fp16 with a scaled loss: it trains, its scale is saved with the run, and views are placed in the run's arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.precision import autocast, half_type, loss_scaler
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.train.test_train import TINY


def test_fp16_trains_and_saves_its_scale(tmp_path: Path) -> None:
    config = replace(
        TINY, data="shapes:32", encoder="small", precision="fp16", epochs=1, knn_every=0,
        checkpoint_activations=True,
    )  # fmt: skip
    result = train(config, tmp_path / "run")
    assert result.verdict.status != "diverged"
    saved = checkpoint.read(result.checkpoint)  # type: ignore[arg-type]
    assert saved.header["scaler"]["_growth_tracker"] == result.step  # no step overflowed
    assert saved.header["scaler"]["scale"] >= 1
    assert train(config, tmp_path / "run").step == result.step  # reads it back


def test_only_fp16_scales() -> None:
    cpu = torch.device("cpu")
    for precision in ("bf16", "fp32", "fp64"):
        assert not loss_scaler(cpu, precision).is_enabled()  # type: ignore[arg-type]
    assert loss_scaler(cpu, "fp16").is_enabled()
    assert (half_type("fp16"), half_type("bf16"), half_type("fp32")) == (torch.float16, torch.bfloat16, None)
    with autocast(cpu, "fp16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_compile_and_checkpointing_are_refused_together() -> None:
    with pytest.raises(DsslError, match="compile and checkpoint_activations are both on"):
        RunConfig(compile=True, checkpoint_activations=True)
