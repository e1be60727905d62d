"""The demo says what came out, whatever came out."""

import dataclasses
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dssl import rng
from dssl.augment import CIFAR10
from dssl.cli import main
from dssl.data import open_source
from dssl_reproduce import demo
from dssl_reproduce.demo import DemoRun

FINE = DemoRun(verdict="healthy", spread=0.95, knn=42.0, images=2000)
UNTRAINED = {"raw pixels": 15.0, "untrained encoder": 20.0}
GONE = DemoRun(verdict="collapsed", spread=0.05, knn=20.0, images=2000)


def _sentences(standard: DemoRun, heavy: DemoRun, dssl: DemoRun) -> list[str]:
    return demo.sentences(dict(zip(demo.RUNS, (standard, heavy, dssl), strict=True)), UNTRAINED)


def test_what_the_paper_leads_one_to_expect() -> None:
    first, second, third, fourth = _sentences(FINE, GONE, dataclasses.replace(FINE, knn=43.0))
    assert "broke the heavy pair (collapsed, spread 0.05)" in first
    assert "standard pair is fine (healthy, spread 0.95)" in first
    assert "DSSL learns from the same heavy views and is healthy" in second
    # 1.96 * sqrt(.43 * .57 / 2000 + .42 * .58 / 2000) = 3.06 points
    assert "level (within chance, ±3.1 points) with the standard pair (42.0 %)" in third
    assert "23.0 points above the heavy pair (20.0 %)" in third
    assert (
        "15.0 % with raw pixels and 20.0 % with untrained encoder: DSSL is 23.0 points above the better of them"
        in fourth
    )


@pytest.mark.parametrize("verdict", ["collapsed", "partial collapse", "diverged"])
def test_every_other_outcome_is_said_as_it_is(verdict: str) -> None:
    broken = dataclasses.replace(GONE, verdict=verdict)
    assert "did not break" in _sentences(FINE, FINE, FINE)[0]
    assert "nothing to fix" in _sentences(FINE, FINE, FINE)[1]
    assert "so did the standard pair" in _sentences(broken, broken, FINE)[0]
    assert "DSSL broke too" in _sentences(FINE, broken, broken)[1]
    assert "DSSL learns" not in " ".join(_sentences(FINE, broken, broken))
    assert "broke the heavy pair" not in " ".join(_sentences(broken, broken, broken))


def test_runs_that_are_too_short_are_not_judged() -> None:
    early = dataclasses.replace(FINE, verdict="too early")
    said = _sentences(FINE, early, FINE)
    assert len(said) == 4
    assert "too short for a verdict" in said[0]
    assert "heavy pair too early, spread 0.95" in said[1]


def test_gain_and_loss_beyond_chance() -> None:
    better, worse = (dataclasses.replace(FINE, knn=value) for value in (48.0, 35.0))
    assert "6.0 points above the standard pair" in _sentences(FINE, GONE, better)[2]
    assert "7.0 points below the standard pair" in _sentences(FINE, GONE, worse)[2]
    assert "with the heavy pair (42.5 %)" in _sentences(FINE, dataclasses.replace(GONE, knn=42.5), FINE)[2]
    assert "5.0 points below the better of them" in _sentences(FINE, GONE, dataclasses.replace(FINE, knn=15.0))[3]
    assert "not measured" in _sentences(FINE, dataclasses.replace(GONE, knn=None), FINE)[2]


def test_the_three_runs_differ_in_the_graph_alone() -> None:
    configs = [demo.settings(graph) for graph in demo.RUNS.values()]
    assert len(configs) == 3
    assert {dataclasses.replace(one, graph="dssl") for one in configs} == {configs[2]}
    # the watch must have the time for a verdict: the first three epochs, and at least 100 steps, are too early
    steps = demo.IMAGES // configs[0].batch_size * demo.EPOCHS
    assert steps > 2 * max(100, 3 * demo.IMAGES // configs[0].batch_size)


def test_raw_pixels_and_the_untrained_encoder_are_measured_as_the_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a nearest-neighbour search written out here."""
    config = dataclasses.replace(demo.settings("standard"), data="figures:300", image_size=32)
    monkeypatch.setattr("dssl.training.knn.QUERIES", 40)
    found = demo.untrained_accuracies(config)
    assert list(found) == ["raw pixels", "untrained encoder"]
    train, test = open_source("figures:300"), open_source("figures", split="test")
    assert train.labels is not None and test.labels is not None  # noqa: PT018
    chosen = np.sort(rng.permutation(rng.key(0, "knn"), len(test))[:40])
    bank, queries = (
        np.stack([(source.image(int(index)) / 255 - CIFAR10.mean) / CIFAR10.std for index in indices])
        for source, indices in ((train, range(300)), (test, chosen))
    )
    bank, queries = (
        one.reshape(len(one), -1) / np.linalg.norm(one.reshape(len(one), -1), axis=1)[:, None]
        for one in (bank, queries)
    )
    right = 0
    for row, index in zip(queries @ bank.T, chosen, strict=True):
        near = np.argsort(-row)[:200]
        votes = np.bincount(train.labels[near], weights=np.exp(row[near] / 0.1), minlength=10)
        right += int(votes.argmax() == test.labels[index])
    assert found["raw pixels"] == pytest.approx(100 * right / 40)


@pytest.mark.parametrize(("share", "notes"), [(1.6, 0), (1.0, 0), (0.5, 1)])
def test_a_busy_machine_is_noticed_while_training_and_said_once(share: float, notes: int) -> None:
    """The clocks are ours: in each of four intervals the process gets this share of a core."""
    looks, seen = itertools.count(), threading.Event()
    said: list[str] = []

    def processor() -> float:
        now = next(looks)
        if now >= 4:
            seen.set()
        return share * now

    wall = itertools.count()
    with demo.busy_machine_noticed(said.append, clocks=(processor, lambda: float(next(wall))), every=0.001):
        while not (said or seen.wait(0.001)):
            pass
    assert len(said) == notes
    assert all("busy" in line and "0.5 of a core" in line for line in said)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "dssl demo"),
        (["--seed", "3"], "dssl demo --seed 3"),
        (["--out", "my runs", "--seed", "3"], "dssl demo --out 'my runs' --seed 3"),
    ],
)
def test_the_page_names_the_command_that_makes_it_again(
    words: list[str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and drawing are replaced: it is about the words alone."""
    monkeypatch.chdir(tmp_path)
    named: list[str] = []
    ended = SimpleNamespace(signal=None)
    monkeypatch.setattr("dssl.training.pretrain.train", lambda *_, **__: ended)
    monkeypatch.setattr("dssl_reproduce.demo.untrained_accuracies", lambda _: UNTRAINED)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("dssl.report.run_data.read_run", lambda *_, name: SimpleNamespace(name=name))
    monkeypatch.setattr(DemoRun, "of", lambda _: FINE)
    monkeypatch.setattr("dssl.report.map.embedding_maps", lambda *_, **__: ([], (), []))
    monkeypatch.setattr("dssl.report.run_report.html", lambda *_, command, **__: named.append(command) or "")
    monkeypatch.setattr("dssl.report.run_report.summary", lambda _: "")
    assert main(["demo", *words]) == 0
    assert named == [command]
