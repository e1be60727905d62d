"""The page of ``dssl report`` in a real browser, with names full of markup."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.commands import report as command
from dssl.files import write_text
from dssl.report import run_report
from dssl.report.run_report import EmbeddingMap, find_runs, read_run
from tests.rejecting import rejects
from tests.report.run_folders import write_run

HOSTILE = "$x_y$<script>document.title='owned'<_script><img src=x onerror=\"document.title='owned'\">' {{7*7}}"


def _map(name: str) -> EmbeddingMap:
    generator = np.random.Generator(np.random.Philox(3))
    return EmbeddingMap(
        run=name, points=generator.normal(size=(60, 2)), labels=np.arange(60, dtype=np.int64) % 10, variance=0.31
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "standard", "standard", knn=43.0)
    write_run(folder / HOSTILE, "heavy", floor=0.1, knn=24.0, verdict="collapsed", views_png=False)
    write_run(folder / ("long-" * 30), "dssl", share=0.5, knn=None, heavy="ra(2,9,monotone14)")
    for number in range(6):
        write_run(folder / f"more {number}", "standard", knn=30.0 + number, seed=number, views_png=number == 0)
    Image.new("RGB", (3000, 900), "red").save(folder / "more 0" / "views.png")
    (folder / "more 1" / "views.png").write_bytes(b"no picture")
    runs = find_runs([folder])
    path = folder / "page" / "report.html"
    made = run_report.html(
        runs,
        command=f"dssl report '{HOSTILE}'",
        maps=[_map(run.name) for run in runs[:4]],
        classes=[HOSTILE, *(f"class {number}" for number in range(9))],
        notes=[f"{HOSTILE}: no map"],
        sentences=[f"{HOSTILE} has 20.0 %."],
    )
    write_text(path, made)
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_the_page_renders_and_nothing_overflows(browser, report: Path, width: int, scheme: str) -> None:
    browser.open(report, width=width, scheme=scheme)
    assert browser.warnings() == []
    assert browser.requests() == []
    assert browser.overflow() == []
    assert browser.broken_images() == 0
    assert browser.run("return document.querySelectorAll('.card').length") == 9
    # two different pictures of views: the one that cannot be read is left out, the one that runs share is shown once
    assert browser.run("return document.images.length") == 2
    assert browser.run("return document.querySelectorAll('svg.plot').length") == 2


def test_nothing_is_cut_off_on_paper(browser, report: Path) -> None:
    browser.open(report, width=718, media="print", scheme="dark")
    assert browser.overflow() == []
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_markup_in_names_stays_text(browser, report: Path) -> None:
    browser.open(report)
    assert browser.run("return document.title") == "Report of 9 runs"
    assert browser.run("return document.scripts.length") == 0
    assert browser.run("return document.querySelectorAll('[onerror], [style]').length") == 0
    names = browser.run("return [...document.querySelectorAll('.card h3')].map(e => e.textContent.trim())")
    assert HOSTILE in names
    for number, expected in ((0, 1), (1, 2)):  # the curves' legend; the map's title and its class
        labels = browser.run(
            f"return [...document.querySelectorAll('svg.plot')[{number}].querySelectorAll('text')].map(e => e.textContent.trim())"
        )
        assert sum(label.startswith(HOSTILE[:40]) for label in labels) == expected


def test_the_page_says_what_is_wrong_and_what_to_do(browser, report: Path) -> None:
    browser.open(report)
    bad = browser.run("return [...document.querySelectorAll('.statement.bad')].map(e => e.textContent)")
    assert len(bad) == 1
    assert "likely cause: the edge h1→h2" in bad[0]
    tips = browser.run("return [...document.querySelectorAll('.definitions dd')].map(e => e.textContent)")
    assert any("--graph dssl" in tip for tip in tips)
    assert "48 of 96 steps" in browser.run("return document.body.textContent")
    differing = browser.run(
        "return [...document.querySelectorAll('h2')].find(e => e.textContent.startsWith('What differs'))"
        ".parentElement.querySelectorAll('tbody th').length"
    )
    assert differing == 3  # graph, heavy, seed


def test_differences_name_only_what_can_change_a_result(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "one", threads=1))
    two = read_run(write_run(tmp_path / "two", threads=2, seed=1))
    assert run_report.differences([one, two]) == [("seed", ["0", "1"])]
    assert run_report.differences([one]) == []


def test_the_command_writes_the_page_and_says_why_there_is_no_map(tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "runs" / "a")
    arguments = command.Arguments(runs=(tmp_path / "runs",), out=tmp_path / "report.html", images=10)
    assert command.run(arguments) == 0
    said = capsys.readouterr().out
    assert "a  " in said
    assert "no map: " in said  # the folder holds no checkpoint
    text = (tmp_path / "report.html").read_text()
    assert "Report of a" in text
    assert "no checkpoint" in text
    # the same runs give the same bytes
    assert command.run(arguments) == 0
    assert (tmp_path / "report.html").read_text() == text


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"runs": ()}, ["runs"]),
        ({"out": Path("report.pdf")}, ["report.pdf", ".html"]),
        ({"images": -1}, ["images", -1, 0]),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, changes: dict[str, object], facts: list[object]) -> None:
    write_run(tmp_path / "a")
    with rejects(*facts):
        command.run(command.Arguments(**{"runs": (tmp_path / "a",), "out": tmp_path / "r.html"} | changes))


def test_what_was_evaluated_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, bare = write_run(tmp_path / "run"), write_run(tmp_path / "bare")
    result = {"name": "linear probe", "accuracy": 81.234, "interval_95": [79.0, 83.0]}
    majority = {"name": "largest class", "accuracy": 20.5, "interval_95": [19.0, 22.0]}
    row = {"name": "knn k=20", "difference": -1.75, "interval": [-3.0, -0.5], "verdict": "worse"}
    measure = {"accuracy": 55.125, "interval": [53.0, 57.0]}
    (run / "evaluation").mkdir()
    for name, content in {
        "evaluation": {"checkpoint": {"epoch": 12.0}, "results": [result], "reference_rows": [majority]},
        "comparison": {"against": [{"against": "start", "protocols": [row]}]},
        "robustness": {"results": {"linear probe": {"measures": {"clean": measure, "corrupted": measure}}}},
    }.items():
        (run / "evaluation" / f"{name}.json").write_text(json.dumps(content))
    (bare / "evaluation").mkdir()
    (bare / "evaluation" / "evaluation.json").write_text("{")
    out = tmp_path / "report.html"
    assert command.run(command.Arguments(runs=(run, bare), out=out, images=0)) == 0
    numbers = ("81.23%", "79.00 - 83.00", "20.50%", "-1.75 points", "-3.00 to -0.50", "55.12%")
    for text in (capsys.readouterr().out, out.read_text().replace("\N{NO-BREAK SPACE}", " ")):
        for number in (*numbers, "against start: worse", "epoch 12"):
            assert number in text
    assert out.read_text().count("Evaluated: ") == 1
