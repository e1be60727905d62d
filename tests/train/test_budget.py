"""A run that fits the minutes it is given: what is chosen, what is not, what is said, and that it is chosen once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dssl.cli import main
from dssl.config import RunConfig
from dssl.data import Source, open_source
from dssl.recipes import recipe
from dssl.training.budget import ON_CPUS, Planner, Throughput
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.rejecting import rejects
from tests.train.test_resume import draw

CPU, GPU = torch.device("cpu"), torch.device("meta")


def planner(
    rates: dict[tuple[str, int], float], *, recipe: str = "folder", typed: frozenset[str] = frozenset()
) -> Planner:
    """One that finds these speeds, by encoder and image size; with one thread a tenth more, with all of them less."""

    def measure(config: RunConfig, source: Source, device: torch.device) -> Throughput:
        rate = rates[config.encoder, config.image_size]
        return Throughput(
            steps=0.9 * rate, on_one_thread=1.1 * rate, loader=1e9, threads=2 if device.type == "cpu" else None,
            checkpoint_bytes=0, precision="bf16", why="measured",
        )  # fmt: skip

    return Planner(recipe=recipe, typed=typed, measure=measure)


SIZES = [size for _, size, _ in ON_CPUS]
NEEDS = [images / 540 for *_, images in ON_CPUS]  # a second, in nine of ten minutes


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ((1.0, 1.0, 1.0), SIZES[0]),  # few, but there is nothing faster
        ((1.9 * NEEDS[1], 9e9, 9e9), SIZES[0]),  # the next one is not even measured
        ((9e9, 0.9 * NEEDS[1], 9e9), SIZES[0]),
        ((9e9, 1.1 * NEEDS[1], 9e9), SIZES[1]),
        ((9e9, 9e9, 0.9 * NEEDS[2]), SIZES[1]),
        ((9e9, 9e9, 1.1 * NEEDS[2]), SIZES[2]),
    ],
)
def test_on_a_cpu_the_largest_images_of_which_a_run_sees_enough(rates: tuple[float, ...], size: int) -> None:
    config = recipe("folder", data="shapes:500", minutes=10.0)
    found = {(encoder, size): rate / 1.1 for (encoder, size, _), rate in zip(ON_CPUS, rates, strict=True)}
    config, screen = planner(found).plan(config, open_source("shapes:500"), CPU)
    assert (config.encoder, config.image_size) == ("whitened-quadrants", size)
    assert (config.torch_threads, config.precision) == (1, "bf16")
    assert any(config.encoder in line and f"{size} px" in line for line in screen)


def test_the_epochs_fit_the_minutes_with_everything_that_is_measured() -> None:
    source = open_source("shapes:2000")
    for minutes in (2.0, 10.0, 60.0):
        config = recipe("folder", data="shapes:2000", minutes=minutes)
        rates = dict.fromkeys([(encoder, size) for encoder, size, _ in ON_CPUS], 150.0)
        config, _ = planner(rates).plan(config, source, CPU)
        seconds = planner(rates).measure(config, source, CPU).seconds(config, source)
        assert 0.7 * 60 * minutes < seconds <= 60 * minutes
        assert config.epochs <= 13 * config.knn_every
        assert config.optimizer.warmup_epochs == pytest.approx(
            min(10, config.epochs / 20), abs=1e-3
        )  # as in the recipe
        config.__post_init__()


def test_what_was_typed_is_not_chosen() -> None:
    typed = frozenset({"encoder", "image_size", "batch_size", "knn_every", "torch_threads", "optimizer.warmup_epochs"})
    config = recipe("folder", data="shapes:500", minutes=10.0, encoder="small", image_size=48, knn_every=3)
    chosen, _ = planner({("small", 48): 100.0}, typed=typed).plan(config, open_source("shapes:500"), CPU)
    same = {"epochs", "precision"}
    assert {name for name, value in vars(config).items() if vars(chosen)[name] != value} == same


def test_a_gpu_keeps_the_encoder_and_recommends_nothing_for_many_images() -> None:
    config = recipe("folder", data="shapes:8000", minutes=10.0)
    made = planner({("resnet18", 128): 3000.0})
    chosen, screen = made.plan(config, open_source("shapes:8000"), GPU)
    assert (chosen.encoder, chosen.image_size, chosen.batch_size) == ("resnet18", 128, 128)
    assert not any("dssl train adapt" in line for line in screen)
    _, screen = made.plan(config, open_source("shapes:900"), GPU)
    assert any("dssl train adapt --data shapes:8000" in line for line in screen)


def test_without_minutes_the_defaults_are_kept_and_timed() -> None:
    config = recipe("folder", data="shapes:500")
    chosen, screen = planner({("resnet18", 128): 50.0}).plan(config, open_source("shapes:500"), CPU)
    assert replace(chosen, torch_threads=None, precision="auto") == config
    # 384 of 500 images in whole batches, at 55 a second: 1,396 s; 42 measurements of 1,125 images, which take 12 x 55: 72 s
    assert any("200 epochs, about 25 minutes" in line for line in screen)
    assert sum("dssl train" in line for line in screen) == 2


def test_a_run_of_days_says_so_before_it_starts() -> None:
    """50,000 images of 32 px in batches of 512, 800 times at 110 a second: 4.2 days."""
    source = open_source("shapes:50000")
    config = recipe("cifar10", data="shapes:50000", knn_every=0)
    slow = planner({("resnet18-cifar", 32): 100.0}, recipe="cifar10")
    (line,) = slow.warning(config, source, CPU)
    assert "4.2 days" in line
    assert "--hours" in line
    assert slow.warning(replace(config, minutes=60.0), source, CPU) == []
    assert planner({("resnet18-cifar", 32): 1e5}).warning(config, source, CPU) == []
    assert planner({}).warning(recipe("shapes", data="shapes:500"), open_source("shapes:500"), CPU) == []  # unmeasured
    _, screen = planner({("resnet18", 128): 1.0}).plan(recipe("folder", data="shapes:900"), source, CPU)
    assert any(line.startswith("warning") for line in screen)


@pytest.mark.parametrize("minutes", [None, 5.0])
def test_too_few_images_for_a_batch_are_an_error_before_anything_is_measured(minutes: float | None) -> None:
    config = recipe("folder", data="shapes:40", minutes=minutes)
    with rejects("batch_size", 64 if minutes else config.batch_size, 40):
        planner({}).plan(config, open_source("shapes:40"), CPU)


def words(images: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "folder", "--data", str(images), "--out", str(out), "--encoder", "whitened", "--image-size", "16",
        "--batch-size", "8", "--threads", "1", *more,
    ]  # fmt: skip


def kept(out: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((out / "config.json").read_text())
    return plain


def test_the_same_command_resumes_a_run_that_was_fitted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images, out = draw(tmp_path / "images", 40), tmp_path / "run"
    assert main(words(images, out, "--minutes", "0.01")) == 0  # less than an epoch takes: one is made
    config = kept(out)["config"]
    assert (config["epochs"], config["minutes"], config["torch_threads"]) == (1, 0.01, torch.get_num_threads())
    assert kept(out)["recipe"] == "folder"
    assert config["precision"] == kept(out)["precision"]
    steps = checkpoint.steps_in(out / "checkpoints")
    caplog.clear()
    assert main(words(images, out, "--hours", "2")) == 0
    assert "finished: 5 steps" in caplog.text
    assert kept(out)["config"] == config
    assert checkpoint.steps_in(out / "checkpoints") == steps


def test_minutes_from_python(tmp_path: Path) -> None:
    config = recipe(
        "shapes", data="shapes:64", image_size=16, encoder="whitened", batch_size=16, minutes=0.01, threads=1
    )
    assert train(config, tmp_path / "run").step == 4
    assert train(config, tmp_path / "run").step == 4  # not fitted again
    assert kept(tmp_path / "run")["config"]["epochs"] == 1
    assert "recipe" not in kept(tmp_path / "run")


def test_minutes_and_epochs_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, tmp_path / "run", "--minutes", "5", "--epochs", "3")) == 2
    assert main(words(tmp_path, tmp_path / "run", "--hours", "two")) == 2
    said = capsys.readouterr().err.splitlines()
    assert ["--epochs" in said[0], "--hours is 'two'" in said[1], len(said)] == [True, True, 2]
