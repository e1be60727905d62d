"""The program has layers: a module imports only from those above it in the picture of docs/concepts.md."""

import ast
import runpy
from pathlib import Path

import dssl

DRAWING = Path(__file__).parents[1] / "docs" / "images" / "layers.py"
LAYERS = [package for packages, _ in runpy.run_path(str(DRAWING))["LAYERS"] for package in packages.split()]


def test_no_import_points_to_a_lower_layer() -> None:
    root = Path(dssl.__file__).parent
    wrong = []
    siblings = ("dssl_coco", "dssl_reproduce")
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).with_suffix("").parts[0]
        if package in ("__init__", "__main__"):  # the public names, from every layer
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                above = LAYERS[: LAYERS.index(package) + 1]
                # neither a relative import nor a public name of dssl, which may come from any layer
                if top in siblings and package != "commands":
                    wrong.append(
                        f"{path.relative_to(root)} imports {name}: a reader of dssl need not know its siblings"
                    )
                if top == "" or (top == "dssl" and rest.partition(".")[0] not in above):
                    wrong.append(f"{path.relative_to(root)} imports {name}")
    assert not wrong, "\n".join(wrong)
