"""The table of accuracy under corruption: what a run keeps, when it counts as finished, and its paired intervals."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from dssl.augment import KINDS, kinds_seen
from dssl.data import open_source
from dssl.evaluation.protocols import Benchmark
from dssl.evaluation.robustness import robustness
from dssl.weights.encoder import FeatureStore
from dssl.weights.load import open_weights
from dssl_reproduce import CORRUPTIONS, ROBUSTNESS, Target, our_cell, outcome
from dssl_reproduce.harness import run_job
from dssl_reproduce.outcome import Corrupted, Outcome, finished, pack_counts
from dssl_reproduce.scales import SCALES, job_of, jobs_of
from dssl_reproduce.table import build, document, picture, plain
from tests.reproduce import tiny

SCALE = SCALES["cpu-few"]
CONDITIONS = {"clean": 1, "seen": 25, "not seen": 50, "geometry": 15}


def _images(folder: Path) -> str:
    """Two classes of noise, one darker than the other: 64 images to train on, 40 to test."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 32), ("val", 20)):
        for label, high in (("dark", 140), ("light", 256)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, high, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    return str(folder)


def test_a_finished_run_is_only_measured_and_keeps_what_every_image_got(tmp_path: Path) -> None:
    """A result of before is not enough for this table; the run itself is not trained again."""
    scale = dataclasses.replace(
        tiny.SCALE, settings=lambda data, method: dataclasses.replace(tiny.settings(data, method), image_size=16)
    )
    cell = our_cell("dssl", "SimSiam, linear probe: clean", tiny.DSSL, measure=("linear", "clean"))
    target = Target(name="r", title="R", measure="accuracy, %", complete=True, cells=(cell,))
    data = _images(tmp_path / "images")
    place = dataclasses.replace(tiny.place(tmp_path), data={"cifar10": data})
    before = job_of(tiny.DSSL, scale, seed=0)
    (job,) = jobs_of([target], scale, seeds=(0,))
    assert (job.name, job.fingerprint) == (before.name, before.fingerprint)
    assert run_job(before, place) == 0
    first = outcome.read(place.result(before))
    assert (set(finished([before], place)), set(finished([job], place))) == ({job.name}, set())
    assert "corruptions" not in place.result(before).read_text()
    checkpoints = {path: path.stat().st_mtime_ns for path in (place.runs / job.name / "checkpoints").rglob("*")}

    assert run_job(job, place) == 0
    assert checkpoints == {path: path.stat().st_mtime_ns for path in (place.runs / job.name / "checkpoints").rglob("*")}
    found = finished([job], place)[job.name]
    assert set(finished([before], place)) == {job.name}
    assert found.accuracies == first.accuracies
    assert str(tmp_path) not in place.result(job).read_text()

    sources = [open_source(data, split=split) for split in ("train", "test")]
    benchmark = Benchmark.of(FeatureStore(open_weights(place.runs / job.name)), *sources, seed=0)
    expected = robustness(benchmark, familiarity=kinds_seen("corrupt"))
    seen = {"gaussian-noise", "gaussian-blur", "jpeg", "contrast", "brightness"}
    geometry = {kind for kind, about in KINDS.items() if about.group == "geometry"}
    kinds = {"seen": seen, "not seen": set(KINDS) - seen - geometry, "geometry": geometry}
    assert found.corruptions is not None
    for kind, protocol in (("linear", "linear probe"), ("knn", "knn k=20")):
        right, kept = expected.right[protocol], found.corruptions[kind]
        assert kept.conditions == CONDITIONS
        assert np.array_equal(kept.counts("clean"), right[0])
        for name, chosen in kinds.items():
            rows = [expected.row(one, severity) for one in chosen for severity in (1, 2, 3, 4, 5)]
            assert np.array_equal(kept.counts(name), right[rows].sum(axis=0))
            score = found.score((kind, name))
            assert score is not None
            assert score.accuracy == pytest.approx(100 * right[rows].mean())
        assert kept.accuracies["fog"][4] == pytest.approx(100 * right[expected.row("fog", 5)].mean(), abs=1e-3)
        assert kept.protocol["test_images"] == 40
    made = build(target, scale, seeds=(0,), outcomes={job.name: found})
    assert made.cells["dssl", cell.column].mean == pytest.approx(100 * expected.right["linear probe"][0].mean())


def _outcomes(seeds: tuple[int, ...]) -> dict[str, Outcome]:
    """Of two rows of SimSiam: 200 images with random counts."""
    generator = np.random.default_rng(0)
    outcomes = {}
    for job in jobs_of([ROBUSTNESS], SCALE, seeds=seeds, rows=("2 standard pairs", "DSSL")):
        if job.name.startswith("cifar10-simsiam"):
            counts = {name: generator.integers(0, high + 1, 200) for name, high in CONDITIONS.items()}
            kept = Corrupted(
                accuracies={}, conditions=CONDITIONS, protocol={"test_fingerprint": "same"},
                right={name: pack_counts(values) for name, values in counts.items()},
            )  # fmt: skip
            outcomes[job.name] = Outcome(
                name=job.name, scale="cpu-few", seed=job.config.seed, fingerprint=job.fingerprint, config={},
                training=None, verdict="healthy", accuracies={}, corruptions={"linear": kept, "knn": kept}, steps=1,
                seconds=1.0, versions={}, data={},
            )  # fmt: skip
    return outcomes


def test_differences_are_paired_by_image_and_seed() -> None:
    """Against the formula written out: the mean over seeds of each image, and the pooled variance of the seeds."""
    outcomes, seeds = _outcomes((0, 1, 2)), (0, 1, 2)
    made = build(ROBUSTNESS, SCALE, seeds=seeds, outcomes=outcomes)
    (found,) = [
        one for one in made.comparisons
        if one.where == "SimSiam, linear probe: 10 other kinds: DSSL over 2 standard pairs"
    ]  # fmt: skip

    def arm(graph: str) -> np.ndarray:
        runs = [run for name, run in outcomes.items() if f"-{graph}-" in name]
        kept = [(run.corruptions or {})["linear"].counts("not seen") for run in runs]
        return 100 * np.stack(kept).astype(float) / 50

    dssl, pairs = arm("dssl"), arm("standard2")
    difference = (dssl - pairs).mean(axis=0)
    pooled = math.sqrt((dssl.mean(axis=1).var(ddof=1) + pairs.mean(axis=1).var(ddof=1)) / 2)
    of_images = stats.norm.ppf(0.975) * difference.std(ddof=1) / math.sqrt(200)
    of_seeds = stats.t.ppf(0.975, 4) * pooled * math.sqrt(2 / 3)
    assert found.error == pytest.approx(math.hypot(of_images, of_seeds))
    assert found.ours == f"{difference.mean():+.1f} (±{found.error:.1f}, paired)"


def test_a_difference_is_over_the_seeds_that_both_rows_have() -> None:
    """A row with a seed more than the other: the difference and its pairing are those of the common seeds."""
    outcomes = _outcomes((0, 1, 2))
    (extra,) = [name for name in outcomes if "-dssl-" in name and "-seed2-" in name]
    fewer = {name: one for name, one in outcomes.items() if name != extra}
    where = "SimSiam, kNN: geometry: DSSL over 2 standard pairs"
    made = build(ROBUSTNESS, SCALE, seeds=(0, 1, 2), outcomes=fewer)
    (found,) = [one for one in made.comparisons if one.where == where]
    (expected,) = [
        one for one in build(ROBUSTNESS, SCALE, seeds=(0, 1), outcomes=outcomes).comparisons if one.where == where
    ]
    assert found.ours.split()[0] == expected.ours.split()[0]
    assert found.ours.endswith(", paired)")


def test_a_grid_for_each_method_and_classifier() -> None:
    made = build(ROBUSTNESS, SCALE, seeds=(0, 1), outcomes=_outcomes((0,)))
    text = document(made, command="dssl reproduce robustness")
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("## SimSiam")] == ["## SimSiam, linear probe", "## SimSiam, kNN"]
    assert "|  | " + " | ".join(CORRUPTIONS.values()) + " |" in lines
    assert "| difference | " + " | ".join(CORRUPTIONS.values()) + " |" in lines
    (row, *_) = [line for line in lines if line.startswith("| DSSL |")]
    assert row.count("[1 of 2 seeds]") == 4
    assert not any(line.startswith(("## BYOL", "## SimCLR")) for line in lines)  # not run: only said so
    assert "- Not run: SimCLR, linear probe: clean" in text
    assert "not in the paper" in text
    assert picture(made) is None
    assert len(plain(made)["cells"]) == 8 * (3 * 11 + 3)  # eleven rows of three methods, three of one


def test_a_result_without_corruptions_is_not_run_in_this_table() -> None:
    outcomes = {name: dataclasses.replace(one, corruptions=None) for name, one in _outcomes((0,)).items()}
    made = build(ROBUSTNESS, SCALE, seeds=(0,), outcomes=outcomes)
    assert {cell.state for cell in made.cells.values()} == {"open"}
