"""Trackers: what they get, once, over kills and resumes; and that one that fails or hangs costs the run nothing."""

import json
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dssl
from dssl import plugins, trackers
from dssl.cli import main
from dssl.errors import DsslError
from dssl.log import Log
from dssl.run import RunFolder
from dssl.state import HealthCheck, RunLength, Verdict
from dssl.trackers import Background, Tracker, register_tracker, trackers_of

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"
TINY = [
    "--encoder", "small", "--image-size", "16", "--batch-size", "16", "--threads", "1", "--precision", "fp32", "--epochs", "2",
    "--data", "shapes:64", "--health.every", "2", "--method.hidden", "32", "--knn-every", "0", "--health.no-compare-with-start",
]  # fmt: skip


class Recorder(Tracker):
    """Keeps what it gets, by the id of the run."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012 (of all that are made, in a test)
    release: threading.Event

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        self.calls.append(("start", run_id, dict(parameters)))
        return run_id or "first"

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.calls.append(("scalars", dict(values), step))

    def picture(self, name: str, pixels: np.ndarray) -> None:
        self.calls.append(("picture", name, pixels.shape))

    def summary(self, values: Mapping[str, float | str], step: int) -> None:
        self.calls.append(("summary", dict(values), step))

    def close(self) -> None:
        self.calls.append(("close",))


class Failing(Recorder):
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        raise RuntimeError("no connection")


class Hanging(Recorder):
    wait = 0.1

    def start(self, run: Path, *, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        self.release.wait()
        return "never"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before, loaded = dict(trackers.TRACKERS), dict(plugins._loaded)
    Recorder.calls, Recorder.release = [], threading.Event()
    register_tracker("recorder", Recorder)
    register_tracker("failing", Failing)
    register_tracker("hanging", Hanging)
    yield
    Recorder.release.set()
    for table, content in ((trackers.TRACKERS, before), (plugins._loaded, loaded)):
        table.clear()
        table.update(content)


def _points(calls: list[tuple[Any, ...]]) -> list[tuple[str, int]]:
    return [(name, call[2]) for call in calls if call[0] == "scalars" for name in call[1]]


def test_a_tracker_gets_curves_views_settings_verdict_and_evaluation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "shapes", *TINY, "--out", str(run), "--log", "recorder"]) == 0
    calls, records = Recorder.calls, RunFolder(run).metrics()
    assert calls[0][:2] == ("start", None)
    assert calls[0][2]["optimizer.rate"] == json.loads((run / "config.json").read_text())["config"]["optimizer"]["rate"]
    losses = {call[2]: call[1]["loss"] for call in calls if call[0] == "scalars" and "loss" in call[1]}
    assert losses == {record["step"]: record["loss"] for record in records if "loss" in record}
    assert [call[1] for call in calls if call[0] == "picture"] == ["views"]
    assert calls[-2] == ("summary", {"verdict": dssl.open_run(run).verdict.status}, 8)
    assert calls[-1] == ("close",)
    assert "recorder" not in (run / "config.json").read_text()  # no part of what the run is
    Recorder.calls.clear()
    assert main(["evaluate", str(run), "--protocols", "knn", "--no-page", "--no-references", "--threads", "1"]) == 0
    results = json.loads((run / "evaluation" / "evaluation.json").read_text())["results"]
    expected = {f"evaluation/{result['name']}": result["accuracy"] for result in results}
    assert Recorder.calls[1:] == [("summary", expected, 8), ("close",)]
    assert Recorder.calls[0][:2] == ("start", "first")


def test_trackers_are_kept_dropped_and_added_when_a_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "shapes", *TINY, "--out", str(run)]) == 0
    assert not Recorder.calls
    # a run that began without it: the views are there, and the curve begins where it is added
    assert dssl.train("shapes", data="shapes:64", out=run, epochs=4, log=["recorder"]).path == run
    assert {call[1] for call in Recorder.calls if call[0] == "picture"} == {"views"}
    assert min(step for _, step in _points(Recorder.calls)) > 8
    Recorder.calls.clear()
    assert main(["train", "--resume", str(run)]) == 0  # keeps it
    assert Recorder.calls[0][:2] == ("start", "first")
    assert not _points(Recorder.calls)
    Recorder.calls.clear()
    assert main(["train", "--resume", str(run), "--log"]) == 0  # drops it
    assert main(["train", "--resume", str(run)]) == 0
    assert not Recorder.calls
    assert trackers_of(RunFolder(run)) == ()
    assert main(["train", "--resume", str(run), "--log", "recorder"]) == 0
    assert Recorder.calls[0][:2] == ("start", "first")
    with pytest.raises(DsslError, match="recorder"):
        dssl.train("shapes", out=tmp_path / "other", log=["recoder"])
    assert not (tmp_path / "other").exists()


def test_steps_that_are_made_again_after_a_kill_are_not_logged_again(tmp_path: Path) -> None:
    """The process dies at step 30, after the checkpoint of step 20; one curve has no point at step 30 yet."""
    folder, length = RunFolder(tmp_path), RunLength(total=50, steps_per_epoch=10, round=10, counted="epoch")
    for start, steps, both in ((0, (10, 20, 30), (10, 20)), (20, (30, 40), (30, 40))):
        with Log(folder, start=start, length=length, batch_size=4, active=True, trackers=["recorder"]) as log:
            for step in steps:
                log.check(
                    HealthCheck(step=step - 1, loss=1.0, record={}, text="", verdict=Verdict("healthy", 0)), rate=0.1
                )
                if step in both:
                    log.knn(step, {"knn": 50.0})
    points = [point for point in _points(Recorder.calls) if point[0] in ("loss", "knn")]
    assert sorted(points) == sorted((name, step) for name in ("loss", "knn") for step in (10, 20, 30, 40))


def test_a_tracker_that_fails_is_one_warning_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    assert main(["train", "shapes", *TINY, "--out", str(run), "--log", "failing", "recorder"]) == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in said if "no connection" in line] == [line for line in said if line.startswith("failing")]
    assert len([line for line in said if line.startswith("failing")]) == 1
    assert len({step for _, step in _points(Recorder.calls)}) == len({r["step"] for r in RunFolder(run).metrics()})


def test_a_tracker_that_hangs_holds_neither_the_run_nor_its_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Background("hanging", RunFolder(tmp_path), parameters={})
    for step in range(3 * trackers._QUEUED):  # would wait for ever if one of them did
        tracker.scalars({"loss": 0.0}, step)
    assert tracker._calls.qsize() == trackers._QUEUED
    tracker.close()
    assert len([record for record in caplog.records if record.getMessage().startswith("hanging")]) == 1
    assert tracker._thread.daemon


def test_the_tracker_of_the_documentation_comes_from_a_plugin(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = (block for block in blocks if "register_tracker" in block)
    (tmp_path / "table.py").write_text(example)
    run = tmp_path / "run"
    assert (
        main(["train", "shapes", *TINY, "--out", str(run), "--plugin", str(tmp_path / "table.py"), "--log", "table"])
        == 0
    )
    rows = [line.split(",") for line in (run / "curves.csv").read_text().splitlines()]
    losses = {int(step): float(value) for step, name, value in rows if name == "loss"}
    assert losses == {record["step"]: record["loss"] for record in RunFolder(run).metrics() if "loss" in record}


def test_a_tracker_that_is_not_installed_is_an_error_before_the_run(tmp_path: Path) -> None:
    class Missing(Recorder):
        package = "a_package_that_nobody_has"

    register_tracker("missing", Missing)
    with pytest.raises(DsslError, match="a_package_that_nobody_has"):
        dssl.train("shapes", out=tmp_path / "run", log=["missing"])
    with pytest.raises(DsslError, match="wandb"):
        register_tracker("wandb", Recorder)
