"""``dssl doctor``: real steps on this machine, and warnings where the measured rates ask for them."""

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from PIL import Image

from dssl.commands import doctor
from dssl.commands.doctor import Arguments, run
from dssl.data import open_source
from dssl.recipes import recipe
from dssl.training import budget
from dssl.training.budget import Throughput, drawn_images, loader_rate
from tests.rejecting import rejects, states


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Rates as another machine might have them: a busy or a GPU machine cannot be had here."""

    def put(**rates: float | None) -> None:
        usual = {"steps": 100.0, "on_one_thread": 60.0, "loader": 1e6}
        rest = {"threads": 2, "checkpoint_bytes": 10**7, "precision": "fp32", "why": "fp32: as measured"}
        throughput = Throughput(**usual | rates | rest)
        monkeypatch.setattr(budget, "measured", lambda *_, **__: throughput)

    return put


def test_it_takes_real_steps_and_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        source, cpu = open_source("shapes:8"), torch.device("cpu")
        speed = budget.measured(recipe("shapes", batch_size=4), source, cpu, seconds=0.01)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        chosen = recipe("shapes", precision="fp32", batch_size=4)  # there is nothing to measure a second time
        alone = budget.measured(chosen, source, cpu, seconds=0.01)
    finally:
        torch.set_num_threads(before)
    assert min(speed.steps, speed.loader) > 0
    assert speed.on_one_thread is not None
    assert speed.on_one_thread > 0
    assert alone.on_one_thread is None
    states(speed.why, speed.precision, "16 images", "32 px")
    assert 10**6 < speed.checkpoint_bytes < 10**8


def test_the_duration_is_images_times_epochs_by_the_rate(measured, tmp_path: Path, capsys) -> None:
    measured(steps=100.0)
    assert run(Arguments(images=6_000, out=tmp_path / "not" / "there")) == 0
    said = capsys.readouterr().out
    epochs = recipe("shapes").epochs
    assert f"{epochs} epochs of 6,000 images: about {epochs} minutes" in said
    assert "10 MB each" in said
    assert "precision    fp32: as measured" in said
    assert re.search(rf"GB free at {re.escape(str(tmp_path))}\b", said)
    assert "warning" not in said


def test_threads_that_are_in_each_others_way(measured, capsys) -> None:
    measured(steps=20.0, on_one_thread=90.0)
    run(Arguments())
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    states(warnings[0], "one torch thread", 90)
    assert "OMP_NUM_THREADS=1" in warnings[0]


def test_a_loader_that_is_too_slow(measured, capsys) -> None:
    measured(steps=1000.0, on_one_thread=None, loader=100.0)
    run(Arguments(images=6_000, epochs=1))
    said = capsys.readouterr().out
    warnings = [line for line in said.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "100 images a second" in warnings[0]
    assert "1 epochs of 6,000 images: about 60 seconds" in said  # by the slower of the two


def test_the_users_own_images_size_and_epochs(measured, tmp_path: Path, capsys) -> None:
    """The loader reads them, and the duration is that of as many images."""
    for index in range(6):
        Image.new("RGB", (40, 40), (40 * index, 0, 0)).save(tmp_path / f"{index}.png")
    measured(steps=0.1)
    assert run(Arguments(recipe="folder", data=str(tmp_path), image_size=48, epochs=3)) == 0
    said = capsys.readouterr().out
    assert f"from {tmp_path}" in said
    assert "views of 48 px" in said
    assert "3 epochs of 6 images: about 3 minutes" in said


@pytest.mark.parametrize("size", [32, 72])
def test_the_loader_gives_real_batches(size: int, tmp_path: Path) -> None:
    """From JPEG files where views are large; the clock is ours, and strikes a second whenever it is asked."""
    ticks = iter(range(100))
    config = recipe("folder", image_size=size, batch_size=8, graph="standard", threads=1)
    data, _ = drawn_images(size, tmp_path)
    assert len(list(tmp_path.glob("*.jpg"))) == (64 if size > 64 else 0)
    # started at 0; asked after two batches (1), after a third (2), and for the end (3)
    assert loader_rate(config, open_source(data), seconds=1.5, clock=lambda: float(next(ticks))) == 3 * 8 / 3


def test_an_unknown_recipe_is_refused_in_one_line() -> None:
    with rejects("'cifar11'", "'cifar10'"):
        run(Arguments(recipe="cifar11"))


def test_a_gpu_that_is_not_here_and_counts_that_mean_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with rejects("device", "cuda"):
        run(Arguments(device="cuda"))
    for name in ("images", "image_size", "epochs", "batch_size"):
        with rejects(name, -5):
            Arguments(**{name: -5})


def test_a_module_under_another_name_of_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime-gpu and pillow-simd have."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert doctor._version("numpy") == "installed, version unknown"
    assert doctor._version("no_such_module") == "not installed"
