"""Two processes meet, find out once and agree: the first scans and measures for all, a difference is one line on both."""

import datetime
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from PIL import Image

from dssl.data import index
from dssl.distributed import World, agree_on_attempt, join_world
from dssl.errors import DsslError
from dssl.loop import Ending
from dssl.run import Run, RunFolder
from dssl.training import prepare
from dssl.training.health import Observation, RunMonitor, Verdict
from dssl.training.pretrain import Pretraining, train
from tests.train.running import fork
from tests.train.test_train import TINY


def ranks(work: Callable[..., None], folder: Path, *, counts: tuple[int, int] = (0, 0)) -> list[str]:
    """What ``work(world, folder)`` says in two processes that meet as torchrun's do, each with its own cache of images.

    ``counts`` are the restarts that each node has counted.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(minutes=10))
    server.set("dssl/question 1", "of a dead process")
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip
    children = []
    for rank, count in enumerate(counts):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)}
        children.append(fork(join, shared | own, work, folder, log=folder / f"{rank}.log"))
    try:
        for child in children:
            assert child.wait(120) == 0, child.said()
    finally:
        for child in children:
            child.send(signal.SIGKILL)
    # some versions of torch say who is connected
    said = (child.said().splitlines() for child in children)
    return ["\n".join(line for line in lines if not line.startswith("[Gloo]")).strip() for lines in said]


def join(variables: dict[str, str], work: Callable[[World, Path], None], folder: Path) -> None:
    os.environ.update(variables)
    with join_world("cpu", batch_size=4) as world:
        work(world, folder)


def counted(world: World, folder: Path) -> None:
    """Prepare a run on a folder of images whose mean and deviation are to be measured."""
    scans, measured = [], []
    scan, normalization_of = index.scan, prepare.normalization_of
    index.scan = lambda *a, **k: (scans.append(1), scan(*a, **k))[1]  # type: ignore[assignment]
    prepare.normalization_of = lambda *a: (measured.append(1), normalization_of(*a))[1]  # type: ignore[assignment]
    config = replace(TINY, data=str(folder / "images"), normalization="measure")
    data = prepare.training_data(config, world=world)
    print(json.dumps([len(scans), len(measured), len(data.source), data.normalization.mean]), flush=True)


def test_the_first_process_scans_and_measures_for_all(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(8):
        Image.effect_noise((40, 40), 60 + number).convert("RGB").save(images / f"{number}.png")
    os.utime(images, (1, 1))  # of a folder that has just changed no index is kept
    first, second = map(json.loads, ranks(counted, tmp_path))
    assert first[:3] == [1, 1, 8]
    assert second[:3] == [0, 0, 8]
    assert first[3] == second[3]


def trained(folder: Path) -> Ending:
    health = replace(TINY.health, every=1, stop=True)
    config = replace(TINY, data="shapes:32", batch_size=4, epochs=1, knn_every=0, health=health)
    dist.destroy_process_group()  # train joins for itself
    result = train(config, folder / "run")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return result


def judging(world: World, folder: Path) -> None:
    """The second process sees a collapse that the first does not."""
    judge = RunMonitor.judge

    def judge_badly(self: RunMonitor, now: Observation) -> Verdict:
        judge(self, now)
        if world.rank == 1 and now.step >= 1:
            self.verdict = Verdict("collapsed", now.step, "h1", "h1->s1", "all of them are one point")
        return self.verdict

    RunMonitor.judge = judge_badly
    result = trained(folder)
    print(json.dumps([result.step, result.exit_code, result.verdict.reason]), flush=True)


def test_what_one_process_sees_is_the_verdict_of_all(tmp_path: Path) -> None:
    said = [json.loads(text.splitlines()[-1]) for text in ranks(judging, tmp_path)]
    assert said == [[2, 3, "all of them are one point"]] * 2
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["verdict"] for record in records if "verdict" in record] == ["too early", "collapsed"]


def differing(world: World, folder: Path) -> None:
    """Facts that differ, as between nodes; then images that do."""
    for facts in ({"dssl": f"1.{world.rank}"}, {"dssl": "1.0", "in run": f"step {world.rank}"}):
        with pytest.raises(DsslError) as caught:
            world.agree(facts)
        print(caught.value)
    with pytest.raises(DsslError) as caught:
        Run(world=world, folder=RunFolder(folder / "run")).describe({"fingerprint": f"{world.rank}abcdef"})
    print(caught.value, flush=True)


def test_what_differs_between_processes_is_one_line_on_both(tmp_path: Path) -> None:
    first, second = ranks(differing, tmp_path)
    assert first == second
    code, run, images = first.splitlines()
    assert code.startswith("process 1 has dssl 1.1, process 0 has 1.0")
    assert run.startswith("process 1 has in run step 1, process 0 has step 0")
    assert images.startswith("process 1 has images with the fingerprint 1abcdef, process 0 has 0abcdef")
    assert not (tmp_path / "run").exists()


def preempting(world: World, folder: Path) -> None:
    """The second process is told to stop; the first is not."""
    after_step = Pretraining.after_step

    def note(self: Pretraining, step: int) -> None:
        after_step(self, step)
        if world.rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Pretraining.after_step = note
    result = trained(folder)
    print(json.dumps([result.step < result.total, result.exit_code]), flush=True)


def test_a_signal_to_one_process_is_the_exit_code_of_all(tmp_path: Path) -> None:
    said = [json.loads(text.splitlines()[-1]) for text in ranks(preempting, tmp_path)]
    assert said == [[True, 128 + signal.SIGTERM]] * 2


def voting(world: World, folder: Path) -> None:
    print(world.any(world.rank == 1), flush=True)


def test_nodes_that_count_their_restarts_differently_meet(tmp_path: Path) -> None:
    """As after a failure on the second node: torchrun restarts both, but only the second counts it."""
    assert ranks(voting, tmp_path, counts=(0, 1)) == ["True", "True"]


def test_every_start_has_a_name_of_its_own_that_all_share() -> None:
    store = dist.HashStore()

    def start() -> set[str]:
        with ThreadPoolExecutor(3) as threads:
            return set(threads.map(lambda rank: agree_on_attempt(store, rank=rank, size=3), range(3)))

    first, second = start(), start()  # the second finds the questions and answers of the first
    assert len(first) == len(second) == 1
    assert first != second
