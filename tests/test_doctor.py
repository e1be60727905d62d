"""``dssl doctor``: real steps on this machine, and warnings where the measured rates ask for them."""

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from dssl.commands import doctor
from dssl.commands.doctor import Arguments, run, verdict
from dssl.errors import DsslError
from dssl.recipes import recipe
from dssl.training import estimate
from dssl.training.estimate import Budget, Speed, loader_rate, measure_speed


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Rates as another machine might have them: a busy or a GPU machine cannot be had here."""

    def put(**rates: float | None) -> None:
        usual = {"images_per_second": 100.0, "on_one_thread": 60.0, "views_per_second": 1e6}
        rest = {"checkpoint_bytes": 10**7, "precision": "fp32", "why": "fp32: as measured"}
        speed = Speed(**usual | rates | rest, views=("s1", "s2", "h1", "h2"))
        monkeypatch.setattr(estimate, "measure_speed", lambda *_, **__: speed)

    return put


def test_it_takes_real_steps_and_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        speed = measure_speed(recipe("shapes"), torch.device("cpu"), seconds=0.01, batch_size=4)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        told = recipe("shapes", precision="fp32")  # there is nothing to measure a second time
        alone = measure_speed(told, torch.device("cpu"), seconds=0.01, batch_size=4)
    finally:
        torch.set_num_threads(before)
    assert speed.images_per_second > 0
    assert speed.on_one_thread is not None
    assert speed.on_one_thread > 0
    assert alone.on_one_thread is None
    assert f"{speed.precision}: a step of the encoder on 16 images of 32 px took" in speed.why
    assert speed.views == ("s1", "s2", "h1", "h2")
    assert 10**6 < speed.checkpoint_bytes < 10**8


def test_the_duration_is_images_times_epochs_by_the_rate(measured, tmp_path: Path, capsys) -> None:
    measured(images_per_second=100.0)
    assert run(Arguments(images=6_000, out=tmp_path / "not" / "there")) == 0
    said = capsys.readouterr().out
    epochs = recipe("shapes").epochs
    assert f"{epochs} epochs of 6,000 images: about {epochs} minutes" in said
    assert "10 MB each" in said
    assert "precision    fp32: as measured" in said
    assert re.search(rf"GB free at {re.escape(str(tmp_path))}\b", said)
    assert "warning" not in said


def test_threads_that_are_in_each_others_way(measured, capsys) -> None:
    measured(images_per_second=20.0, on_one_thread=90.0)
    run(Arguments())
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "one torch thread reaches 90 images a second" in warnings[0]
    assert "OMP_NUM_THREADS=1" in warnings[0]


def test_views_that_are_too_slow(measured, capsys) -> None:
    measured(images_per_second=1000.0, on_one_thread=None, views_per_second=100.0)
    run(Arguments())
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "would wait for data" in warnings[0]


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Memory is counted, the loader is measured (here it is told), the card comes from a table; nothing is trained."""
    monkeypatch.setattr(estimate, "measure_speed", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr(estimate, "loader_rate", lambda *_: 311.0)
    assert run(Arguments(recipe="imagenet", device="cuda", batch_size=256, gpus=2)) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "10.9 GiB per GPU, counted (128 images each, bf16)" in lines["memory"]
    assert "up to 622 images a second" in lines["A100"]
    assert "not measured" in lines["A100"]
    # the loader gives 311 images a second: 100 epochs of ImageNet
    assert lines["a"] == "a run        100 epochs of 1,281,167 images on 2 GPUs: at least 4.8 days"
    assert lines["verdict"] == (
        "verdict      fits on 2 x A100: 12.0 of 79.2 GiB; the loader gives 311 of 1,243 images a second: it would wait for data "
        "up to 75% of the time; pack the images (dssl data) or add cores"
    )


@pytest.mark.parametrize(
    ("memory", "given", "said"),
    [
        (48, 700, "fits on A100: 44.0 of 48.0 GiB; the loader keeps up: 700 images a second of 600"),
        (16, 700, "does not fit on A100: 44.0 of 16.0 GiB; take --batch-size 186 or less, more GPUs, or --check"),
        (48, 150, "the loader gives 150 of 600 images a second: it would wait for data up to 75% of the time"),
    ],
)
def test_the_verdict(memory: int, given: float, said: str) -> None:
    budget = Budget(40 * 2**30, 1.0, 512)
    assert said in verdict(budget, memory * 2**30, name="A100", gpus=1, asked=600, given=given)


def test_the_loader_gives_real_batches() -> None:
    """From JPEG files where views are large; the clock is ours, and strikes a second whenever it is asked."""
    ticks = iter(range(100))
    config = recipe("folder", image_size=72, batch_size=8, graph="standard", threads=1)
    # started at 0; asked after two batches (1), after a third (2), and for the end (3)
    assert loader_rate(config, None, seconds=1.5, clock=lambda: float(next(ticks))) == 3 * 8 / 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(Arguments(gpus=3), "gpus is 3 and the batch is 64"), (Arguments(device="cuda", card="A200"), "A100")],
)
def test_what_cannot_be_is_refused(arguments: Arguments, said: str) -> None:
    with pytest.raises(DsslError, match=said):
        run(arguments)


def test_an_unknown_recipe_is_refused_in_one_line() -> None:
    with pytest.raises(DsslError, match="cifar10") as caught:
        run(Arguments(recipe="cifar11"))
    assert "\n" not in str(caught.value)


def test_options_that_would_do_nothing_and_counts_that_mean_nothing_are_refused() -> None:
    for options in ({"gpus": 2}, {"data": "shapes"}, {"card": "H100"}):
        with pytest.raises(DsslError, match="are about a GPU"):
            run(Arguments(device="cpu", **options))
    with pytest.raises(DsslError, match="--images is -5"):
        run(Arguments(images=-5))


def test_a_module_under_another_name_of_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime-gpu and pillow-simd have."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    assert doctor._version("numpy") == "installed, version unknown"
    assert doctor._version("no_such_module") == "not installed"
