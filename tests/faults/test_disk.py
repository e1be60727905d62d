"""Disks that are full, broken, read-only or gone: one line names the place, checkpoints stay whole, the run goes on later."""

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.commands.data import Arguments, run
from dssl.data import open_source
from dssl.errors import DsslError
from dssl.weights import checkpoint
from tests.faults.conftest import Tally
from tests.faults.inside import at_step, train
from tests.faults.processes import command, launch, under_strace
from tests.rejecting import rejects
from tests.train.running import end_of
from tests.train.test_resume import metrics_of

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
Disk = Callable[[str], Path]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("disk") / "untouched"
    assert train("simsiam", out) == 0
    return out


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only complaint that was made."""
    said = capsys.readouterr().err.splitlines()
    warnings = [line for line in said if line.startswith("dssl: ")]
    assert len(warnings) == 1, said
    assert said[-1] == warnings[0]
    assert not any("Traceback" in line or "Exception ignored" in line for line in said)
    return warnings[0]


def same_end(out: Path, untouched: Path) -> None:
    assert train("simsiam", out) == 0
    assert end_of(out) == end_of(untouched)
    assert metrics_of(out) == metrics_of(untouched)


def test_a_full_disk(small_disk: Disk, untouched: Path, tally: Tally, capsys: pytest.CaptureFixture[str]) -> None:
    """Room for two checkpoints of 2.4 MB and not for three."""
    with tally.trial("disk full while a checkpoint is written"):
        disk = small_disk("size=6200k")
        out = disk / "run"
        assert train("simsiam", out) == 2
        line = one_line(capsys)
        assert str(out / "checkpoints" / "step-000000003.safetensors") in line
        assert "it needs 2.4 MB" in line
        assert "rerun the command" in line
        assert checkpoint.steps_in(out / "checkpoints") == [1, 2]
        assert all(checkpoint.read(path) for path in (out / "checkpoints").glob("step-*"))
        assert len(list((out / "checkpoints").iterdir())) == 2, "the half-written file was left"
        subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
        same_end(out, untouched)


def test_a_disk_that_is_full_to_the_last_byte(
    small_disk: Disk, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a line of metrics fits, and no checkpoint has been written yet."""
    flags = ("--health.every", "1", "--checkpoint.every-minutes", "1000", "--checkpoint.every-epochs", "9")
    with tally.trial("disk full while metrics are written"):
        out = small_disk("size=60m") / "run"
        filler = out.parent / "filler"

        def fill() -> None:
            with filler.open("wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        continue

        with monkeypatch.context() as patch:
            at_step(patch, 1, fill)
            assert train("simsiam", out, *flags) == 2
        assert str(out / "metrics.jsonl") in (line := one_line(capsys))
        assert os.strerror(errno.ENOSPC) in line
        filler.unlink()
        assert train("simsiam", out, *flags) == train("simsiam", tmp_path / "untouched", *flags) == 0
        assert end_of(out) == end_of(tmp_path / "untouched")
        assert metrics_of(out) == metrics_of(tmp_path / "untouched")


def test_a_disk_that_is_full_before_the_run_begins(
    small_disk: Disk, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("disk full at the start"):
        disk = small_disk("size=64k")
        (disk / "filler").write_bytes(bytes(60_000))
        assert train("simsiam", disk / "run") == 2
        line = one_line(capsys)
        assert str(disk / "run") in line
        assert os.strerror(errno.ENOSPC) in line


def test_a_read_only_disk(
    small_disk: Disk, untouched: Path, tally: Tally, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tally.trial("read-only disk", 2):
        disk = small_disk("size=60m")
        out = disk / "run"

        def stop() -> None:
            signal.raise_signal(signal.SIGTERM)

        with monkeypatch.context() as patch:
            at_step(patch, 2, stop)
            assert train("simsiam", out) == 143
        before = end_of(out)
        capsys.readouterr()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for place in (out, disk / "new"):
            assert train("simsiam", place) == 2
            line = one_line(capsys)
            assert str(place) in line
            assert os.strerror(errno.EROFS) in line
        assert end_of(out) == before
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        same_end(out, untouched)


def test_a_folder_that_vanishes(
    untouched: Path, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network disk that is gone for a while."""
    with tally.trial("the run's folder vanishes"):
        out, away = tmp_path / "run", tmp_path / "away"
        with monkeypatch.context() as patch:
            at_step(patch, 2, lambda: out.rename(away))
            assert train("simsiam", out) == 2
        line = one_line(capsys)
        assert str(out / "checkpoints" / "step-000000003.safetensors") in line
        assert os.strerror(errno.ENOENT) in line
        assert "it needs 2.4 MB" in line
        assert not out.exists(), "a folder that is gone must not be made anew behind the user's back"
        away.rename(out)
        same_end(out, untouched)


# config.json, views.png and the first checkpoint take two syncs each, of the file and of its folder
FAULTS = {
    "EIO on fsync of the file": "inject=fsync:error=EIO:when=7",
    "EIO on fsync of the folder": "inject=fsync:error=EIO:when=8",
    "EIO on write": "inject=write:error=EIO:when=28",
    "ENOSPC on write": "inject=write:error=ENOSPC:when=28",
    "EDQUOT on write": "inject=write:error=EDQUOT:when=28",
    "EROFS on rename": "inject=rename:error=EROFS:when=4",
    "EIO on rename": "inject=rename:error=EIO:when=4",
    "ENOENT on rename": "inject=rename:error=ENOENT:when=4",
}


@needs_strace
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if fault == "EIO on fsync of the file" else [pytest.mark.faults])
        for fault in FAULTS
    ],
)
def test_errors_of_the_disk_while_it_saves(fault: str, untouched: Path, tally: Tally, tmp_path: Path) -> None:
    with tally.trial("EIO, ENOSPC, EDQUOT, EROFS or ENOENT from a call of a save"):
        out = tmp_path / "run"
        child = launch(command("simsiam", out), tmp_path / "log", held=True)
        injection = FAULTS[fault]
        call = injection.partition("=")[2].partition(":")[0]
        tracer = under_strace(child, "-e", f"trace={call}", "-e", injection)
        assert child.wait() == 2, child.said()
        tracer.wait(30)
        warnings = [line for line in child.said().splitlines() if line.startswith("dssl: ")]
        assert len(warnings) == 1, child.said()
        assert "Traceback" not in child.said()
        assert str(out / "checkpoints" / "step-") in warnings[0] or str(out / "metrics.jsonl") in warnings[0]
        assert checkpoint.newest_good(out / "checkpoints") is not None
        same_end(out, untouched)


@needs_strace
def test_folders_that_cannot_be_synced(untouched: Path, tally: Tally, tmp_path: Path) -> None:
    """As those of vboxsf and of some file systems in user space; files can."""
    with tally.trial("EINVAL from fsync of every folder"):
        out = tmp_path / "run"
        (out / "checkpoints").mkdir(parents=True)
        child = launch(command("simsiam", out), tmp_path / "log", held=True)
        folders = ("-P", str(out), "-P", str(out / "checkpoints"))
        tracer = under_strace(child, *folders, "-e", "trace=fsync", "-e", "inject=fsync:error=EINVAL")
        assert child.wait() == 0, child.said()
        tracer.wait(30)
        assert "EINVAL" in (tmp_path / "log.strace").read_text()
        same_end(out, untouched)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_a_full_disk_while_shards_are_packed(small_disk: Disk, tally: Tally, tmp_path: Path, form: str) -> None:
    """Room for two shards of four: whole shards stay, an incomplete set is not taken for the whole, the command starts over."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / "photos").mkdir()
    generator = np.random.default_rng(0)
    for number in range(40):
        Image.fromarray(generator.integers(0, 256, (60, 60, 3), np.uint8)).save(tmp_path / "photos" / f"{number}.png")
    with tally.trial(f"disk full while {form} shards are packed"):
        disk = small_disk("size=300k")
        words = Arguments(action="pack", data=str(tmp_path / "photos"), out=disk / "out", format=form, shard=10)  # type: ignore[arg-type]
        with rejects(disk / "out", os.strerror(errno.ENOSPC), "of 40 images", "0.00 GB"):
            run(words)
        shards = [f"train-0000{number}-of-00004.{form}" for number in range(2)]
        assert sorted(path.name for path in (disk / "out").iterdir()) == ["packed.json", *shards]
        with pytest.raises(DsslError, match="incomplete"):
            open_source(str(disk / "out"))
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        assert run(words) == 0
        assert len(open_source(str(disk / "out"))) == 40
