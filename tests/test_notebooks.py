"""The notebooks of examples/ run from the first cell to the last, on tiny data in a process of their own."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dssl.data.shapes import Shapes
from tests.train.adapting import write_weights

FOLDER = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def names(cell: str) -> set[str]:
    return {target.id for node in ast.parse(cell).body for target in node.targets}  # type: ignore[attr-defined]


def execute(name: str, settings: str, folder: Path) -> str:
    """With other values for the names that the first cell sets; returns what it printed."""
    first, *cells = code_cells(FOLDER / name)
    assert names(settings) == names(first)
    script = folder / "notebook.py"
    script.write_text("\n\n".join([settings, *cells]))
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_photos(tmp_path: Path) -> None:
    for folder, count in (("photos", 32), ("photos-test", 12)):
        source = Shapes(count, split="train" if folder == "photos" else "test")
        for index in range(count):
            place = tmp_path / folder / ("round" if index % 2 else "flat")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(source.image(index)).save(place / f"{index}.png")
    write_weights(tmp_path / "weights.pth")
    settings = """
PHOTOS = "photos"
TEST = "photos-test"
OUT = "run"
SETTINGS = {
    "encoder": "small", "init": "weights.pth", "image_size": 16, "epochs": 2, "batch_size": 8, "threads": 1,
    "adapt": {"head_epochs": 1, "evaluation_size": 18}, "optimizer": {"warmup_epochs": 0.1}, "standard": "crop(0.3,1) > flip",
}
"""
    assert "32 photos" in execute("photos.ipynb", settings, tmp_path)
    assert (tmp_path / "run" / "evaluation" / "comparison.json").is_file()


def test_own_method(tmp_path: Path) -> None:
    settings = """
DATA = "shapes:64"
OUT = "run"
SETTINGS = {"epochs": 1, "encoder": "small", "batch_size": 16, "image_size": 16, "threads": 1, "knn_every": 0}
"""
    said = execute("own_method.ipynb", settings, tmp_path)
    assert "weight 1: loss from" in said
    assert {path.name for path in tmp_path.glob("run-*")} == {"run-0", "run-1"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_output_is_whole_and_light(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 1_500_000
    assert not re.search(r"(/tmp|/home|/root|/work|/Users)/", text)
    outputs = [out for cell in json.loads(text)["cells"] for out in cell.get("outputs", [])]
    assert not any(output["output_type"] == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
