"""What the README shows runs as it stands there."""

import re
from pathlib import Path

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
