"""`torchrun -m dssl train`: two processes give the weights of one, survive a killed rank, and refuse what cannot be shared."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision

from dssl.data import Quarantine, Source, open_source, packed
from dssl.distributed import join_world
from dssl.errors import DsslError
from dssl.weights import checkpoint
from tests.rejecting import states
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
    words: list[str], log: Path, *, port: int, worker: Callable[[list[str], str], None] = _worker, **settings: object
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


def assert_same_weights(one: Path, two: Path, *, tolerance: float = 1e-10) -> None:
    alone, together = (checkpoint.newest_good(out / "checkpoints")[1] for out in (one, two))
    assert alone.header.get("range") == together.header.get("range")
    assert alone.tensors.keys() == together.tensors.keys()
    for name, value in alone.tensors.items():
        torch.testing.assert_close(together.tensors[name], value, rtol=tolerance, atol=tolerance, msg=name)


def assert_two_are_as_one(method: str, folder: Path, *extra: str) -> None:
    """The whole program in float64."""
    words = ("--precision", "fp64", "--checkpoint.every-minutes", "1000", *extra)
    alone = run(command(method, folder / "one", *words))
    assert alone.returncode in (0, 3), alone.stderr
    together = run(torchrun(command(method, folder / "two", *words)))
    assert together.returncode == alone.returncode, together.stderr
    assert_same_weights(folder / "one", folder / "two")


def write_shards(source: Source, folder: Path, form: Literal["tar", "parquet"]) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    packed.write_shards(source, folder, split="train", form=form, shard=12, quarantine=Quarantine(source))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simsiam", "byol", "simclr"])
def test_two_processes_give_the_weights_of_one(method: str, tmp_path: Path) -> None:
    """On a convolutional encoder with BatchNorm: views, order, loss, optimiser."""
    assert_two_are_as_one(method, tmp_path, "--epochs", "1")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tar", "parquet", "values"])
def test_two_processes_read_shards_as_one_does(form: str, tmp_path: Path) -> None:
    """Tar, Parquet with its own order, and tar of five 12-bit channels, whose range one process measures for both."""
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
    write_shards(source, tmp_path / "shards", "parquet" if form == "parquet" else "tar")
    assert_two_are_as_one("simclr", tmp_path, "--epochs", "2", *options)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_one_process_lists_the_shards_and_the_other_maps_its_index(
    form: Literal["tar", "parquet"], tmp_path: Path
) -> None:
    write_shards(open_source("shapes:48"), tmp_path / "shards", form)
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
    rarely = ("--checkpoint.every-minutes", "1000", "--checkpoint.every-epochs", "1")
    words = command("simclr", out, "--epochs", "1000", *rarely)
    agent = start_agent(words, tmp_path / "log", port=free_port())
    wait_for_step(out, 6, agent)
    workers = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    for process in (*workers, agent.pid, *workers):
        os.kill(process, signal.SIGINT)
    agent.wait()
    (step,) = checkpoint.steps_in(out / "checkpoints")[-1:]
    assert f"stopped at step {step} of" in agent.said()


def survive(out: Path, *extra: str) -> int:
    """A run of two processes whose second is killed; the agent starts both again, and they continue at the last checkpoint."""
    agent = start_agent(command("byol", out, *extra), out.parent / "log", port=free_port(), max_restarts=1)
    wait_for_step(out, 2, agent)
    os.kill(int((out.parent / "rank-1").read_text()), signal.SIGKILL)
    code = agent.wait()
    assert "resuming at step" in agent.said()
    assert "Warning" not in agent.said()
    return code


def test_two_processes_survive_a_kill_and_end_with_the_weights_of_one(tmp_path: Path) -> None:
    """Views, order, loss and optimiser are as of one."""
    extra = ("--precision", "fp64", "--epochs", "2")
    alone = start(command("byol", tmp_path / "one", *extra))
    assert survive(tmp_path / "two", *extra) == alone.wait() == 0
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_a_killed_rank_changes_no_bit(tmp_path: Path) -> None:
    untouched = run(torchrun(command("byol", tmp_path / "whole")))
    assert untouched.returncode in (0, 3), untouched.stderr
    assert survive(tmp_path / "broken") == untouched.returncode
    assert_same_weights(tmp_path / "whole", tmp_path / "broken", tolerance=0)


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2.*MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE and RANK"),
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
    assert "batch_size is 15 over all 2 processes" in agent.said()
    assert not (tmp_path / "run").exists()


# -- two nodes


def test_folders_that_differ_between_nodes_are_one_line_on_both(tmp_path: Path) -> None:
    """As with an --out on each node's own disk, where one has a run from an earlier start."""
    extra, port = ("--epochs", "1"), free_port()
    outs = [tmp_path / name / "run" for name in ("one", "two")]
    outs[1].parent.mkdir()
    assert run(command("simclr", outs[0], *extra)).returncode in (0, 3)
    nodes = {"port": port, "min_nodes": 2, "max_nodes": 2, "nproc_per_node": 1}
    agents = [start_agent(command("simclr", out, *extra), out.parent / "log", **nodes) for out in outs]
    for agent in agents:
        assert agent.wait() != 0
        (line,) = {line for line in agent.said().splitlines() if line.startswith("dssl: ")}
        assert "process 0 has" in line
        states(line, "--out", "shared disk")


def test_sigusr1_saves_the_run_as_sigterm_does(tmp_path: Path) -> None:
    """Slurm's usual warning."""
    out = tmp_path / "run"
    child = start(command("simclr", out, "--epochs", "1000"))
    wait_for_step(out, 2, child)
    child.send(signal.SIGUSR1)
    ended, said = child.wait(), child.said()
    assert ended == 128 + signal.SIGUSR1, said
    assert "saved; the same command" in said


@pytest.mark.slow
def test_two_agents_hand_sigusr1_on(tmp_path: Path) -> None:
    """As docs/howto/gpu.md has it for Slurm; without --signals-to-handle the signal kills torchrun and orphans its processes."""
    out = tmp_path / "run"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "nodes"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    words = [*launcher, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    words += command("simclr", out, "--epochs", "1000")[1:]
    nodes = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment()) for _ in range(2)]
    try:
        wait_for_step(out, 2, nodes[0])
        for node in nodes:
            node.send_signal(signal.SIGUSR1)
        said = [node.communicate(timeout=120)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert any("saved; the same command" in errors for errors in said), said


ADDRESSES = ("10.213.77.1", "10.213.77.2")
"""Of two "hosts" in network namespaces, joined by a real link."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    """The names of namespaces, which are those of their interfaces, too."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"d{os.getpid() % 100000}"
    names = (f"{tag}a", f"{tag}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(names)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.mark.slow
def test_two_hosts_give_the_weights_of_one_process(hosts: tuple[str, ...], tmp_path: Path) -> None:
    extra = ("--precision", "fp64", "--epochs", "1", "--checkpoint.every-minutes", "1000")
    alone = run(command("simclr", tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    ranks = []
    for number, host in enumerate(hosts):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        meeting = ["--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", "29577"]
        words = ["ip", "netns", "exec", host, *launcher, *meeting]
        words += command("simclr", tmp_path / "two", *extra)[1:]
        variables = environment() | {"GLOO_SOCKET_IFNAME": host, "TP_SOCKET_IFNAME": host}
        ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables))
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == alone.returncode, errors
    assert_same_weights(tmp_path / "one", tmp_path / "two")
