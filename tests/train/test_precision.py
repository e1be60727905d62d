"""The precision is chosen by steps of the encoder that will be trained; fp16 trains with a scaled loss, which is saved."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dssl import precision
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.precision import autocast, choose_precision, encoder_seconds, half_type, loss_scaler
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.rejecting import states
from tests.train.test_train import TINY, replace

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("full", "half", "choice"), [(0.27, 0.35, "fp32"), (0.35, 0.27, "bf16"), (0.100, 0.095, "fp32")]
)
def test_bf16_must_be_a_tenth_faster(full: float, half: float, choice: str) -> None:
    options = {"image_size": 128, "channels": 3, "device": CPU}
    precise, why = choose_precision(nn.Identity(), **options, measure=lambda *_: (full, half))
    assert precise == choice
    assert f"8 images of 128 px took {1000 * half:.0f} ms in bf16, {1000 * full:.0f} ms in fp32" in why


@pytest.mark.parametrize(("size", "count"), [(8, 16), (32, 16), (128, 8), (224, 2), (1024, 2)])
def test_it_sees_few_images_of_the_real_size(size: int, count: int) -> None:
    seen: list[tuple[int, ...]] = []

    def measure(encoder: nn.Module, images: Tensor) -> tuple[float, float]:
        seen.append(tuple(images.shape))
        return 1.0, 1.0

    choose_precision(nn.Identity(), image_size=size, channels=1, device=CPU, measure=measure)
    assert seen == [(count, 1, size, size)]


class Slow(nn.Module):
    """An encoder whose steps take as long as it says, by a clock that it turns itself."""

    now = 0.0
    steps = 0

    def __init__(self, *, full: float, half: float, first: float = 0.0) -> None:
        super().__init__()
        self.full, self.half, self.first = full, half, first
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        Slow.now += self.half if torch.is_autocast_enabled("cpu") else self.full
        Slow.now += self.first if Slow.steps < 2 else 0.0
        Slow.steps += 1
        return self.norm(images).mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("encoder", "expected", "steps"),
    [
        (Slow(full=0.01, half=0.02), (0.01, 0.02), 10),
        (Slow(full=0.01, half=0.02, first=0.4), (0.01, 0.02), 10),  # the first turn does not count
        (Slow(full=0.2, half=0.5), (0.2, 0.5), 4),  # a third turn would begin after more than a second
        (Slow(full=3.0, half=30.0), (3.0, 30.0), 2),
    ],
)
def test_turns_are_bounded_in_number_and_time(encoder: Slow, expected: tuple[float, float], steps: int) -> None:
    Slow.now, Slow.steps = 0.0, 0
    before = copy.deepcopy(encoder.state_dict())
    encoder.eval()
    threads = torch.get_num_threads()
    found = encoder_seconds(encoder, torch.rand(2, 3, 4, 4), clock=lambda: Slow.now)
    assert found == pytest.approx(expected)
    assert Slow.steps == steps
    # the measured encoder is a copy: nothing of the original has moved
    assert not encoder.training
    assert encoder.norm.weight.grad is None
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert torch.get_num_threads() == threads


def test_a_run_measures_its_own_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, int]] = []

    def measure(encoder: nn.Module, images: Tensor) -> tuple[float, float]:
        seen.append((type(encoder).__name__, images.shape[-1]))
        return 0.027, 0.035

    monkeypatch.setattr(precision, "encoder_seconds", measure)
    config = replace(TINY, encoder="mobilenet_v3_small", image_size=16, precision="auto", epochs=1, knn_every=0)
    with caplog.at_level(logging.INFO, logger="dssl"):
        train(config, tmp_path / "run")
        train(config, tmp_path / "run")  # a resumed run keeps what it started with
    assert seen == [("MobileNetV3", 16)]
    states(caplog.text, "16 images", "16 px", "35 ms in bf16", "27 ms in fp32")
    assert "fp32, as the run started" in caplog.text


def test_fp16_trains_and_saves_its_scale(tmp_path: Path) -> None:
    config = replace(
        TINY, data="shapes:32", encoder="small", precision="fp16", epochs=1, knn_every=0, checkpoint_activations=True
    )
    result = train(config, tmp_path / "run")
    assert result.verdict.status != "diverged"
    saved = checkpoint.read(result.checkpoint)  # type: ignore[arg-type]
    assert saved.header["scaler"]["_growth_tracker"] == result.step  # no step overflowed
    assert saved.header["scaler"]["scale"] >= 1
    assert train(config, tmp_path / "run").step == result.step  # reads it back


def test_only_fp16_scales() -> None:
    for name in ("bf16", "fp32", "fp64"):
        assert not loss_scaler(CPU, name).is_enabled()  # type: ignore[arg-type]
    assert loss_scaler(CPU, "fp16").is_enabled()
    assert (half_type("fp16"), half_type("bf16"), half_type("fp32")) == (torch.float16, torch.bfloat16, None)
    with autocast(CPU, "fp16"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_compile_and_checkpointing_are_refused_together() -> None:
    with pytest.raises(DsslError, match=r"compile.*checkpoint_activations"):
        RunConfig(compile=True, checkpoint_activations=True)
