"""Two "hosts" in network namespaces, joined by a real link: torchrun meets over it and trains as one process does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.test_torchrun import end
from tests.train.running import command, environment, run

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[tuple[str, str], ...]]:
    """Pairs of namespace and interface."""
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
    yield tuple((name, name) for name in names)
    _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.mark.slow
def test_two_hosts_give_the_weights_of_one_process(hosts: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    extra = ("--precision", "fp64", "--epochs", "1", "--checkpoint.every-minutes", "1000")
    alone = run(command("simclr", tmp_path / "one", *extra))
    assert alone.returncode in (0, 3), alone.stderr
    ranks = []
    for number, (namespace, interface) in enumerate(hosts):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        meeting = ["--node-rank", str(number), "--master-addr", ADDRESSES[0], "--master-port", "29577"]
        words = [
            "ip",
            "netns",
            "exec",
            namespace,
            *launcher,
            *meeting,
            *command("simclr", tmp_path / "two", *extra)[1:],
        ]
        variables = environment() | {"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
        ranks.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables))
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == alone.returncode, errors
    one, two = end(tmp_path / "one"), end(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-10, atol=1e-10, msg=name)
