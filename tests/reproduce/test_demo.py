"""The demo: three runs at equal compute, measured on clean and tilted images, and what is said of them is what came out."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.cli import main
from dssl.data import open_source
from dssl.graph import named_graph
from dssl_reproduce import demo

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())["seeds"]


def test_the_three_runs_differ_in_the_graph_alone_and_have_equal_compute() -> None:
    configs = [demo.settings(graph) for graph in demo.RUNS.values()]
    assert {dataclasses.replace(one, graph="dssl") for one in configs} == {configs[2]}
    declared = configs[0].method
    assert len({declared.cost(named_graph(one.graph)) for one in configs}) == 1
    # the monitor must have the time for a verdict: the first three epochs, and at least 100 steps, are too early
    steps = demo.IMAGES // configs[0].batch_size * demo.EPOCHS
    assert steps > 2 * max(100, 3 * demo.IMAGES // configs[0].batch_size)


def test_what_is_said_is_what_was_measured() -> None:
    """The verdicts and every number of the demo's text, of the README and of the documentation."""
    text = " ".join(demo.MEASURED)
    for seed in MEASURED:
        rows = seed["rows"]
        assert [rows[name]["verdict"] for name in demo.RUNS] == ["healthy", "collapsed", "healthy"]
        (line,) = re.findall(
            rf"^\| {seed['seed']} \|.*/.*$", (ROOT / "docs" / "howto" / "reproduce.md").read_text(), re.MULTILINE
        )
        said = [float(number) for number in re.findall(r"\d+\.\d", line)]
        assert said == pytest.approx([rows[name][key] for name in rows for key in ("clean", "tilted")], abs=0.051)
    numbers = [float(number) for number in re.findall(r"\d+\.\d", text)]
    expected = [
        seed["rows"][name][key]
        for key in ("clean", "tilted")
        for name in ("two standard pairs", "DSSL")
        for seed in MEASURED
    ]
    assert numbers == pytest.approx(expected, abs=0.051)
    (caption,) = re.findall(r"<sub>What `make demo` shows.*?</sub>", (ROOT / "README.md").read_text(), re.DOTALL)
    said = [float(number) for number in re.findall(r"\d+\.\d", caption)]
    assert said == [MEASURED[0]["rows"][name]["clean"] for name in ("two standard pairs", "DSSL")]


def test_tilted_images_are_the_images_turned() -> None:
    source = open_source("figures:3")
    turned = demo.tilted(source)
    assert len(turned) == 3
    assert np.array_equal(turned.labels, source.labels)
    middle = np.asarray(Image.fromarray(turned.image(1)).rotate(-demo.TILT, Image.Resampling.BILINEAR))[10:22, 10:22]
    before = source.image(1)[10:22, 10:22].astype(int)
    assert np.abs(middle - before).mean() < 0.5 * np.abs(turned.image(1)[10:22, 10:22] - before).mean()


def test_a_short_demo_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Two epochs of 300 images; the second call resumes what is finished and names the same numbers and its own command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "IMAGES", 300)
    monkeypatch.setattr(demo, "EPOCHS", 2)
    printed = []
    for _ in range(2):
        assert main(["demo", "--out", "my runs", "--seed", "3"]) in (0, None)
        printed.append(capsys.readouterr().out.splitlines()[:-1])  # without the seconds
    assert printed[0] == printed[1]
    for name in ("raw pixels", "untrained encoder", *demo.RUNS):
        assert any(line.startswith(name) for line in printed[0])
    page = (tmp_path / "my runs" / "report.html").read_text()
    assert "dssl demo --out &#39;my runs&#39; --seed 3" in page or "dssl demo --out 'my runs' --seed 3" in page
