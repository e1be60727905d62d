"""A small run that starts from weights, for the tests of adaptation and of its start."""

from pathlib import Path
from typing import Any

import torch

from dssl.config import AdaptConfig, CheckpointConfig, RunConfig
from dssl.models import build_encoder
from dssl.recipes import recipe

HEADS, EPOCHS, STEPS = 1, 3, 4


def write_weights(path: Path) -> Path:
    torch.manual_seed(5)
    encoder = build_encoder("small", image_size=16)
    with torch.no_grad():
        for _ in range(20):
            encoder(torch.randn(64, 3, 16, 16))
    torch.save(encoder.state_dict(), path)
    return path


def config(weights: Path, **changes: Any) -> RunConfig:
    adapt = AdaptConfig(head_epochs=HEADS, evaluation_size=18, **changes.pop("adapt", {}))
    settings = {
        "data": "shapes:64", "encoder": "small", "init": weights, "image_size": 16, "batch_size": 16, "epochs": EPOCHS,
        "standard": "crop(0.3,1) > flip", "threads": 1, "knn_every": 0, "adapt": adapt,
        "checkpoint": CheckpointConfig(every_minutes=1e-9, keep=100), **changes,
    }  # fmt: skip
    return recipe("adapt", **settings)
