"""The program is a tower: a module imports only what stands above it in the picture of docs/concepts.md."""

import ast
import runpy
from pathlib import Path

import dssl

DRAWING = Path(__file__).parents[1] / "docs" / "images" / "tower.py"
TOWER = [room for rooms, _ in runpy.run_path(str(DRAWING))["FLOORS"] for room in rooms.split()]


def test_no_import_points_down_the_tower() -> None:
    root = Path(dssl.__file__).parent
    wrong = []
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).with_suffix("").parts[0]
        if room in ("__init__", "__main__"):  # the public names, from every floor
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for parts in (name.split(".") for name in names):
                if parts[0] == "dssl" and parts[1] in TOWER and TOWER.index(parts[1]) > TOWER.index(room):
                    wrong.append(f"{path.relative_to(root)} imports {'.'.join(parts)}")
    assert not wrong, "\n".join(wrong)
