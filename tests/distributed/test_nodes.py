"""Two torchrun agents, as on two nodes: what differs between them is one line on both, and a signal saves the run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_torchrun import free_port, start_agent
from tests.train.running import command, environment, run, start, wait_for_step


def start_nodes(words: list[list[str]], *options: str) -> list[subprocess.Popen[str]]:
    """One agent with one process for each list of words, which meet on this machine."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "nodes"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    return [
        subprocess.Popen(
            [*launcher, *options, *one[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for one in words
    ]


def ends(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(node.returncode, errors) for node in nodes for _, errors in [node.communicate(timeout=120)]]
    finally:
        for node in nodes:
            node.kill()


def test_folders_that_differ_between_nodes_are_one_line_on_both(tmp_path: Path) -> None:
    """As with an --out on each node's own disk, where one has a run from an earlier start."""
    extra, port = ("--epochs", "1"), free_port()
    outs = [tmp_path / name / "run" for name in ("one", "two")]
    outs[1].parent.mkdir()
    assert run(command("simclr", outs[0], *extra)).returncode in (0, 3)
    agents = [
        start_agent(
            command("simclr", out, *extra), out.parent / "log", port=port, min_nodes=2, max_nodes=2, nproc_per_node=1
        )
        for out in outs
    ]
    for agent in agents:
        assert agent.wait() != 0
        (line,) = {line for line in agent.said().splitlines() if line.startswith("dssl: ")}
        assert "process 0 has" in line
        assert "the same --out on a shared disk" in line


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
    """As docs/gpu.md has it for Slurm; without --signals-to-handle the signal kills torchrun and orphans its processes."""
    out = tmp_path / "run"
    words = command("simclr", out, "--epochs", "1000")
    nodes = start_nodes([words, words], "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1")
    wait_for_step(out, 2, nodes[0])
    for node in nodes:
        node.send_signal(signal.SIGUSR1)
    said = [errors for _, errors in ends(nodes)]
    assert any("saved; the same command" in errors for errors in said), said
