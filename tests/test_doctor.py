"""``dssl doctor``: real steps on this machine, and warnings where the measured rates ask for them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dssl.commands.doctor import Arguments, run
from dssl.errors import DsslError
from dssl.recipes import recipe
from dssl.train import estimate
from dssl.train.estimate import Speed, measure_speed


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Rates as another machine might have them: a busy or a GPU machine cannot be had here."""

    def put(**rates: float | None) -> None:
        usual = {"images_per_second": 100.0, "on_one_thread": 60.0, "views_per_second": 1e6}
        speed = Speed(
            **usual | rates,
            checkpoint_bytes=10**7,
            precision="fp32",
            why="fp32: as measured",
            views=("s1", "s2", "h1", "h2"),
        )
        monkeypatch.setattr(estimate, "measure_speed", lambda *_: speed)

    return put


def test_it_takes_real_steps_and_leaves_the_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        speed = measure_speed(recipe("shapes"), torch.device("cpu"), seconds=0.01, batch_size=4)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        alone = measure_speed(recipe("shapes"), torch.device("cpu"), seconds=0.01, batch_size=4)
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


def test_an_unknown_recipe_is_refused_in_one_line() -> None:
    with pytest.raises(DsslError, match="cifar10") as caught:
        run(Arguments(recipe="cifar11"))
    assert "\n" not in str(caught.value)
