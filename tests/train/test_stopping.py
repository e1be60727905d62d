"""A signal is answered at once and obeyed while a run is set up or measures; what takes long says what it is."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dssl import loop
from dssl.config import RunConfig
from dssl.errors import Stopped
from dssl.log import Log, clock_time, phase
from dssl.run import Run
from dssl.training.budget import Planner
from dssl.training.pretrain import set_up, train
from dssl.weights import checkpoint
from tests.train.test_train import TINY

CONFIG = replace(TINY, threads=1, knn_every=0)


def forever(number: int) -> NoReturn:
    """Long work, in which a signal arrives."""
    os.kill(os.getpid(), number)
    while True:
        time.sleep(0.001)


class Endless(loop.Hook):
    """Measures forever after a step."""

    def __init__(self, step: int, *, sets_weights: bool = False) -> None:
        self.step, self.sets_weights = step, sets_weights

    def after_round(self, step: int, log: Log) -> None:
        if step == self.step:
            forever(signal.SIGTERM)


def run_with(hook: loop.Hook, config: RunConfig, out: Path) -> loop.Ending:
    with Run.open(out, config) as run:
        task, intro = set_up(config, run)
        task.hooks = [*task.hooks, hook]
        return loop.run(task, run, intro=intro)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_machine_is_measured(number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    planner = Planner(measure=lambda config, source, device: forever(number))
    with pytest.raises(Stopped) as stopped:
        train(replace(CONFIG, minutes=1.0), tmp_path / "run", planner=planner)
    assert stopped.value.signal == number
    assert f"{signal.Signals(number).name} received" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_signal_while_the_views_are_drawn(tmp_path: Path) -> None:
    ended = train(CONFIG, tmp_path / "run", gallery=lambda *_: forever(signal.SIGTERM))
    assert (ended.signal, ended.step, ended.exit_code) == (signal.SIGTERM, 0, 143)
    again = train(CONFIG, tmp_path / "run")
    assert (again.signal, again.step) == (None, 8)


def test_a_signal_while_a_run_measures_itself(tmp_path: Path) -> None:
    ended = run_with(Endless(4), CONFIG, tmp_path / "run")
    assert (ended.signal, ended.step) == (signal.SIGTERM, 4)
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints")[-1] == 4
    assert train(CONFIG, tmp_path / "run").step == 8


@pytest.mark.parametrize(("sets_weights", "saved"), [(True, 4), (False, 8)])
def test_weights_that_are_not_final_are_not_saved_as_such(
    sets_weights: bool, saved: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dssl"):
        ended = run_with(Endless(8, sets_weights=sets_weights), CONFIG, tmp_path / "run")
    assert ended.signal == signal.SIGTERM
    assert checkpoint.steps_in(tmp_path / "run" / "checkpoints")[-1] == saved
    assert ("resumes it at step 4" in caplog.text) == sets_weights


def test_a_phase_that_takes_long_says_what_it_is() -> None:
    said = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.getMessage() == "counting sheep ..."
            said.set()

    logger, handler = logging.getLogger("dssl"), Listening()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with phase("nothing"):
            pass
        with phase("counting sheep"):
            assert said.wait(60)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (760, "12:40"), (3760.2, "1:02:40"), (-1, "0:00")])
def test_time_left(seconds: float, text: Any) -> None:
    assert clock_time(seconds) == text
