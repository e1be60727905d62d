"""The callback in a real Lightning trainer."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dssl
from dssl.errors import DsslError

lightning = pytest.importorskip("lightning.pytorch", reason="make test-integrations installs lightning")
from dssl.integrations.lightning import HealthCallback  # noqa: E402  # it imports lightning

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Siamese(lightning.LightningModule):
    """Two noisy views; without the weight of its variance term it collapses."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.projector = nn.Linear(64, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        z1, z2 = (self.projector(self.backbone(batch[0] + 0.5 * torch.randn_like(batch[0]))) for _ in range(2))
        variance = sum(F.relu(1 - z.std(dim=0)).mean() for z in (z1, z2))
        return F.mse_loss(z1, z2) + self.weight * variance

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=2.0, momentum=0.9)


def fit(model: Siamese, callback: HealthCallback, folder: Path, *, steps: int = 150) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=folder,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(512, 32)), batch_size=64, shuffle=True))
    return trainer


def test_a_collapse_is_warned_of_and_a_healthy_run_is_not(tmp_path: Path) -> None:
    for weight, statuses in ((1.0, ("healthy",)), (0.0, ("partial collapse", "collapsed"))):
        torch.manual_seed(0)
        model = Siamese(weight)
        callback = HealthCallback("projector", monitor=dssl.HealthMonitor(patience=100, every=10))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, callback, tmp_path)
        assert callback.monitor.verdict.status in statuses
        assert callback.monitor.verdict.step == 140
        said = [str(one.message) for one in caught if "spread" in str(one.message)]
        assert bool(said) == (weight == 0)
        assert not any(module._forward_hooks for module in model.modules())


def test_its_memory_is_saved_with_the_trainers(tmp_path: Path) -> None:
    first = HealthCallback("projector", monitor=dssl.HealthMonitor(patience=10, every=5))
    trainer = fit(Siamese(1.0), first, tmp_path, steps=21)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"]
    second = HealthCallback("projector", monitor=dssl.HealthMonitor(patience=10, every=5))
    second.load_state_dict(saved[second.state_key])
    assert second.state_dict() == first.state_dict()
    assert second.monitor.verdict.status == "healthy"


def test_an_unknown_projector_is_an_error_that_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(DsslError, match="projector"):
        fit(Siamese(1.0), HealthCallback("projectr"), tmp_path, steps=1)
