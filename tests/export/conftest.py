"""A small trained-looking encoder and checkpoints of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dssl.config import RunConfig
from dssl.config_io import to_dict
from dssl.models import build_encoder
from dssl.weights import checkpoint


def _shaken(encoder: nn.Module, seed: int = 0) -> nn.Module:
    """The encoder with other running statistics than a new one has, so that a tensor that is not loaded shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in encoder.state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator)
            if name.endswith("running_var"):
                value.copy_(0.5 + noise)
            else:
                value.add_(0.02 * (noise - 0.5))
        else:
            value.fill_(7)
    return encoder.eval()


def _header(**config: Any) -> dict[str, Any]:
    return {
        "dssl_version": "0",
        "step": 12,
        "steps_per_epoch": 4,
        "epoch": 3.0,
        "config": to_dict(RunConfig(**config)),
        "normalization": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]},
        "fingerprint": "abc",
        "health": {},
        "verdict": "healthy",
    }


def _write_checkpoint(path: Path, model: nn.Module, **config: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"method.encoder.{name}": value for name, value in model.state_dict().items()}
    twin = {f"method.target_encoder.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    tensors |= twin | {"optimizer.encoder.stem.0.weight.momentum_buffer": torch.ones(3)}
    checkpoint.write(path, _header(**config), tensors)
    return path


@pytest.fixture(scope="session")
def shaken() -> Callable[..., nn.Module]:
    return _shaken


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    return _write_checkpoint


@pytest.fixture
def small() -> nn.Module:
    return _shaken(build_encoder("small", image_size=32))


@pytest.fixture
def small_checkpoint(tmp_path: Path, small: nn.Module) -> Path:
    return _write_checkpoint(tmp_path / "run" / "checkpoints" / "step-000000012.safetensors", small, encoder="small")
