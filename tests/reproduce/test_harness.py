"""The harness with real processes: a kill of everything changes nothing, failures are named, finished work is kept."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dssl.errors import DsslError
from dssl.evaluation import protocols
from dssl.weights import checkpoint
from dssl_reproduce import Experiment, PaperCell, outcome
from dssl_reproduce.harness import gpus_here, run_job, run_jobs
from dssl_reproduce.outcome import finished
from dssl_reproduce.scales import job_of, jobs_of
from tests.reproduce import tiny

JOBS = jobs_of([tiny.TARGET], tiny.SCALE, seeds=(0,))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _start(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tests.reproduce.tiny", str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(folder: Path) -> list[str]:
    said: list[str] = []
    ended = tiny.run(folder, say=said.append)
    assert (ended.failed, ended.signal) == ({}, None)
    return said


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def _is_job(pid: int) -> bool:
    """Not the process with which multiprocessing tracks its resources."""
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("given", "expected"), [("6,7", ["6", "7"]), ("", ["0", "1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])]
)
def test_the_gpus_are_those_that_were_given(given: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: their number is a stand-in."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert gpus_here() == expected


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")
@pytest.mark.slow
def test_a_kill_of_the_harness_changes_nothing(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert [line.split()[0] for line in _finish(whole)] == ["starting", "finished"] * 2

    for name in ("runs", "cells"):  # the first run is finished
        shutil.copytree(
            whole / name, broken / name, ignore=lambda folder, names: [one for one in names if JOBS[1].name in one]
        )
    process = _start(broken)
    second = broken / "runs" / JOBS[1].name / "checkpoints"
    while not (steps := checkpoint.steps_in(second)) or steps[-1] < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    orphans = [pid for pid in _children(process.pid) if _is_job(pid)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(orphans) == 1

    said = _finish(broken)
    # the child of the killed harness ended by itself: it was not left running
    assert not any(_is_running(pid) for pid in orphans)
    assert (broken / "table.json").read_text() == (whole / "table.json").read_text()
    # the first run was not done again, and the second went on from its checkpoint
    assert said[0].startswith(f"resuming {JOBS[1].name}: ")
    assert [line.split()[0] for line in said] == ["resuming", "finished"]
    log = (broken / "runs" / f"{JOBS[1].name}.log").read_text()
    assert "resuming at step" in log
    for job in JOBS:
        results = [outcome.read(folder / "cells" / f"{job.name}.json") for folder in (whole, broken)]
        assert results[0].accuracies == results[1].accuracies
        assert results[0].accuracies["linear"].protocol["checkpoint"]["step"] == 12
        assert results[0].steps == results[1].steps == 12

    # what is committed names no folder of this machine
    text = (whole / "cells" / f"{JOBS[0].name}.json").read_text()
    assert str(tmp_path) not in text
    assert "shapes" not in text
    assert json.loads(text)["config"]["data"] == "cifar10"
    # but the commit of the code, where it can be told
    said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    if said.returncode == 0:
        assert json.loads(text)["versions"]["commit"].removesuffix("-dirty") == said.stdout.strip()
    # the probe and kNN have the labels of the whole source, though the runs saw a part of it
    protocol = outcome.read(whole / "cells" / f"{JOBS[0].name}.json").accuracies["knn"].protocol
    assert (protocol["train_images"], protocol["k"]) == (64, 20)

    # a result of other settings, or a damaged one, does not count as this run's
    place = tiny.place(whole)
    assert set(finished(JOBS, place)) == {job.name for job in JOBS}
    other = dataclasses.replace(outcome.read(place.result(JOBS[0])), fingerprint="0" * 16)
    other.write(place.result(JOBS[0]))
    assert set(finished(JOBS, place)) == {JOBS[1].name}
    place.result(JOBS[0]).write_text("{")
    with pytest.raises(DsslError, match=place.result(JOBS[0]).name):
        finished(JOBS, place)


def test_a_supervised_row_and_a_failure(tmp_path: Path) -> None:
    """One child trains with labels; the other finds no images, says so, and does not stop the first."""
    cells = (
        PaperCell(row="a", column="b", paper="1", experiment=Experiment(data="imagenet", method="supervised")),
        PaperCell(row="c", column="b", paper="2", experiment=Experiment(data="cifar10", method="supervised")),
    )
    target = dataclasses.replace(tiny.TARGET, cells=cells, compare_rows=())
    jobs = jobs_of([target], tiny.SCALE, seeds=(0,))
    place = dataclasses.replace(
        tiny.place(tmp_path), data={"cifar10": "shapes:64", "imagenet": str(tmp_path / "nowhere")}
    )
    said: list[str] = []
    ended = run_jobs(jobs, place, workers=2, say=said.append)
    assert list(ended.failed) == [jobs[0].name]
    assert "nowhere" in ended.failed[jobs[0].name]
    assert "Traceback" not in (place.runs / f"{jobs[0].name}.log").read_text()
    found = finished(jobs, place)
    assert list(found) == [jobs[1].name]
    one = found[jobs[1].name]
    assert one.steps == 3  # of 48 images; the batch is 16
    assert one.accuracies["supervised"].protocol["test_images"] == 2000
    low, high = one.accuracies["supervised"].interval
    assert low < one.accuracies["supervised"].accuracy < high


def test_a_stopped_supervised_row_resumes(tmp_path: Path) -> None:
    """SIGTERM while a row trains with labels: it has saved itself, and the result is that of one go."""
    experiment, scale = Experiment(data="cifar10", method="supervised"), tiny.SCALE
    training = dataclasses.replace(scale.training("cifar10"), epochs=10)
    job = job_of(experiment, dataclasses.replace(scale, training=lambda data: training), seed=0)
    whole, stopped = tiny.place(tmp_path / "whole"), tiny.place(tmp_path / "stopped")

    def stop_once_saved() -> None:
        folder = stopped.runs / job.name
        while not any(checkpoint.steps_in(path) for path in folder.glob("training-*/checkpoints")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop_once_saved)
    thread.start()
    assert run_job(job, stopped) == 128 + signal.SIGTERM
    thread.join()
    assert not stopped.result(job).exists()
    assert run_job(job, stopped) == run_job(job, whole) == 0
    results = [outcome.read(place.result(job)) for place in (whole, stopped)]
    assert results[0].accuracies == results[1].accuracies
    assert results[0].steps == results[1].steps == 30


@pytest.mark.parametrize(("kind", "features"), [("untrained", 256), ("pixels", 3 * 16 * 16)])
def test_baselines_need_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, features: int) -> None:
    """They are measured on the labels of the whole source, as the runs are, and not again once there is a result."""
    job = job_of(Experiment(data="cifar10", method=kind), tiny.SCALE, seed=0)
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, image_size=16))
    place = tiny.place(tmp_path)
    seen: list[tuple[int, ...]] = []
    predict = protocols.knn_predict
    monkeypatch.setattr(
        protocols, "knn_predict", lambda *given, **named: seen.append(given[0].shape) or predict(*given, **named)
    )
    assert run_job(job, place) == run_job(job, place) == 0
    assert seen == [(64, features)]
    one = finished([job], place)[job.name]
    assert (one.verdict, one.steps, one.config["limit"]) == (kind, 0, 48)
    assert {name: found.protocol["train_images"] for name, found in one.accuracies.items()} == {"knn": 64, "linear": 64}
