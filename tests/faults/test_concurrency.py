"""Two of everything at the same time, locks that the dead left, clocks that jump."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dssl.run import RunFolder
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.faults.processes import command, launch
from tests.faults.test_disk import one_line
from tests.train.running import end_of


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("concurrency") / "untouched"
    assert train("simsiam", out) == 0
    return out


@pytest.mark.parametrize("pairs", [1, pytest.param(5, marks=pytest.mark.faults)])
def test_two_runs_that_start_in_one_folder_at_once(pairs: int, untouched: Path, tally: Tally, tmp_path: Path) -> None:
    for number in range(pairs):
        with tally.trial("two runs in one folder"):
            out = tmp_path / f"run{number}"
            both = [launch(command("simsiam", out), tmp_path / f"log{side}", held=True) for side in (1, 2)]
            for child in both:
                child.send(signal.SIGCONT)
            codes = sorted(child.wait() for child in both)
            said = "".join(child.said() for child in both)
            assert codes == [0, 2], said
            assert "in use" in said
            assert end_of(out) == end_of(untouched)


def test_a_lock_that_the_dead_left(untouched: Path, tally: Tally, tmp_path: Path) -> None:
    """The lock is the system's: a file that a killed process left means nothing, whatever it says."""
    with tally.trial("a stale lock"):
        out = tmp_path / "run"
        out.mkdir()
        (out / ".lock").write_text("1")
        assert train("simsiam", out) == 0
        assert end_of(out) == end_of(untouched)


def test_a_live_lock_and_a_disk_without_locks(
    tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("two runs in one folder"), RunFolder(tmp_path / "run").locked():
        assert train("simsiam", tmp_path / "run") == 2
        assert "in use" in one_line(capsys)

    def none(handle: int, operation: int) -> None:
        raise OSError(37, os.strerror(errno.ENOLCK))

    with tally.trial("a disk without locks"):
        monkeypatch.setattr("dssl.run.fcntl.flock", none)
        assert train("simsiam", tmp_path / "run") == 2
        assert os.strerror(errno.ENOLCK) in one_line(capsys)


def test_killed_before_the_folder_is_a_run(untouched: Path, tally: Tally, tmp_path: Path) -> None:
    """Between the first folder that is made and config.json: the same command must not call it somebody else's."""
    with tally.trial("killed before config.json was written"):
        out = tmp_path / "run"
        (out / "checkpoints").mkdir(parents=True)
        (out / ".lock").touch()
        (out / ".config.json.k1ll3d.part").write_text('{"config": {"ep')
        assert train("simsiam", out) == 0
        assert not (out / ".config.json.k1ll3d.part").exists()
        assert end_of(out) == end_of(untouched)
    foreign = tmp_path / "foreign"
    (foreign / "checkpoints").mkdir(parents=True)
    (foreign / "checkpoints" / "mine.pt").touch()
    assert train("simsiam", foreign) == 2
    assert (foreign / "checkpoints" / "mine.pt").exists()


def test_a_clock_that_jumps(untouched: Path, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back and forth by years at every question for the time: neither the result nor the saving depends on it."""
    generator = random.Random(0)
    real = time.time

    def jumping() -> float:
        return real() + generator.uniform(-1e8, 1e8)

    with tally.trial("a clock that jumps"):
        monkeypatch.setattr(time, "time", jumping)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
        assert train("simsiam", tmp_path / "run") == 0
        assert end_of(tmp_path / "run") == end_of(untouched)


def test_an_index_under_a_clock_that_jumps(tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept index is used or not, but never when it is out of date."""
    from dssl.data.index import open_index

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "data"
    root.mkdir()
    for number, offset in enumerate((0, -(10**9), 10**9, 1, -1, 10**8)):
        with tally.trial("a clock that jumps"):
            monkeypatch.setattr(time, "time_ns", lambda offset=offset: int((time.time() + offset) * 1e9))
            (root / f"{number}.jpg").write_bytes(b"x")
            stamp = time.time() + offset - 1000
            os.utime(root, (stamp, stamp))
            assert len(open_index(root)) == number + 1
            assert len(open_index(root)) == number + 1


KERNELS = (
    "from dssl.augment.kernels.program import load_kernels; load_kernels(); "
    "from dssl.data.shapes import Shapes; Shapes(3).image(1)"
)


@pytest.mark.faults
def test_one_cache_of_compiled_kernels_made_twice_at_once_and_then_damaged(tally: Tally, tmp_path: Path) -> None:
    """Two processes that start with an empty cache, one that is killed in it, and then a cache that is cut short."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", KERNELS], env=environment, stderr=subprocess.PIPE, text=True)

    with tally.trial("two processes that build one cache of kernels", 2):
        doomed = start()
        both = [start(), start()]
        time.sleep(20)
        doomed.kill()
        doomed.communicate()
        for process in both:
            said = process.communicate(timeout=900)[1]
            assert process.returncode == 0, said
    kept = list((tmp_path / "numba").rglob("program.*.nb?"))
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for suffix in (".nbc", ".nbi"):
        with tally.trial("a cache of kernels that is cut short"):
            for path in (tmp_path / "numba").rglob(f"program.*{suffix}"):
                os.truncate(path, path.stat().st_size // 2)
            process = start()
            said = process.communicate(timeout=900)[1]
            assert process.returncode == 0, said
            assert "damaged and will be rebuilt" in said
