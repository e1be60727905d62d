"""Tables: means, deviations, collapse and agreement against values worked out by hand."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dssl_reproduce import EQUAL_COMPUTE, STEPS, targets
from dssl_reproduce.outcome import Measured, Outcome, pack, read
from dssl_reproduce.scales import HEAVY_WEIGHT, SCALES, WEIGHTED, Job, jobs_of
from dssl_reproduce.table import (
    PaperDifference,
    ResultTable,
    build,
    document,
    student_95,
)

SCALE = SCALES["cpu"]
MAIN = targets()["table2"]


def _outcome(job: Job, accuracy: float | None, *, verdict: str = "healthy", half: float = 1.0) -> Outcome:
    accuracies = {}
    if accuracy is not None:
        found = Measured(accuracy=accuracy, interval=(accuracy - half, accuracy + half), protocol={"k": 200})
        accuracies = {"supervised": found} if job.training else {"linear": found, "knn": found}
    return Outcome(
        name=job.name, scale="cpu", seed=job.config.seed, fingerprint=job.fingerprint, config={},
        training={} if job.training else None, verdict=verdict, reason="", spread=0.9, accuracies=accuracies, steps=1560,
        seconds=600.0, versions={}, data={},
    )  # fmt: skip


def _simsiam(
    values: dict[str, tuple[float | None, str]], *, seeds: tuple[int, ...] = (0,), shift: float = 0.0
) -> ResultTable:
    """The main table with SimSiam on CIFAR-10 run: accuracy and verdict by graph; a later seed has ``shift`` more."""
    outcomes = {}
    for job in jobs_of([MAIN], SCALE, seeds=seeds):
        if job.name.startswith("cifar10-simsiam") and job.config.graph in values:
            accuracy, verdict = values[job.config.graph]
            more = shift * job.config.seed
            outcomes[job.name] = _outcome(job, None if accuracy is None else accuracy + more, verdict=verdict)
    return build(MAIN, SCALE, seeds=seeds, outcomes=outcomes)


def test_one_seed() -> None:
    made = _simsiam({"standard2": (42.5, "healthy"), "heavy2": (28.0, "collapsed"), "dssl": (45.9, "healthy")})
    cells = made.cells
    assert cells["repro.", "CIFAR-10, SimSiam"].ours == "42.5"
    assert cells["repro.", "CIFAR-10, SimSiam"].error == pytest.approx(1.0)
    assert cells["w/ T^", "CIFAR-10, SimSiam"].ours == "collapse (28.0)"
    assert cells["w/ T^", "CIFAR-10, SimSiam"].state == "collapse"
    assert cells["w/ DSSL", "CIFAR-10, BYOL"].ours == "not run"
    assert cells["reported", "CIFAR-10, SimSiam"].ours == "quoted"
    verdicts = {one.where: (one.paper, one.ours, one.verdict) for one in made.comparisons}
    assert verdicts["CIFAR-10, SimSiam: w/ DSSL over repro."] == ("+2.4", "+3.4 (±1.4, unpaired)", "agrees")
    assert verdicts["CIFAR-10, SimSiam: w/ T^ over repro."][2] == "agrees"
    assert verdicts["CIFAR-10, BYOL: w/ DSSL over repro."][2] == "not measured"


def test_a_page_leaves_out_what_was_not_run_and_says_so() -> None:
    made = _simsiam({"standard2": (42.5, "healthy"), "dssl": (45.9, "healthy")})
    page = document(made, command="")
    (head,) = [line for line in page.splitlines() if line.startswith("|  |")][:1]
    assert head == "|  | CIFAR-10, SimSiam |"
    assert "- Not run: CIFAR-10, SimCLR; CIFAR-10, BYOL; ImageNet, SimCLR" in page
    left = sum(one.verdict == "not measured" for one in made.comparisons)
    assert f"{left} other differences of this table are not measured yet." in page
    empty = build(MAIN, SCALE, seeds=(0,), outcomes={})  # keeps its columns
    assert "CIFAR-10, BYOL |" in document(empty, command="")


def test_several_seeds() -> None:
    made = _simsiam({"standard2": (42.0, "healthy"), "dssl": (43.0, "healthy")}, seeds=(0, 1), shift=2.0)
    cell = made.cells["repro.", "CIFAR-10, SimSiam"]
    assert cell.ours == "43.0 ± 1.4"  # 42 and 44: the deviation is the root of 2
    # two entries of two seeds: variance 2 with two degrees of freedom, Student's t 4.3027; the mean of two halves the variance
    # for the seeds alone: both are measured on the same test images
    assert cell.error == pytest.approx(math.hypot(1, 4.302652729911275 * math.sqrt(2) / math.sqrt(2)))
    verdicts = {one.where: one.verdict for one in made.comparisons}
    assert verdicts["CIFAR-10, SimSiam: w/ DSSL over repro."] == "inconclusive"
    only_one = dataclasses.replace(made, seeds=(0,))
    assert only_one != made


def test_rows_that_the_paper_lacks_are_compared_with_each_other() -> None:
    """DSSL against two standard pairs: the same runs as SimSiam's first row, and no agreement to speak of."""
    made = _simsiam({"standard2": (42.0, "healthy"), "dssl": (45.0, "healthy"), WEIGHTED: (39.0, "healthy")})
    assert made.cells[EQUAL_COMPUTE, "CIFAR-10, SimSiam"].ours == "42.0"
    found = {
        one.where: (one.paper, one.verdict) for one in made.comparisons if one.where.startswith("CIFAR-10, SimSiam")
    }
    assert found[f"CIFAR-10, SimSiam: w/ DSSL over {EQUAL_COMPUTE}"] == ("–", "higher")
    assert found[f"CIFAR-10, SimSiam: w/ DSSL, heavy edges {HEAVY_WEIGHT:g} over {EQUAL_COMPUTE}"] == ("–", "lower")
    assert "not in the paper" in " ".join(made.notes)
    # raw pixels are one run in all columns: they are not compared between columns
    figure = build(targets()["figure1"], SCALE, seeds=(0,), outcomes={})
    assert figure.target.rows[:3] == ("raw pixels", "untrained encoder", EQUAL_COMPUTE)
    assert not any(one.where.startswith("raw pixels") for one in figure.comparisons)


def test_a_difference_of_unequal_compute_says_so() -> None:
    """SimCLR's heavy views are one pair in the paper: half the views of DSSL."""
    where = [one.where for one in build(MAIN, SCALE, seeds=(0,), outcomes={}).comparisons]
    assert "CIFAR-10, SimCLR: w/ DSSL over w/ T^, 0.5 times the compute" in where
    assert "CIFAR-10, SimSiam: w/ DSSL over w/ T^" in where
    assert not any(EQUAL_COMPUTE in one and "times" in one for one in where)


def test_student_is_exact() -> None:
    freedoms = [*range(1, 201), 1000, 9999]
    assert [student_95(freedom) for freedom in freedoms] == pytest.approx(stats.t.ppf(0.975, freedoms), rel=1e-10)


def test_seeds_that_disagree_about_collapse_and_one_that_diverged() -> None:
    jobs = [job for job in jobs_of([MAIN], SCALE, seeds=(0, 1, 2)) if job.name.startswith("cifar10-simsiam-heavy2")]
    outcomes = {
        jobs[0].name: _outcome(jobs[0], 30.0, verdict="partial collapse"),
        jobs[1].name: _outcome(jobs[1], 40.0),
    }
    cell = build(MAIN, SCALE, seeds=(0, 1, 2), outcomes=outcomes).cells["w/ T^", "CIFAR-10, SimSiam"]
    assert cell.ours == "partial collapse in 1 of 2 (35.0 ± 7.1) [2 of 3 seeds]"
    outcomes[jobs[1].name] = _outcome(jobs[1], None, verdict="diverged")
    cell = build(MAIN, SCALE, seeds=(0, 1), outcomes=outcomes).cells["w/ T^", "CIFAR-10, SimSiam"]
    assert cell.ours == "partial collapse in 1 of 2 (30.0), 1 of 2 diverged"
    del outcomes[jobs[0].name]
    cell = build(MAIN, SCALE, seeds=(1,), outcomes=outcomes).cells["w/ T^", "CIFAR-10, SimSiam"]
    assert (cell.ours, cell.state, cell.mean) == ("diverged", "diverged", None)


def _seeds(
    values: dict[str, list[tuple[float | None, str]]], where: str, *, kind: str = "cifar10-simsiam"
) -> tuple[str, str]:
    """What is said of a difference of the main table: by graph, accuracy and verdict of each seed."""
    seeds = tuple(range(len(next(iter(values.values())))))
    outcomes = {}
    for job in jobs_of([MAIN], SCALE, seeds=seeds):
        if job.name.startswith(kind) and job.config.graph in values:
            accuracy, verdict = values[job.config.graph][job.config.seed]
            outcomes[job.name] = _outcome(job, accuracy, verdict=verdict)
    made = build(MAIN, SCALE, seeds=seeds, outcomes=outcomes)
    (found,) = [one for one in made.comparisons if one.where == f"CIFAR-10, SimSiam: {where}"]
    return found.ours, found.verdict


def test_one_broken_seed_of_three_does_not_decide_and_the_survivors_of_many_do_not_either() -> None:
    good, where = [(60.0, "healthy"), (61.0, "healthy"), (60.5, "healthy")], "w/ DSSL over repro."
    better = [(70.0, "healthy"), (71.0, "partial collapse"), (70.5, "healthy")]
    ours, verdict = _seeds({"standard2": good, "dssl": better}, where)
    assert ours.startswith("+10.0 (±")
    assert verdict == "agrees"
    lost = (None, "diverged")
    assert _seeds({"standard2": good, "dssl": [lost, (63.0, "healthy"), (63.0, "healthy")]}, where) == (
        "+2.5",
        "inconclusive",
    )
    ours, verdict = _seeds({"standard2": good, "dssl": [lost, lost, (63.0, "healthy")]}, where)
    assert (ours, verdict) == ("first collapsed; +2.5", "disagrees")
    # the paper has a collapse there, and a run that diverged is no better
    assert _seeds({"heavy2": [lost, lost, lost], "standard2": good}, "w/ T^ over repro.") == (
        "first diverged",
        "agrees",
    )


def test_arms_with_bits_are_compared_image_by_image() -> None:
    """Two arms of two seeds that agree on most images: the interval against the formula written out, and a smaller one."""
    generator = np.random.default_rng(0)
    outcomes, right = {}, {}
    hard = generator.random(1000) < 0.4
    for job in jobs_of([MAIN], SCALE, seeds=(0, 1)):
        if job.name.startswith("cifar10-simsiam") and job.config.graph in ("standard2", "dssl"):
            bits = ~hard ^ (generator.random(1000) < 0.05)
            right[job.config.graph, job.config.seed] = bits
            one = _outcome(job, 100 * float(bits.mean()), half=3.0)
            protocol = {"test_images": 1000, "test_fingerprint": "same"}
            measured = dataclasses.replace(one.accuracies["linear"], right=pack(bits), protocol=protocol)
            outcomes[job.name] = dataclasses.replace(one, accuracies={"linear": measured})
    where = "CIFAR-10, SimSiam: w/ DSSL over repro."

    def difference() -> PaperDifference:
        (found,) = [
            one for one in build(MAIN, SCALE, seeds=(0, 1), outcomes=outcomes).comparisons if one.where == where
        ]
        return found

    by_image = np.mean([right["dssl", seed].astype(int) - right["standard2", seed] for seed in (0, 1)], axis=0)
    means = [[100 * right[graph, seed].mean() for seed in (0, 1)] for graph in ("standard2", "dssl")]
    of_seeds = stats.t.ppf(0.975, 2) * math.sqrt(np.mean([np.var(one, ddof=1) for one in means]))
    expected = math.hypot(1.96 * 100 * by_image.std(ddof=1) / math.sqrt(1000), of_seeds)
    paired = difference()
    assert paired.error == pytest.approx(expected, rel=1e-4)
    assert paired.ours.endswith(", paired)")
    # one run of before bits were kept, or other test images: unpaired, and labelled so
    name = next(iter(outcomes))
    linear = outcomes[name].accuracies["linear"]
    for change in ({"right": None}, {"protocol": linear.protocol | {"test_fingerprint": "other"}}):
        outcomes[name] = dataclasses.replace(
            outcomes[name], accuracies={"linear": dataclasses.replace(linear, **change)}
        )
        unpaired = difference()
        assert unpaired.ours.endswith(", unpaired)")
        assert unpaired.error is not None
        assert unpaired.error > expected


def test_bits_survive_the_file(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).random(10_000) < 0.6
    one = _outcome(jobs_of([MAIN], SCALE, seeds=(0,))[0], 60.0)
    kept = Measured(accuracy=60.0, interval=(59.0, 61.0), protocol={"test_images": 10_000}, right=pack(bits))
    dataclasses.replace(one, accuracies={"linear": kept}).write(tmp_path / "one.json")
    again = read(tmp_path / "one.json").accuracies["linear"].bits()
    assert again is not None
    assert np.array_equal(again, bits)
    assert one.accuracies["linear"].bits() is None


def test_raw_pixels_say_nothing_about_the_noise_of_a_seed() -> None:
    outcomes = {}
    for job in jobs_of([MAIN], SCALE, seeds=(0, 1)):
        if job.kind in ("pixels", "untrained"):
            outcomes[job.name] = _outcome(job, 40.0 + job.config.seed, verdict=job.kind)
    table = build(MAIN, SCALE, seeds=(0, 1), outcomes=outcomes)
    assert table.cells["raw pixels", "CIFAR-10, SimSiam"].error == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "where", "verdict"),
    [
        ({"standard2": 45.0, "dssl": 42.0}, "w/ DSSL over repro.", "disagrees"),
        ({"standard2": 42.0, "dssl": 43.0}, "w/ DSSL over repro.", "inconclusive"),
        ({"standard2": 42.0, "heavy2": 41.9}, "w/ T^ over repro.", "inconclusive"),
        ({"standard2": 42.0, "heavy2": 45.0}, "w/ T^ over repro.", "disagrees"),
    ],
)
def test_disagreement_is_said(values: dict[str, float], where: str, verdict: str) -> None:
    made = _simsiam({graph: (value, "healthy") for graph, value in values.items()})
    (found,) = [one for one in made.comparisons if one.where == f"CIFAR-10, SimSiam: {where}"]
    assert found.verdict == verdict


def test_a_collapse_where_the_paper_has_none_disagrees() -> None:
    made = _simsiam({"standard2": (42.0, "healthy"), "dssl": (41.0, "collapsed"), "heavy2": (28.0, "collapsed")})
    verdicts = {one.where: one.verdict for one in made.comparisons}
    assert verdicts["CIFAR-10, SimSiam: w/ DSSL over repro."] == "disagrees"
    assert verdicts["CIFAR-10, SimSiam: w/ DSSL over w/ T^"] == "disagrees"


def test_what_is_not_comparable_is_said_in_every_table() -> None:
    for scale in SCALES.values():
        made = build(MAIN, scale, seeds=(0,), outcomes={})
        assert all(any(text in note for note in made.notes) for text in scale.differs)
        assert all(f"Reading: {text}" in made.notes for text in MAIN.readings)


def test_markdown() -> None:
    made = _simsiam({"standard2": (42.5, "healthy"), "heavy2": (28.0, "collapsed")})
    text = document(made, command="dssl reproduce table2 --scale cpu")
    lines = text.splitlines()
    assert "| w/ T\\^ |" in text
    assert "*collapse* → **collapse (28.0)**" in text
    assert "2 runs, 20 minutes of training in all:" in text
    assert "dssl reproduce table2 --scale cpu" in lines
    for table in ("kNN accuracy", "What agrees"):
        assert table in text
    widths = {line.count("|") - line.count("\\|") for line in lines if line.startswith("| ") and "→" in line}
    assert len(widths) == 1


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = jobs_of([MAIN], SCALE, seeds=(0,))[0]
    one = dataclasses.replace(_outcome(job, 42.5), curves={"knn": [(1.0, 20.0), (2.0, 30.5)]})
    one.write(tmp_path / "one.json")
    assert read(tmp_path / "one.json") == one
    assert "[1.0, 20.0]" in (tmp_path / "one.json").read_text()


def test_the_gain_against_steps() -> None:
    scale = SCALES["cpu-few"]
    values = {"standard2": 60.0, "dssl": 58.0}
    outcomes = {}
    for job in jobs_of([STEPS], scale, seeds=(0,)):
        if job.name.startswith("cifar10-simclr"):
            one = _outcome(
                job, values[job.config.graph] + (job.config.epochs / 10 if job.config.graph == "dssl" else 0)
            )
            outcomes[job.name] = dataclasses.replace(one, steps=39 * job.config.epochs)
    made = build(STEPS, scale, seeds=(0,), outcomes=outcomes)
    told = {one.where: (one.ours, one.verdict) for one in made.comparisons}
    # 5, 10, 20 and 40 epochs: -1.5, -1, 0 and +2, each with an error of the root of 2
    assert told["1/4 of the steps: SimCLR, DSSL over SimCLR, 2 pairs"] == ("-1.5 (±1.4, unpaired)", "lower")
    assert told["twice the steps: SimCLR, DSSL over SimCLR, 2 pairs"] == ("+2.0 (±1.4, unpaired)", "higher")
    assert told["all steps: SimSiam, DSSL over SimSiam, 2 pairs"][1] == "not measured"
    text = document(made, command="dssl reproduce steps")
    for expected in ("not in the paper", "| all steps | 60.0 | 60.0 |"):
        assert expected in text
    assert "| paper |" not in text
