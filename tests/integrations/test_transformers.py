"""The callback in a real Trainer of Hugging Face."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dssl

transformers = pytest.importorskip("transformers", reason="make test-integrations installs transformers")
pytest.importorskip("accelerate", reason="make test-integrations installs accelerate")
from dssl.integrations.transformers import HealthCallback  # noqa: E402  # it imports transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Siamese(nn.Module):
    """Two noisy views; without the weight of its variance term it collapses."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.projector = nn.Linear(64, 32)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        z1, z2 = (self.projector(self.backbone(images + 0.5 * torch.randn_like(images))) for _ in range(2))
        variance = sum(F.relu(1 - z.std(dim=0)).mean() for z in (z1, z2))
        return {"loss": F.mse_loss(z1, z2) + self.weight * variance}


@pytest.mark.parametrize(("weight", "statuses"), [(1.0, ("healthy",)), (0.0, ("partial collapse", "collapsed"))])
def test_a_collapse_is_warned_of_and_a_healthy_run_is_not(tmp_path: Path, weight: float, statuses: tuple[str]) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, max_steps=150, per_device_train_batch_size=64, learning_rate=2.0, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=0, optim="sgd",
        optim_args="momentum=0.9", max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    callback = HealthCallback("projector", monitor=dssl.HealthMonitor(patience=100, every=10))
    trainer = transformers.Trainer(
        model=Siamese(weight), args=arguments, callbacks=[callback],
        train_dataset=[{"images": row} for row in torch.randn(512, 32)],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert callback.monitor.verdict.status in statuses
    assert callback.monitor.verdict.step == 140
    assert bool([one for one in caught if "spread" in str(one.message)]) == (weight == 0)
