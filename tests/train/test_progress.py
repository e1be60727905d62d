"""Healthy is not good: a run says how it compares with its own start, and names no checkpoint healthy that was not judged."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dssl.cli import main
from dssl.config import HealthConfig, RunConfig
from dssl.data import open_source
from dssl.recipes import recipe
from dssl.report.run_report import read_run
from dssl.run import RunFolder
from dssl.training.baseline import Baseline, Comparison
from dssl.training.pretrain import train
from dssl.weights import checkpoint
from tests.train.test_resume import draw
from tests.train.test_train import TINY

SHORT = replace(TINY, threads=1)


class _Given(Baseline):
    """Without a run: what was measured is given."""

    def __init__(
        self, config: RunConfig, now: Comparison, *, before: dict[str, float], retrieval: float | None
    ) -> None:
        self.config, self.latest = config, now
        self.start = replace(now, held_out=before, retrieval=retrieval)
        self._finders = open_source("shapes:100")


@pytest.mark.parametrize(
    ("now", "p_values", "words"),
    [
        ((51.0, 60.0), (0.001, 0.4), "better than untrained (kNN 44.0 -> 51.0%, probe 48.0 -> 60.0%)"),
        ((51.0, 60.0), (0.06, 0.4), "no better than untrained yet (kNN 44.0 -> 51.0%, probe 48.0 -> 60.0%)"),
        ((37.0, 48.0), (0.01, 0.9), "worse than untrained (kNN 44.0 -> 37.0%, probe 48.0 -> 48.0%)"),
        ((37.0, 60.0), (0.01, 0.01), "no better than untrained yet (kNN 44.0 -> 37.0%, probe 48.0 -> 60.0%)"),
    ],
)
def test_progress_with_labels(now: tuple[float, float], p_values: tuple[float, float], words: str) -> None:
    names = ("kNN", "probe")
    measured = Comparison(
        drift=0.5, feature_rank=9.0, held_out=dict(zip(names, now, strict=True)),
        p_values=dict(zip(names, p_values, strict=True)),
    )  # fmt: skip
    before = {"kNN": 44.0, "probe": 48.0}
    baseline = _Given(recipe("shapes"), measured, before=before, retrieval=None)
    assert baseline.progress(finished=False) == words
    assert baseline.progress(finished=True) == words.replace(" yet", "")
    adapted = _Given(recipe("adapt"), measured, before=before, retrieval=None)
    assert adapted.progress(finished=False) == words.replace("untrained", "its start")
    robust = _Given(recipe("robust"), measured, before=before, retrieval=None)  # it means to stay where it was
    word = words.split()[0].replace("no", "level")
    assert robust.progress(finished=False).startswith(word)


@pytest.mark.parametrize(("now", "word"), [(64.0, "better"), (63.0, "no better"), (37.0, "no better"), (36.0, "worse")])
def test_progress_without_labels(now: float, word: str) -> None:
    """Of 100 images, 50 % against 64 %: two standard errors of the difference are 13.9."""
    measured = Comparison(drift=0.5, feature_rank=9.0, held_out={}, p_values={}, retrieval=now)
    baseline = _Given(recipe("shapes"), measured, before={}, retrieval=50.0)
    said = baseline.progress(finished=True)
    assert said == f"{word} than untrained (a view finds its image 50.0 -> {now:.1f}%)"


def test_a_run_with_labels_measures_its_start(tmp_path: Path) -> None:
    ended = train(replace(SHORT, epochs=3, knn_every=2), tmp_path / "run")
    records = [record for record in RunFolder(tmp_path / "run").metrics() if "start" in record]
    assert [record["step"] for record in records] == [0, 4, 8, 12]
    assert set(records[0]["start"]["held_out"]) == {"kNN", "probe"}
    assert records[-1]["start"]["progress"] == ended.progress
    assert "than untrained (kNN" in ended.progress
    assert ended.exit_code == 0
    again = train(replace(SHORT, epochs=3, knn_every=2), tmp_path / "run")  # finished: it is not forgotten
    assert again.progress == ended.progress
    assert read_run(tmp_path / "run").since_start("kNN")[0][0] == 0.0


def test_a_resumed_run_has_the_same_start(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ended = {}
    for out in (whole, broken):
        ended[out] = train(replace(SHORT, epochs=3), out).progress
    checkpoint.path_at(broken / "checkpoints", 12).unlink()
    assert train(replace(SHORT, epochs=3), broken).progress == ended[whole]


def test_a_run_without_labels_measures_whether_views_find_their_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, out = draw(tmp_path / "images", 40), tmp_path / "run"
    words = shlex.split("--encoder whitened --image-size 16 --batch-size 8 --epochs 2 --threads 1 --precision fp32")
    assert main(["train", "folder", "--data", str(images), "--out", str(out), *words]) == 0
    records = [record["start"] for record in RunFolder(out).metrics() if "start" in record]
    assert all(0 <= record["retrieval"] <= 100 and record["held_out"] == {} for record in records)
    verdict, file, following = capsys.readouterr().out.splitlines()
    assert "than untrained (a view finds its image" in verdict
    assert file == str(checkpoint.path_at(out / "checkpoints", 10))
    assert following == f"next: dssl explore {out}"


@pytest.mark.parametrize(
    "change", [{"knn_every": 0}, {"health": HealthConfig(every=2, compare_with_start=False)}], ids=["never", "off"]
)
def test_a_start_is_not_measured_in_vain(change: dict[str, object], tmp_path: Path) -> None:
    ended = train(replace(SHORT, epochs=1, **change), tmp_path / "run")  # type: ignore[arg-type]  # any of its fields
    assert ended.progress == ""
    assert not any("start" in record for record in RunFolder(tmp_path / "run").metrics())
    assert not (tmp_path / "run" / "start.safetensors").exists()


def test_a_checkpoint_that_was_not_judged_is_not_the_last_healthy_one(tmp_path: Path) -> None:
    ended = train(replace(SHORT, epochs=1, knn_every=0), tmp_path / "run")
    assert ended.verdict.status == "too early"
    assert ended.checkpoint is not None
    assert checkpoint.read(ended.checkpoint).header["last_healthy"] is None
