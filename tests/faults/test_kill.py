"""Killed at any moment, also in the middle of a save, a run ends as the same run, to the last bit."""

import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from dssl.weights import checkpoint
from tests.faults.conftest import Tally
from tests.faults.processes import command, launch, run, under_strace
from tests.train.running import end_of, wait_for_step
from tests.train.test_resume import metrics_of

METHODS = ("simsiam", "byol", "simclr")
SAVING = ("ftruncate", "write", "pwrite64", "writev", "renameat", "rename", "fsync", "fdatasync", "unlink")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untouched runs, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("whole")

    class Made(dict[str, Path]):
        def __missing__(self, method: str) -> Path:
            code, said = run(command(method, folder / method), folder / f"{method}.log")
            assert code in (0, 3), said
            self[method] = folder / method
            return self[method]

    return Made()


def finish_and_compare(method: str, out: Path, untouched: Path, log: Path) -> None:
    code, said = run(command(method, out), log)
    assert code in (0, 3), said
    assert end_of(out) == end_of(untouched)
    assert metrics_of(out) == metrics_of(untouched)
    left = sorted(entry.name for entry in (out / "checkpoints").iterdir())
    assert left == ["step-000000005.safetensors", "step-000000006.safetensors"], "a killed write left something"


@needs_strace
def test_a_signal_a_kill_and_two_signals_change_nothing(whole: dict[str, Path], tally: Tally, tmp_path: Path) -> None:
    """One run: SIGTERM while it syncs a save, SIGKILL as it renames one, then both signals at once."""
    out, log = tmp_path / "run", tmp_path / "log"
    with tally.trial("SIGTERM or SIGINT in a save"):
        _signal_in_a_save("byol", out, signal.SIGTERM, log)
    with tally.trial("SIGKILL at a write, rename or fsync of a save"):
        child = launch(command("byol", out), log, held=True)
        tracer = under_strace(child, "-e", "trace=rename", "-e", "inject=rename:signal=SIGKILL:when=2")
        assert child.wait() == -signal.SIGKILL, child.said()
        tracer.wait(30)
    with tally.trial("SIGTERM or SIGINT twice"):
        _two_signals("byol", out, signal.SIGINT, log)
    finish_and_compare("byol", out, whole["byol"], log)


@needs_strace
@pytest.mark.faults
@pytest.mark.parametrize("method", METHODS)
def test_a_kill_at_every_call_of_a_save(method: str, whole: dict[str, Path], tally: Tally, tmp_path: Path) -> None:
    calls = _calls_of_a_save(method, tmp_path)
    assert {name for name, _ in calls} >= {"write", "rename", "fsync"}
    assert len(calls) >= 10
    for call in calls:
        with tally.trial("SIGKILL at a write, rename or fsync of a save"):
            _kill_at(method, call, whole, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("method", METHODS)
def test_twenty_kills_at_random_moments(method: str, tally: Tally, tmp_path: Path) -> None:
    """One run, killed twenty times: in a step, in a save, while starting."""
    untouched, broken = tmp_path / "whole", tmp_path / "broken"
    extra = ("--epochs", "120")  # long enough for a fast machine: the run must not end before the last kill
    assert run(command(method, untouched, *extra), tmp_path / "log")[0] in (0, 3)
    end = checkpoint.steps_in(untouched / "checkpoints")[-1]
    generator = random.Random(METHODS.index(method))
    step = 0
    with tally.trial("SIGKILL at a random moment", 20):
        for number in range(20):
            child = launch(command(method, broken, *extra), tmp_path / "log")
            if number % 4 == 3:  # before the run has said a word
                time.sleep(generator.random() * 1.5)
            else:
                wait_for_step(broken, step + generator.randrange(1, 4), child)
                time.sleep(generator.random() * 0.2)
            child.send(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL, child.said()
            step = (checkpoint.steps_in(broken / "checkpoints") or [0])[-1]
        assert 0 < step < end, "the kills must come in the middle of the run"
        code, said = run(command(method, broken, *extra), tmp_path / "log")
        assert code in (0, 3), said
        assert end_of(broken) == end_of(untouched)
        assert metrics_of(broken) == metrics_of(untouched)


@needs_strace
@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("method", METHODS)
def test_signals_while_it_saves_and_twice(
    method: str, number: signal.Signals, whole: dict[str, Path], tally: Tally, tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    with tally.trial("SIGTERM or SIGINT in a save"):
        _signal_in_a_save(method, out, number, log)
    with tally.trial("SIGTERM or SIGINT twice"):
        _two_signals(method, out, number, log)
    finish_and_compare(method, out, whole[method], log)


WORK = {
    "evaluation": ["evaluate", "RUN", "--data", "shapes:300", "--protocols", "knn", "--no-page", "--out", "OUT"],
    "embedding": ["embed", "RUN", "shapes:60", "--shard", "20", "--out", "OUT"],
    "packing": ["data", "pack", "shapes:2000", "--out", "OUT"],
}
"""Work other than training."""


@needs_strace
@pytest.mark.faults
@pytest.mark.parametrize("work", WORK)
def test_signals_in_evaluation_and_import(work: str, whole: dict[str, Path], tally: Tally, tmp_path: Path) -> None:
    """At the moment a result gets its name: what is there is whole, and the same command gives all of it."""

    def words(out: Path) -> list[str]:
        return [str({"RUN": whole["simsiam"], "OUT": out}.get(word, word)) for word in WORK[work]]

    code, said = run(words(tmp_path / "untouched"), tmp_path / "log")
    assert code == 0, said
    expected = _results(tmp_path / "untouched")
    assert expected
    first = 2 if work == "packing" else 1  # after the note that the copy is incomplete
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        with tally.trial("SIGTERM, SIGINT or SIGKILL in evaluation, embedding or packing"):
            out = tmp_path / f"out{int(number)}"
            child = launch(words(out), tmp_path / "log", held=True)
            tracer = under_strace(child, "-e", "trace=rename", "-e", f"inject=rename:signal={int(number)}:when={first}")
            code = child.wait()
            tracer.wait(30)
            assert code in (-number, 128 + number), child.said()
            assert "Traceback" not in child.said()
            for path, content in _results(out).items():
                assert content == expected[path], f"{path} is there and not whole"
            code, said = run(words(out), tmp_path / "log")
            assert code == 0, said
            assert _results(out) == expected


def _results(folder: Path) -> dict[str, bytes]:
    """The files that another program would read; pages and records name paths and times."""
    endings = {".npy", ".txt", ".safetensors"}
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.suffix in endings and p.name[0] != "."
    }


def _signal_in_a_save(method: str, out: Path, number: signal.Signals, log: Path) -> None:
    """Sent by strace as the first checkpoint is synced, after config.json and views.png: the save ends, and the run says so."""
    child = launch(command(method, out), log, held=True)
    tracer = under_strace(child, "-e", "trace=fsync", "-e", f"inject=fsync:signal={int(number)}:when=5")
    assert child.wait() == 128 + number, child.said()
    tracer.wait(30)
    assert "and saved; the same command resumes it" in child.said()
    assert checkpoint.steps_in(out / "checkpoints")


def _two_signals(method: str, out: Path, number: signal.Signals, log: Path) -> None:
    """Both are there before the run can act on the first: it ends at once, whatever it was doing."""
    before = checkpoint.steps_in(out / "checkpoints")[-1]
    child = launch(command(method, out), log)
    wait_for_step(out, before + 1, child)
    child.send(signal.SIGSTOP)
    child.send(number)
    child.send(signal.SIGTERM if number == signal.SIGINT else signal.SIGINT)
    child.send(signal.SIGCONT)
    assert child.wait() in (130, 143), child.said()
    assert "Traceback" not in child.said()


def _kill_at(method: str, call: tuple[str, int], whole: dict[str, Path], folder: Path) -> None:
    name, number = call
    out = folder / f"{name}-{number}"
    child = launch(command(method, out), folder / "log", held=True)
    tracer = under_strace(child, "-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={number}")
    assert child.wait() == -signal.SIGKILL, f"{call}: {child.said()}"
    tracer.wait(30)
    finish_and_compare(method, out, whole[method], folder / "log")
    shutil.rmtree(out)


def _calls_of_a_save(method: str, folder: Path) -> list[tuple[str, int]]:
    """The system calls of the save after step 3, which also deletes the first checkpoint: name, and how manieth of the run."""
    out = folder / "traced"
    child = launch(command(method, out), folder / "traced.log", held=True)
    tracer = under_strace(child, "-y", "-s", "0", "-e", f"trace={','.join(SAVING)}")
    assert child.wait() in (0, 3), child.said()
    tracer.wait(30)
    counts: Counter[str] = Counter()
    calls: list[tuple[str, int]] = []
    within = False
    for line in (folder / "traced.strace").read_text().splitlines():
        match = re.match(rf"{child.pid} +(\w+)\((.*)", line)
        if match is None:
            continue  # another thread, such as TensorBoard's
        name, rest = match.groups()
        counts[name] += 1
        if "/checkpoints" not in rest:
            continue
        if calls and "step-000000003.safetensors" in rest:
            within = True  # from here on it has its name
        calls.append((name, counts[name]))
        if within and name == "unlink":
            break
    # what comes after the folder was synced for the second time is the third save
    synced = [place for place, (name, _) in enumerate(calls) if name == "fsync"]
    shutil.rmtree(out)
    return calls[synced[3] + 1 :]
