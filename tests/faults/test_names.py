"""Names of files and classes full of markup, formulas and terminal escapes: nothing is executed, cells are quoted.

The pages of `dssl views`, `dssl report` and `dssl evaluate` are opened in a real browser by tests/report; here is what is text.
"""

import csv
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.cli import main
from tests.faults.conftest import Tally
from tests.faults.inside import train

HOSTILE = {
    b"=cmd|'calc'!A0": "a formula",
    b"+1+1": "a formula",
    b"-1+1": "a formula",
    b"@SUM(1)": "a formula",
    b'a","b': "quotes and commas",
    b"line\nbreak": "a line break",
    b"\x1b[2J\x1b]0;owned\x07": "terminal escapes",
    b"<img src=x onerror=alert(1)>": "markup",
    b"{{7*7}}{% raw %}": "a template",
    b"\xff\xfe": "no UTF-8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with hostile names, five images with hostile names in each."""
    root = tmp_path_factory.mktemp("names") / "images"
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in (b"=class<script>", b"\x1b[31mred\n"):
            place = os.path.join(os.fsencode(root), split.encode(), label)  # noqa: PTH118 (bytes)
            os.makedirs(place)  # noqa: PTH103 (bytes)
            for name in HOSTILE:
                picture = Image.fromarray(generator.integers(0, 256, (32, 32, 3), np.uint8))
                with open(os.path.join(place, name + b".png"), "wb") as file:  # noqa: PTH118, PTH123 (bytes)
                    picture.save(file, "PNG")
    return root


@pytest.fixture(scope="module")
def run_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    assert train("simsiam", out, "--data", str(folder)) == 0
    return out


def test_cells_of_a_table_are_no_formulas(folder: Path, run_folder: Path, tally: Tally, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in HOSTILE:
        (flat / os.fsdecode(name + b".png")).write_bytes(next(folder.rglob("*.png")).read_bytes())
    with tally.trial("a hostile name in a table", len(HOSTILE)):
        assert main(["embed", str(run_folder), str(flat), "--out", str(tmp_path / "e.csv")]) == 0
        text = (tmp_path / "e.csv").read_bytes().decode()
        assert "\x1b" not in text
        rows = list(csv.reader(text.splitlines()))
        assert len(rows) == 1 + len(HOSTILE)  # no name broke a row
        assert {len(row) for row in rows} == {257}
        names = [row[0] for row in rows[1:]]
        assert not any(name.startswith(("=", "+", "-", "@", "\t")) for name in names)
        assert sum(name.startswith("./") for name in names) == 4
        assert all((flat / name).is_file() for name in names if name.startswith("./")), "as a path it is still the same"


def test_nothing_on_the_terminal_moves_its_cursor(
    folder: Path, run_folder: Path, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("a hostile name on the terminal", len(HOSTILE) + 2):
        assert main(["data", "show", str(folder), "--every"]) == 0
        assert main(["evaluate", str(run_folder), "--protocols", "knn", "--out", str(tmp_path / "evaluation")]) == 0
        said = "".join(capsys.readouterr())
        assert "=class<script>" in said
        assert "\x1b" not in said
        assert "\\x1b[31mred\\n" in said


def test_pages_forbid_scripts_and_escape_names(
    folder: Path, run_folder: Path, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("a hostile name on a page", 2 * (len(HOSTILE) + 2)):
        assert main(["evaluate", str(run_folder), "--protocols", "knn", "--out", str(tmp_path / "evaluation")]) == 0
        assert main(["report", str(run_folder), "--out", str(tmp_path / "report.html"), "--images", "20"]) == 0
        for page in (tmp_path / "evaluation" / "evaluation.html", tmp_path / "report.html"):
            text = page.read_text()
            policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
            assert policy is not None
            assert policy[1].startswith("default-src &#39;none&#39;") or policy[1].startswith("default-src 'none'")
            assert "script-src" not in policy[1]
            assert "<script" not in text
            assert "<img src=x" not in text
            assert "\x1b" not in text
            assert "class&lt;script&gt;" in text
