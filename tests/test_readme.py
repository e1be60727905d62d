"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import torch

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


def test_the_method_of_the_documentation_works_with_every_graph() -> None:
    from dssl import Objective, named_graph
    from dssl.presets import PRESETS

    page = README.parent / "docs" / "add-a-method.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(snippet, str(page), "exec"), namespace)
    for name in PRESETS:
        graph = named_graph(name)
        views = {view.name: torch.randn(4, 3, 32, 32) for view in graph.views}
        assert Objective(namespace["method"], graph)(views).total.isfinite()  # type: ignore[arg-type]
