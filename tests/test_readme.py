"""What the README shows runs as printed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dssl import Objective, build_encoder, named_graph
from dssl.cli import main
from dssl.methods import METHODS
from dssl.presets import PRESETS
from dssl.weights import checkpoint

README = Path(__file__).parent.parent / "README.md"


def test_the_library_snippet_runs_and_is_short() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    snippet = next(block for block in blocks if "Objective" in block)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    namespace: dict[str, object] = {}
    exec(compile(snippet, str(README), "exec"), namespace)
    assert namespace["report"].total.isfinite()  # type: ignore[attr-defined]


def test_links_lead_somewhere() -> None:
    pages = [README, *README.parent.glob("*.md"), *(README.parent / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_method_of_the_documentation_works_with_every_graph_and_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = README.parent / "docs" / "add-a-method.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(snippet, str(page), "exec"), namespace)
    declared = namespace["METHOD"]
    method = declared.build(build_encoder("small", image_size=32), feature_dim=256)
    for name in PRESETS:
        graph = named_graph(name)
        views = {view.name: torch.randn(4, 3, 32, 32) for view in graph.views}
        assert Objective(method, graph)(views).total.isfinite()

    # in its place, as the page says, in a copy of the program
    copy = tmp_path / "copy" / "dssl"
    shutil.copytree(README.parent / "dssl", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "methods" / "margin.py").write_text(snippet)
    listing = copy / "methods" / "__init__.py"
    listing.write_text(
        listing.read_text()
        .replace("import barlowtwins, byol,", "import barlowtwins, byol, margin,")
        .replace("barlowtwins.METHOD)", "barlowtwins.METHOD, margin.METHOD)")
    )
    words = [sys.executable, "-m", "dssl", "graph", "dssl"]
    found = subprocess.run(words, cwd=copy.parent, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert "margin" in found.stdout

    monkeypatch.setitem(METHODS, declared.name, declared)
    out = tmp_path / "run"
    words = [
        "train",
        "shapes",
        "--method",
        "margin",
        "--method.margin",
        "0.8",
        "--data",
        "shapes:32",
        "--batch-size",
        "16",
    ]
    words += ["--epochs", "1", "--knn-every", "0", "--precision", "fp32", "--out", str(out)]
    assert main(words) == 0
    saved = checkpoint.newest_good(out / "checkpoints")
    assert saved is not None
    assert saved[1].header["config"]["method"] == {"name": "margin", "output": 64, "margin": 0.8}
    assert saved[1].tensors["method.projector.weight"].shape == (64, 256)
    assert main(words) == 0  # and it is resumed
