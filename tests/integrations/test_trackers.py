"""The real trackers, offline: after a kill and a resume every curve has each point once, in the tracker's own files."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dssl.run import RunFolder

REASON = "an extra of dssl; make test-integrations has it"
LOGGING = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from dssl.log import Log, show_messages
from dssl.run import RunFolder
from dssl.state import HealthCheck, RunLength, Verdict
from dssl.trackers import add_to_summary, trackers_of

place, name, start, stop, ends = sys.argv[1:]
folder, start, stop = RunFolder(Path(place)), int(start), int(stop)
folder.path.mkdir(exist_ok=True)
show_messages()
length = RunLength(total=60, steps_per_epoch=4, round=4, counted="epoch")
with Log(folder, start=start, length=length, batch_size=4, active=True, trackers=[name], parameters={"batch_size": 16}) as log:
    if start == 0:
        log.gallery(np.zeros((8, 12, 3), np.uint8))
    for step in range(start + 1, stop + 1):
        record, verdict = {"spread": {"h1->s1": 0.5}}, Verdict("healthy", 0)
        log.check(HealthCheck(step=step - 1, loss=1 / step, record=record, text="", verdict=verdict), rate=0.1)
    while ends == "dies":  # when the tracker has got everything, or is about to
        file = folder.trackers / f"{name}.json"
        if file.is_file() and json.loads(file.read_text()).get("steps", {}).get("loss") == stop:
            time.sleep(4)  # wandb and Trackio write every second
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
    log.summary({"verdict": "healthy"}, stop)
assert trackers_of(folder) == (name,)
folder.write_config({"config": {"batch_size": 16}})
add_to_summary(folder, {"evaluation/knn k=20": 41.5}, step=stop)
"""
"""A run's log by itself: steps 1 to 40 and a kill, then, from the checkpoint of step 20, steps 21 to 60 and an evaluation."""


def _environment(folder: Path, **variables: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    own = {
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return known | own | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | variables


def _python(words: list[str], folder: Path, *, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output, which goes to a file: a tracker's own process may outlive the one that is killed."""
    with (folder / "log").open("wb") as output:
        command = [sys.executable, *words]
        ended = subprocess.run(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=300
        )
    return ended.returncode, (folder / "log").read_text()


def _tracked(folder: Path, name: str) -> Path:
    run = folder / "run"
    for start, stop, ends in ((0, 40, "dies"), (20, 60, "lives")):
        words = ["-c", LOGGING, str(run), name, str(start), str(stop), ends]
        code, said = _python(words, folder, environment=_environment(folder))
        assert code == (-9 if ends == "dies" else 0), said
        assert "goes on without it" not in said
    return run


def _check(points: list[tuple[int, float]]) -> None:
    """No point twice; all after the kill, and all before it but the last ones, which the kill may have taken."""
    assert max(Counter(step for step, _ in points).values()) == 1
    assert dict(points) == pytest.approx({step: 1 / step for step, _ in points})
    missing = set(range(1, 61)) - dict(points).keys()
    assert missing == {step for step in range(1, 41) if step >= min(missing, default=41)}
    assert len(missing) < 40


def _wandb_records(file: Path) -> Iterator[Any]:
    """wandb's file is a log of LevelDB: blocks of 32 KiB, records in parts with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        if kind == 0:
            break
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason=REASON)
    run = _tracked(tmp_path, "wandb")
    run_id = json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    files = sorted((run / "trackers" / "wandb").glob(f"offline-run-*-{run_id}/*.wandb"))
    assert len(files) == 3  # killed, resumed, evaluated
    points, summary, pictures, settings = [], dict[str, Any](), 0, dict[str, Any]()
    for file in files:
        for record in _wandb_records(file):
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "loss" in row:
                points.append((record.history.step.num, float(row["loss"])))
            pictures += any("image-file" in value for value in row.values())
            summary |= {"/".join(item.nested_key) or item.key: item.value_json for item in record.summary.update}
            settings |= {item.key or item.nested_key[0]: item.value_json for item in record.run.config.update}
    _check(points)
    assert pictures == 1
    assert (summary["verdict"], summary["evaluation/knn k=20"]) == ('"healthy"', "41.5")
    assert settings["batch_size"] == "16"


@pytest.mark.filterwarnings("ignore")  # of MLflow's own use of SQLAlchemy
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason=REASON)
    run = _tracked(tmp_path, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run / 'trackers' / 'mlflow.db'}")
    run_id = json.loads((run / "trackers" / "mlflow.json").read_text())["id"]
    for curve in ("loss", "spread/h1 to s1"):
        points = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, curve)]
        assert len(points) >= 59  # it is told at once; the call at the kill may be lost
        _check(points if curve == "loss" else [(step, 1 / step) for step, _ in points])
    (tracked,) = client.search_runs([client.get_experiment_by_name("dssl").experiment_id])
    assert (tracked.info.run_id, tracked.info.status) == (run_id, "FINISHED")
    assert tracked.data.params["batch_size"] == "16"
    assert tracked.data.tags["verdict"] == "healthy"
    assert tracked.data.metrics["evaluation/knn k_20"] == 41.5
    assert [file.path for file in client.list_artifacts(run_id)] == ["views.png"]
    assert list((run / "trackers" / "mlflow").rglob("views.png"))


def test_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason=REASON)
    run = _tracked(tmp_path, "trackio")
    name = json.loads((run / "trackers" / "trackio.json").read_text())["id"]
    with closing(sqlite3.connect(tmp_path / "trackio" / "dssl.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        config = dict(database.execute("select run_name, config from configs").fetchall())
    assert {row[0] for row in rows} == {name}
    records = [(step, json.loads(metrics)) for _, step, metrics in rows]
    _check([(step, row["loss"]) for step, row in records if "loss" in row])
    values = {key: value for _, row in records for key, value in row.items()}
    assert values["evaluation/knn k=20"] == 41.5
    assert "healthy" in json.dumps(values["verdict"])
    assert sum("views" in row for _, row in records) == 1
    assert json.loads(config[name])["batch_size"] == 16


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_server_that_never_answers_costs_the_run_a_bounded_wait(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name, reason=REASON)
    run = tmp_path / "run"
    words = [
        "-m", "dssl", "train", "shapes", "--encoder", "small", "--image-size", "16", "--batch-size", "16", "--threads", "1",
        "--precision", "fp32", "--epochs", "2", "--data", "shapes:64", "--knn-every", "0", "--out", str(run), "--log", name,
        "--health.no-compare-with-start",
    ]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:  # connects, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = _environment(
            tmp_path, WANDB_MODE="online", WANDB_BASE_URL=url, WANDB_API_KEY="0" * 40, MLFLOW_TRACKING_URI=url,
            TRACKIO_SERVER_URL=f"{url}?write_token=none",
        )  # fmt: skip
        code, said = _python(words, tmp_path, environment=environment)
    assert code == 0, said
    assert max(record["step"] for record in RunFolder(run).metrics()) == 8
    warnings = [line for line in said.splitlines() if line.startswith(f"{name}: ") and "goes on without it" in line]
    assert len(warnings) == 1 or (name == "trackio" and not warnings)  # it gives up by itself and keeps a local copy
