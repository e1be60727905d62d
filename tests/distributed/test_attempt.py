"""Processes that were restarted on some nodes only still meet, whatever an earlier start has left in the store."""

import datetime
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from dssl.distributed import agree_on_attempt, join_world
from tests.train.running import fork


def meet(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    with join_world("cpu", batch_size=4) as world:
        print(world.any(world.rank == 1), flush=True)


def test_every_start_has_a_name_of_its_own_that_all_share() -> None:
    store = dist.HashStore()

    def start() -> set[str]:
        with ThreadPoolExecutor(3) as threads:
            return set(threads.map(lambda rank: agree_on_attempt(store, rank=rank, size=3), range(3)))

    first, second = start(), start()  # the second finds the questions and answers of the first
    assert len(first) == len(second) == 1
    assert first != second


def test_nodes_that_count_their_restarts_differently_meet(tmp_path: Path) -> None:
    """As after a failure on the second node: torchrun restarts both, but only the second counts it."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60))
    server.set("dssl/question 1", "of a dead process")
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        fork(meet, shared | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank)}, log=tmp_path / f"{rank}.log")
        for rank in range(2)
    ]
    try:
        for child in ranks:
            assert child.wait(60) == 0, child.said()
            assert child.said() == "True\n"
    finally:
        for child in ranks:
            child.send(signal.SIGKILL)
