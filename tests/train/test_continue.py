"""What a run needs to continue exactly: dropout by step, old files, the optimiser on its device, counters on every process."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dssl import loop
from dssl.config import CheckpointConfig, OptimizerConfig, RunConfig
from dssl.data.loader import Batches
from dssl.distributed import World
from dssl.log import Log
from dssl.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from dssl.report.run_report import read_run
from dssl.run import Run, RunFolder
from dssl.state import RunLength, TrainState
from dssl.training import pretrain
from dssl.training.pretrain import train
from tests.train.running import cut, end_of
from tests.train.test_train import TINY

AsRank = Callable[[RunConfig, Path, int], None]
EVERY_STEP = CheckpointConfig(every_minutes=1e-9, keep=99)


def test_dropout_and_stochastic_depth_continue_to_the_bit(tmp_path: Path) -> None:
    config = replace(TINY, encoder="mobilenet_v3_small", image_size=16, epochs=1, knn_every=0, checkpoint=EVERY_STEP)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(config, whole)
    cut(whole, broken, step=2)
    torch.manual_seed(99)
    assert train(config, broken).step == 4
    assert end_of(broken) == end_of(whole)


def test_every_process_draws_its_own_dropout(as_rank: AsRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    original = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), original(seed))[1])
    for rank in range(2):
        as_rank(replace(TINY, epochs=1, knn_every=0), tmp_path / str(rank), rank)
    # the first weights are the same everywhere; then four steps each, all different
    assert len(seeds) == 10
    assert seeds[0] == seeds[5]
    assert len(set(seeds)) == 9


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> AsRank:
    """A run as this process of several sees it; there are no others to wait for, so it gets the whole batch."""
    monkeypatch.setattr(World, "from_first", lambda _, work: work())
    monkeypatch.setattr(pretrain, "Batches", lambda *parts, **settings: Batches(*parts, **settings | {"rank": 0}))

    def run(config: RunConfig, out: Path, rank: int) -> None:
        out.mkdir()
        opened = Run.find(RunFolder(out), World(rank, 1, torch.device("cpu")))
        task, _ = pretrain.set_up(config, opened)
        loop.run(task, opened)

    return run


def test_processes_that_do_not_save_check_the_weights_no_more_often(
    as_rank: AsRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    original = TrainState.is_finite
    monkeypatch.setattr(TrainState, "is_finite", lambda state: (checked.append(state.step), original(state))[1])
    as_rank(replace(TINY, knn_every=0), tmp_path / "first", 0)
    assert checked == [4, 8]
    checked.clear()
    as_rank(replace(TINY, knn_every=0), tmp_path / "other", 1)
    assert checked == [4, 8]


def test_the_state_of_adamw_is_loaded_where_the_parameters_are() -> None:
    if torch.__version__.startswith("2.9."):
        pytest.skip("FakeTensorMode of torch 2.9 asks for a driver")
    config = OptimizerConfig(name="adamw")
    method = nn.Linear(3, 2)
    optimizer = build_optimizer(method, config)
    for parameter in method.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    saved = optimizer_tensors(optimizer, method)
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = nn.Linear(3, 2, device="cuda")
        restored = build_optimizer(elsewhere, config)
        load_optimizer_tensors(restored, elsewhere, saved)
        slots = {slot for state in restored.state.values() for slot in state}
        assert slots == {"step", "exp_avg", "exp_avg_sq"}
        for parameter, state in restored.state.items():
            assert {slot: value.device for slot, value in state.items()} == dict.fromkeys(slots, parameter.device)


def test_a_log_of_a_run_that_diverged_is_json(tmp_path: Path) -> None:
    config = replace(TINY, optimizer=OptimizerConfig(rate=1e20, warmup_epochs=0))
    verdict = train(config, tmp_path / "run").verdict
    assert verdict.status == "diverged"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert any(record.get("loss", 0) is None for record in records)
    run = read_run(tmp_path / "run")
    said = run.verdict
    assert (said.status, said.reason, said.remedies) == ("diverged", verdict.reason, verdict.remedies)
    assert len(run.curve("loss")) < len(run.checks)  # NaN is not drawn


@pytest.mark.parametrize(("start", "left"), [(20, [1, 10, 20, 30]), (0, [30])])
def test_tensorboard_shows_every_point_of_a_resumed_run_once(tmp_path: Path, start: int, left: list[int]) -> None:
    """Points up to the checkpoint stay, those after it are made again; without a checkpoint, all of them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = RunFolder(tmp_path)
    length = RunLength(total=40, steps_per_epoch=10, round=10, counted="epoch")
    for number, (begin, steps) in enumerate(((0, (1, 10, 20, 25)), (start, (30,)))):
        with Log(folder, start=begin, length=length, batch_size=4, active=True) as log:
            for step in steps:
                log.knn(step, {"knn": float(step)})
        (file,) = folder.tensorboard.glob("*.tfevents.??????????.*")
        file.rename(folder.tensorboard / f"events.out.tfevents.{number}")  # both may be of one second
    found = accumulator.EventAccumulator(str(folder.tensorboard)).Reload()
    assert [event.step for event in found.Scalars("knn")] == left
