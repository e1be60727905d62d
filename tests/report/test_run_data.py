"""Runs read back from their folders: whole, half done, cut short, diverged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dssl.errors import DsslError
from dssl.methods import BYOLConfig
from dssl.report.run_report import find_runs, read_run
from dssl.run import RunFolder
from tests.report.run_folders import write_run


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", "dssl"))
    assert (run.name, run.config.method.name, run.steps, run.total, run.finished) == ("one", "simsiam", 96, 96, True)
    assert run.verdict.status == "healthy"
    assert run.curve("loss")[0] == pytest.approx((0.5, -0.9 * (1 - 2.718281828 ** (-12 / 96))))
    assert [epoch for epoch, _ in run.curve("knn")] == [2, 4, 6, 8, 10, 12]
    assert run.knn == run.curve("knn")[-1][1]
    assert run.images_per_second == 640
    # 92 steps of 128 images at 640 a second, and the first four at 80
    assert run.seconds == pytest.approx(92 * 128 / 640 + 4 * 128 / 80)
    thinned = run.thinned("loss", 7)
    assert len(thinned) <= 7
    assert thinned[-1] == run.curve("loss")[-1]


def test_the_worst_view_counts_and_a_prediction_that_is_narrower_than_its_projection(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", "dssl")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        if "spread" in record:
            record["spread"] = {"s1": 0.9, "s2": 0.8, "h1": 0.7, "h2": 0.9}
            record["source"] = {"s1": 0.5, "s2": 0.95}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(folder)
    assert run.spread == 0.5
    assert {value for _, value in run.curve("spread")} == {0.5}
    # of BYOL the watch judges the projections alone
    byol = dataclasses.replace(run, config=dataclasses.replace(run.config, method=BYOLConfig()))
    assert byol.spread == 0.7
    assert {value for _, value in byol.curve("spread")} == {0.7}


def test_a_collapsed_run_says_which_view_and_what_to_do(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", "heavy", floor=0.1, verdict="collapsed")
    verdict = read_run(folder).verdict
    assert verdict.status == "collapsed"
    assert "h1" in verdict.reason
    assert len(verdict.remedies) == 3
    # a run of a version that logged no reasons keeps its status
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        record.pop("reason", None)
        record.pop("remedies", None)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    earlier = read_run(folder).verdict
    assert (earlier.status, earlier.remedies) == ("collapsed", ())
    assert "not recorded" in earlier.reason


def test_a_run_in_the_middle_of_a_line_and_before_its_first_look(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "half", share=0.5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 52, "epoch": 6.5, "lo')
    run = read_run(folder)
    assert (run.steps, run.finished) == (48, False)
    (folder / "metrics.jsonl").unlink()
    empty = read_run(folder)
    assert (empty.steps, empty.knn, empty.spread, empty.images_per_second, empty.seconds) == (0, None, None, None, 0)
    assert empty.verdict.status == "too early"


@pytest.mark.parametrize("nothing", [None, float("nan")], ids=["null, as today", "NaN, as earlier versions"])
def test_what_is_not_a_number_is_left_out(tmp_path: Path, nothing: float | None) -> None:
    folder = write_run(tmp_path / "nan", "standard", verdict="healthy")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-2])
    last |= {"loss": nothing, "spread": dict.fromkeys(last["spread"], nothing), "verdict": "diverged"}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-2], json.dumps(last)]))
    run = read_run(folder)
    assert run.verdict.status == "diverged"
    assert all(value == value for name in ("loss", "spread") for _, value in run.curve(name))


def test_folders_of_runs_and_names_that_would_be_equal(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "same")
    assert [run.name for run in find_runs([tmp_path / "a"])] == ["same"]
    both = find_runs([tmp_path / "a" / "same", tmp_path / "b", tmp_path / "a", tmp_path / "b" / ".." / "a" / "same"])
    assert [run.name for run in both] == ["a/same", "b/same"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"config": {"epocs": 3}, "images": 1, "precision": "fp32"}'])
def test_what_is_not_a_run_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(DsslError, match=str(tmp_path / "x")):
        find_runs([tmp_path / "x"])
    (tmp_path / "x" / "config.json").write_text(content)
    with pytest.raises(DsslError, match=r"config\.json"):
        read_run(tmp_path / "x")
    with pytest.raises(DsslError, match=str(tmp_path / "nowhere")):
        find_runs([tmp_path / "nowhere"])


def test_a_run_on_coco_has_a_page_of_its_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", "dssl")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"task": "coco"}))
    with pytest.raises(DsslError, match=r"evaluate-coco.*evaluation\.html"):
        read_run(folder)


def test_the_log_is_read_line_by_line_and_only_whole_lines_survive_a_resume(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.metrics() == []
    whole = ['{"step": 1,  "loss": 2.5}', '{"step": 2, "spread": {"s1": null}}']
    folder.metrics_file.write_text(
        "\n".join([whole[0], "[]", '{"loss": 1}', '{"step": "x"}', whole[1], '{"step": 3, "lo'])
    )
    first, second = folder.metrics()
    assert first == {"step": 1, "loss": 2.5}
    assert second["spread"]["s1"] != second["spread"]["s1"]  # NaN
    folder.drop_metrics_after(2)
    assert folder.metrics_file.read_text().splitlines() == whole, "as they were written"
    folder.drop_metrics_after(1)
    assert folder.metrics_file.read_text().splitlines() == whole[:1]


def test_what_cannot_be_read_beside_runs_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program's configuration."""
    write_run(tmp_path / "mine", "dssl")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"architectures": ["ViT"]}')
    assert [run.name for run in find_runs([tmp_path])] == ["mine"]
    assert len(caplog.messages) == 1
    assert str(tmp_path / "hf" / "config.json") in caplog.text


@pytest.mark.parametrize("changes", [{"method": "codingrate"}, {"heavy": "rain"}])
def test_a_run_of_a_plugin_that_is_not_here_names_it(
    tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "plain", "dssl")
    folder = write_run(tmp_path / "own", "dssl")
    about = json.loads((folder / "config.json").read_text())
    about["config"] |= changes
    (folder / "config.json").write_text(json.dumps(about | {"plugins": [{"path": "mine.py", "sha256": "0"}]}))
    with pytest.raises(DsslError, match=f"{next(iter(changes.values()))}.* --plugin mine.py"):
        read_run(folder)
    assert [run.name for run in find_runs([tmp_path])] == ["plain"]
    assert "--plugin mine.py" in caplog.text


@pytest.mark.parametrize(
    ("below", "expected"), [(None, "healthy"), ({"reason": "r", "remedies": []}, "below where it started")]
)
def test_the_last_comparison_with_the_start_decides(tmp_path: Path, below: object, expected: str) -> None:
    """It comes after the last look, whose verdict is that of the epoch before."""
    folder = RunFolder(write_run(tmp_path / "one", "dssl", verdict="below where it started"))
    record = {"step": 96, "epoch": 12.0, "start": {"drift": 0.1, "held_out": {}} | ({"below": below} if below else {})}
    with folder.metrics_file.open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert read_run(folder.path).verdict.status == expected


def test_detectors_beside_runs_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", "dssl")
    (tmp_path / "detector").mkdir()
    (tmp_path / "detector" / "config.json").write_text(json.dumps({"task": "coco", "config": {}}))
    assert [run.name for run in find_runs([tmp_path])] == ["mine"]
    with pytest.raises(DsslError, match=r"dssl evaluate-coco.*detector/evaluation\.html"):
        find_runs([tmp_path / "detector"])
