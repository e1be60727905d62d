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
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                above = TOWER[: TOWER.index(room) + 1]
                # neither a relative import nor a public name of dssl, which may come from any floor
                if top == "" or (top == "dssl" and rest.partition(".")[0] not in above):
                    wrong.append(f"{path.relative_to(root)} imports {name}")
    assert not wrong, "\n".join(wrong)
