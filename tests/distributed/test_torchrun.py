"""`torchrun -m dssl train`: two processes give the weights of one, survive a killed rank, and refuse what cannot be shared."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision

from dssl.distributed import join_world
from dssl.errors import DsslError
from dssl.weights import checkpoint
from tests.train.running import Child, command, environment, fork, run, start, wait_for_step


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(words: list[str], *options: str) -> list[str]:
    """The words of `python -m dssl train ...`, as two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [*launcher, *meeting, *options, *words[1:]]


def _worker(words: list[str], folder: str) -> None:
    from dssl.cli import main

    Path(folder, f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    if code := main(words):
        sys.exit(code)


def _worker_that_counts_scans(words: list[str], folder: str) -> None:
    """Writes the shards whose members this process lists into a file."""
    from dssl.data import parquet, tar

    os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
    for module in (parquet, tar):

        def counted(path: bytes, scan: Callable[..., Any] = module._scan, **options: Any) -> Any:
            with Path(folder, f"scanned-{os.environ['RANK']}").open("ab") as file:
                file.write(path.rpartition(b"/")[2] + b"\n")
            return scan(path, **options)

        module._scan = counted  # type: ignore[assignment]  # counts the calls of this process
    _worker(words, folder)


def start_agent(
    words: list[str],
    log: Path,
    *,
    port: int,
    worker: Callable[[list[str], str], None] = _worker,
    **settings: object,
) -> Child:
    """torchrun's own agent, whose workers are forks of it: what torchrun does, without eight seconds of imports for each process.

    A worker writes its process id into a file beside the log, named for its rank.
    """
    return fork(_agent, words[3:], str(log.parent), port, worker, settings, log=log)


def _agent(
    words: list[str], folder: str, port: int, worker: Callable[[list[str], str], None], settings: dict[str, Any]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    usual = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 0, "run_id": "test"}
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": f"127.0.0.1:{port}", "start_method": "fork"}
    try:
        elastic_launch(LaunchConfig(**usual | settings | place), worker)(words, folder)
    except ChildFailedError:
        sys.exit(1)  # as torchrun does, whatever the worker's exit code is


def end(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest_good(out / "checkpoints")
    assert found is not None
    return found[1].tensors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simsiam", "byol", "simclr"])
def test_two_processes_give_the_weights_of_one(method: str, tmp_path: Path) -> None:
    """The whole program in float64 on a convolutional encoder with BatchNorm: views, order, loss, optimiser."""
    extra = ("--precision", "fp64", "--epochs", "1", "--checkpoint.every-minutes", "1000")
    alone = run(command(method, tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    together = run(torchrun(command(method, tmp_path / "two", *extra)))
    assert together.returncode == alone.returncode, together.stderr
    one, two = end(tmp_path / "one"), end(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tar", "parquet", "values"])
def test_two_processes_read_shards_as_one_does(form: str, tmp_path: Path) -> None:
    """Tar, Parquet with its own order, and tar of five 12-bit channels, whose range one process measures for both."""
    from dssl.data import Quarantine, open_source
    from dssl.data.packed import write_shards

    if form == "parquet":
        pytest.importorskip("pyarrow")
    options = ["--data", str(tmp_path / "shards")]
    if form == "values":
        (tmp_path / "files").mkdir()
        generator = np.random.default_rng(2)
        for number in range(48):
            np.save(tmp_path / "files" / f"{number}.npy", generator.integers(0, 4096, (36, 36, 5)).astype(np.uint16))
        source = open_source(str(tmp_path / "files"), channels=5)
        options += ["--channels", "5"]
    else:
        source = open_source("shapes:48")
    kind = "parquet" if form == "parquet" else "tar"
    write_shards(source, tmp_path / "shards", split="train", form=kind, shard=12, quarantine=Quarantine(source))
    extra = ("--precision", "fp64", "--epochs", "2", "--checkpoint.every-minutes", "1000", *options)
    alone = run(command("simclr", tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    together = run(torchrun(command("simclr", tmp_path / "two", *extra)))
    assert together.returncode == alone.returncode, together.stderr
    one, two = (checkpoint.newest_good(tmp_path / name / "checkpoints")[1] for name in ("one", "two"))
    assert one.header.get("range") == two.header.get("range")
    assert one.tensors.keys() == two.tensors.keys()
    for name, value in one.tensors.items():
        torch.testing.assert_close(two.tensors[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_one_process_lists_the_shards_and_the_other_maps_its_index(
    form: Literal["tar", "parquet"], tmp_path: Path
) -> None:
    from dssl.data import Quarantine, open_source
    from dssl.data.packed import write_shards

    if form == "parquet":
        pytest.importorskip("pyarrow")
    source = open_source("shapes:48")
    write_shards(source, tmp_path / "shards", split="train", form=form, shard=12, quarantine=Quarantine(source))
    shards = sorted((tmp_path / "shards").iterdir())
    for path in shards:
        os.utime(path, ns=(10**18, 10**18))  # an index of younger ones is not kept
    words = command("simclr", tmp_path / "run", "--data", str(tmp_path / "shards"), "--epochs", "2")
    agent = start_agent(words, tmp_path / "log", port=free_port(), worker=_worker_that_counts_scans)
    assert agent.wait() in (0, 3), agent.said()
    assert (tmp_path / "rank-1").exists()
    assert sorted((tmp_path / "scanned-0").read_text().split()) == [path.name for path in shards]
    assert not (tmp_path / "scanned-1").exists()
    assert len([*(tmp_path / "cache" / "dssl" / "index").iterdir()]) == 1


def _worker_that_counts_downloads(words: list[str], folder: str) -> None:
    """Gets weights from nowhere, and writes into a file that it asked for them."""
    os.environ["TORCH_HOME"] = f"{folder}/cache"

    def download(url: str, path: str, **options: object) -> None:
        Path(folder, f"downloaded-{os.environ['RANK']}").write_text(url)
        torch.save(torchvision.models.get_model("shufflenet_v2_x0_5").state_dict(), path)

    torch.hub.download_url_to_file = download
    _worker(words, folder)


def test_one_process_of_a_node_downloads_the_weights(tmp_path: Path) -> None:
    words = [
        sys.executable, "-m", "dssl", "train", "adapt", "--encoder", "shufflenet_v2_x0_5", "--data", "shapes:16", "--image-size",
        "32", "--adapt.evaluation-size", "32", "--adapt.head-epochs", "1", "--epochs", "2", "--batch-size", "8", "--threads",
        "1", "--knn-every", "0", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    agent = start_agent(words, tmp_path / "log", port=free_port(), worker=_worker_that_counts_downloads)
    assert agent.wait() == 0, agent.said()
    assert (tmp_path / "rank-1").exists()
    assert [path.name for path in tmp_path.glob("downloaded-*")] == ["downloaded-0"]


def test_a_ctrl_c_that_arrives_twice_is_one(tmp_path: Path) -> None:
    """From the terminal, which sends it to every process, and from torchrun, which hands it on."""
    out = tmp_path / "run"
    words = command(
        "simclr", out, "--epochs", "1000", "--checkpoint.every-minutes", "1000", "--checkpoint.every-epochs", "1"
    )
    agent = start_agent(words, tmp_path / "log", port=free_port())
    wait_for_step(out, 6, agent)
    workers = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    for process in (*workers, agent.pid, *workers):
        os.kill(process, signal.SIGINT)
    agent.wait()
    (step,) = checkpoint.steps_in(out / "checkpoints")[-1:]
    assert f"stopped at step {step} of" in agent.said()


def survive(out: Path, *extra: str) -> int:
    """A run of two processes whose second is killed and that torchrun starts again; its exit code."""
    words = torchrun(command("byol", out, *extra), "--max-restarts", "1")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    victim = _rank_process(process.pid, "1")
    wait_for_step(out, 2, process)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert "resuming at step" in errors
    return process.returncode


def test_two_processes_survive_a_kill_and_end_with_the_weights_of_one(tmp_path: Path) -> None:
    """The agent starts both again; they continue at the last checkpoint. Views, order, loss and optimiser are as of one."""
    extra, out = ("--precision", "fp64", "--epochs", "2"), tmp_path / "two"
    alone = start(command("byol", tmp_path / "one", *extra))
    agent = start_agent(command("byol", out, *extra), tmp_path / "log", port=free_port(), max_restarts=1)
    wait_for_step(out, 2, agent)
    os.kill(int((tmp_path / "rank-1").read_text()), signal.SIGKILL)
    assert agent.wait() == alone.wait() == 0, agent.said()
    assert "resuming at step" in agent.said()
    assert "Warning" not in agent.said()
    one, two = end(tmp_path / "one"), end(out)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.slow
def test_a_killed_rank_changes_no_bit(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    untouched = run(torchrun(command("byol", whole)))
    assert untouched.returncode in (0, 3), untouched.stderr
    assert survive(broken) == untouched.returncode
    one, two = end(whole), end(broken)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2 in the environment, without MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE and RANK of the environment are not numbers"),
    ],
)
def test_an_environment_that_torchrun_did_not_make_is_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], part: str
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DsslError, match=f"{part}.*torchrun"), join_world("cpu", batch_size=8):
        pass


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    agent = start_agent(command("simsiam", tmp_path / "run", "--batch-size", "15"), tmp_path / "log", port=free_port())
    assert agent.wait() != 0
    assert "batch_size is 15, the global one, and there are 2 processes" in agent.said()
    assert not (tmp_path / "run").exists()


def _rank_process(launcher: int, rank: str) -> int:
    """The process that torchrun started with this RANK."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent == launcher and f"RANK={rank}".encode() in variables:
                return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"torchrun {launcher} has no rank {rank}")
