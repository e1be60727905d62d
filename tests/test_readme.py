"""What the README shows runs as printed, links and anchors lead somewhere, and quoted numbers are those of their sources."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dssl import Objective, build_encoder, named_graph
from dssl.cli import main
from dssl.graph import PRESETS
from dssl.weights import checkpoint
from tests.test_plugins import forgetting

README = Path(__file__).parent.parent / "README.md"
DOCS = README.parent / "docs"
MADE = ("_build", "generated")
"""Folders of the documentation that are not in the repository."""


def test_the_library_snippet_runs_and_is_short() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    snippet = next(block for block in blocks if "Objective" in block)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    namespace: dict[str, object] = {}
    exec(compile(snippet, str(README), "exec"), namespace)
    assert namespace["report"].total.isfinite()  # type: ignore[attr-defined]


def pages() -> list[Path]:
    return [*README.parent.glob("*.md"), *(page for page in DOCS.rglob("*.md") if not set(MADE) & set(page.parts))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them from its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


def test_links_and_anchors_lead_somewhere() -> None:
    for page in pages():
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in link:
                continue
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def section(heading: str) -> str:
    """The part of the README below a heading."""
    return README.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_the_readme_quotes_the_measured_robustness() -> None:
    quoted = set(re.findall(r"\d+\.\d", section("Encoders that survive bad images")))
    measured = set(re.findall(r"\d+\.\d", (DOCS / "results" / "robust.md").read_text()))
    assert len(quoted) > 4
    assert quoted <= measured


@pytest.mark.parametrize("page", ["README.md", "docs/robust.md"])
def test_the_table_of_directions_is_the_measured_one(page: str) -> None:
    result = json.loads((DOCS / "results" / "cpu-few" / "robustness.json").read_text())
    means = {(cell["row"], cell["column"]): cell["mean"] for cell in result["cells"]}
    rows = (
        "untrained encoder",
        "2 standard pairs",
        "2 standard pairs, corruptions on every view",
        "DSSL's views and corruptions, without direction",
        "DSSL, corruptions",
    )
    text = (README.parent / page).read_text()
    table = text[text.index("| clean / corrupted | SimCLR | BYOL | SimSiam |") :].split("\n\n", 1)[0].splitlines()[2:]
    for row, line in zip(rows, table, strict=True):
        entries = line.strip("|").split("|")[1:]
        for method, entry in zip(("SimCLR", "BYOL", "SimSiam"), entries, strict=True):
            measured = [means[row, f"{method}, linear probe: {kinds}"] for kinds in ("clean", "10 other kinds")]
            assert [float(number) for number in re.findall(r"\d+\.\d", entry)] == pytest.approx(measured, abs=0.0501)


def test_the_table_of_methods_is_the_measured_one() -> None:
    result = json.loads((DOCS / "results" / "cpu-few" / "methods.json").read_text())
    means = {(cell["row"], cell["column"]): cell["mean"] for cell in result["cells"]}
    text = (DOCS / "methods.md").read_text()
    table = text[text.index("| clean / corrupted | two standard pairs |") :].split("\n\n", 1)[0].splitlines()[2:]
    assert len(table) == 9
    for line in table:
        method, *entries = (part.strip() for part in line.strip("|").split("|"))
        for row, entry in zip(
            ("2 standard pairs", "four means (FastSiam)", "DSSL", "small crops, equal time"), entries, strict=True
        ):
            measured = [means[row, f"linear probe, {kinds}: {method}"] for kinds in ("clean", "10 other kinds")]
            quoted = [float(number) for number in re.findall(r"\d+\.\d", entry)]
            assert quoted == pytest.approx([value for value in measured if value is not None], abs=0.0501)


def test_the_main_table_is_the_measured_one() -> None:
    result = json.loads((DOCS / "results" / "cpu-few" / "table2.json").read_text())
    rows = {
        "raw pixels": "raw pixels",
        "untrained encoder": "untrained encoder",
        "two standard pairs (equal compute)": "2 standard pairs (equal compute)",
        "heavy views (SimCLR: one pair, half the compute)": "w/ T^",
        "DSSL": "w/ DSSL",
        "DSSL, heavy edges of weight 0.5": "w/ DSSL, heavy edges 0.5",
        "supervised, 5,000 labels": "supervised, equal compute",
    }
    cells = {(cell["row"], cell["column"].removeprefix("CIFAR-10, ")): cell for cell in result["cells"]}
    text = (DOCS / "results" / "README.md").read_text()
    table = text[text.index("| linear / kNN | SimCLR | BYOL | SimSiam |") :].split("\n\n", 1)[0].splitlines()
    compared = 0
    for line in table[2:]:
        name, *entries = (part.strip() for part in line.strip("|").split("|"))
        if name not in rows:
            continue
        for method, entry in zip(("SimCLR", "BYOL", "SimSiam"), entries, strict=True):
            cell, numbers = cells[rows[name], method], [float(number) for number in re.findall(r"\d+\.\d", entry)]
            measured = [value for value in (cell["mean"], cell["knn"]) if value is not None]
            assert numbers == pytest.approx(measured[: len(numbers)], abs=0.0501), (name, method)
            compared += len(numbers)
    assert compared >= 27


def test_hand_written_differences_are_the_measured_ones() -> None:
    """Of the README's bullets: DSSL against two standard pairs, the mean targets, adaptation with few labels."""
    results = section("Results")
    table = json.loads((DOCS / "results" / "cpu-few" / "table2.json").read_text())
    ours = {row["where"].removeprefix("CIFAR-10, "): row["ours"].split()[0] for row in table["comparisons"]}
    wanted = [ours[f"{name}: w/ DSSL over 2 standard pairs (equal compute)"] for name in ("SimCLR", "BYOL", "SimSiam")]
    assert f"the differences are {wanted[0]}, {wanted[1]} and {wanted[2]}" in results

    methods = json.loads((DOCS / "results" / "cpu-few" / "methods.json").read_text())
    means = {(cell["row"], cell["column"]): cell["mean"] for cell in methods["cells"]}
    quoted = re.search(r"scores (\S+) to (\S+) points more .* clean images and (\S+) to (\S+) under", results)
    assert quoted is not None
    extremes = []
    for kinds in ("clean", "10 other kinds"):
        columns = [column for _, column in means if column.startswith(f"linear probe, {kinds}: ")]
        gains = [means["four means (FastSiam)", one] - means["2 standard pairs", one] for one in dict.fromkeys(columns)]
        assert len(gains) == 9
        extremes += [min(gains), max(gains)]
    assert [float(number) for number in quoted.groups()] == pytest.approx(extremes, abs=0.0501)

    photos = (DOCS / "results" / "adapt.md").read_text().split("## Photos", 1)[1].split("\n## ", 1)[0]
    few = [line.split("|")[4] for line in photos.splitlines() if ", seed" in line]
    gains = [float(re.findall(r"\+\d+\.\d", entry)[0]) for entry in few]
    assert f"{min(gains)} to {max(gains)} points on 1,513 photos" in results


def test_the_comparison_quotes_the_measured_speed() -> None:
    text = (DOCS / "project" / "comparison.md").read_text()
    quoted = re.search(r"ResNet-18 (\S+) to (\S+) times .* `small` (\S+) to (\S+) times", text)
    assert quoted is not None
    settings = json.loads((README.parent / "benchmarks" / "results" / "train.json").read_text())["results"]
    expected = []
    for encoder in ("resnet18-cifar", "small"):
        ratios = []
        for setting in settings:
            rates = {row["name"]: row["rate"]["median"] for row in setting["rows"]}
            if setting["encoder"] == encoder:
                for precision in ("fp32", "bf16"):
                    peers = (rates[f"{peer}, {precision}"] for peer in ("lightly", "stable-pretraining"))
                    ratios.append(rates[f"dssl, {precision}"] / max(peers))
        expected += [min(ratios), max(ratios)]
    assert [float(number) for number in quoted.groups()] == pytest.approx(expected, abs=0.051)


@forgetting()
def test_the_method_of_the_documentation_works_with_every_graph_and_is_trained(tmp_path: Path) -> None:
    page = README.parent / "docs" / "add-a-method.md"
    snippet, _ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(snippet, str(page), "exec"), namespace)
    method = namespace["Uniformity"](build_encoder("small", image_size=32), image_size=32)
    for name in PRESETS:
        graph = named_graph(name)
        views = {view.name: torch.randn(4, 3, 32, 32) for view in graph.views}
        assert Objective(method, graph)(views).total.isfinite()

    # in its place, as the page says, in a copy of the program
    copy = tmp_path / "copy" / "dssl"
    shutil.copytree(README.parent / "dssl", copy, ignore=shutil.ignore_patterns("__pycache__"))
    begin, end = snippet.index("@dataclass"), snippet.index("class Uniformity(")
    imported = "from dssl.methods import UniformityConfig\n\n\n"
    (copy / "methods" / "uniformity.py").write_text(snippet[:begin] + imported + snippet[end:])
    settings = copy / "methods" / "__init__.py"
    before, after = settings.read_text().split("METHODS: ")
    last = " MatchConfig,\n"
    assert after.count(last) == 1
    listed = after.replace(last, f"{last}        UniformityConfig,\n")
    settings.write_text(f"{before}{snippet[begin:end]}METHODS: {listed}")
    words = [sys.executable, "-m", "dssl", "graph", "dssl"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.run(words, cwd=copy.parent, env=environment, capture_output=True, text=True)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "uniformity" in printed.stdout
    built = "from dssl.methods.method import Method; from torch import nn; from dssl.methods import METHODS as m; "
    built += "print(type(Method.of(m['uniformity'](), nn.Identity(), feature_dim=4)).__module__)"
    words = [sys.executable, "-c", built]
    printed = subprocess.run(words, cwd=copy.parent, env=environment, capture_output=True, text=True)
    assert printed.stdout == "dssl.methods.uniformity\n", printed.stderr

    out = tmp_path / "run"
    words = [
        "train",
        "shapes",
        "--method",
        "uniformity",
        "--method.output",
        "64",
        "--data",
        "shapes:32",
        "--batch-size",
        "16",
    ]
    words += ["--epochs", "1", "--knn-every", "0", "--precision", "fp32", "--out", str(out)]
    assert main(words) == 0
    saved = checkpoint.newest_good(out / "checkpoints")
    assert saved is not None
    assert saved[1].header["config"]["method"] == {"name": "uniformity", "output": 64, "weight": 1.0}
    assert saved[1].tensors["method.projector.3.weight"].shape == (64, 256)
    assert main(words) == 0  # and it is resumed


def test_the_page_about_python_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 32 small photos of two colours."""
    generator = np.random.default_rng(0)
    for colour, channel in {"red": 0, "blue": 2}.items():
        folder = tmp_path / "photos" / colour
        folder.mkdir(parents=True)
        for number in range(16):
            pixels = generator.integers(0, 128, (40, 40, 3), dtype=np.uint8)
            pixels[:, :, channel] += 100
            Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "python.md"
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    assert len(namespace["vectors"]) == 32
    assert namespace["source"].classes == ("0", "1")
    assert namespace["encoder"](torch.zeros(2, 3, 32, 32)).shape == (2, 32)
