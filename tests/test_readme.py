"""What the README shows runs as printed."""

import os
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
from dssl.graph import PRESETS
from dssl.methods import METHODS
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
    snippet, _ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setitem(METHODS, "uniformity", METHODS["simclr"])  # so that what the page adds is taken out again
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
    with (copy / "methods" / "settings.py").open("a") as file:
        file.write("\n\n" + snippet[begin:end])
    imported = "from dssl.methods import UniformityConfig\n\n\n"
    (copy / "methods" / "uniformity.py").write_text(snippet[:begin] + imported + snippet[end:])
    listing = copy / "methods" / "__init__.py"
    text = listing.read_text().replace("import (\n", "import (\n    UniformityConfig,\n")
    last = "        MatchConfig,\n"
    assert text.count(last) == 1
    listing.write_text(text.replace(last, f"{last}        UniformityConfig,\n"))
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
