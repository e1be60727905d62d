"""The program has layers: a module imports only from those above it in the picture of docs/explanation/concepts.md."""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import dssl

ROOT = Path(dssl.__file__).parent
DRAWING = Path(__file__).parents[1] / "docs" / "images" / "layers.py"
LAYERS = [package for packages, _ in runpy.run_path(str(DRAWING))["LAYERS"] for package in packages.split()]
SIBLINGS = ("dssl_coco", "dssl_reproduce")


def _imports(node: ast.AST, *, typing: bool) -> Iterator[str]:
    """What is imported anywhere below a node, each name with its module; without ``typing``, not for types alone."""
    if not typing and isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, typing=typing)


def test_no_import_points_to_a_lower_layer() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).with_suffix("").parts[0]
        if package in ("__init__", "__main__"):  # the public names, from every layer
            continue
        for name in _imports(ast.parse(path.read_text(encoding="utf-8")), typing=True):
            top, _, rest = name.partition(".")
            above = LAYERS[: LAYERS.index(package) + 1]
            # neither a relative import nor a public name of dssl, which may come from any layer
            if top in SIBLINGS and package != "commands":
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: a reader of dssl need not know its siblings")
            if top == "" or (top == "dssl" and rest.partition(".")[0] not in above):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_module_is_in_a_cycle_of_imports() -> None:
    """Imports inside functions count, too: whoever reads one module of a cycle has to read them all."""
    paths = [path for root in (ROOT, *(ROOT.with_name(name) for name in SIBLINGS)) for path in root.rglob("*.py")]
    modules = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
    }
    imported = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in _imports(ast.parse(path.read_text(encoding="utf-8")), typing=False)
        }
        & modules.keys()
        for module, path in modules.items()
    }

    def reached(start: str) -> set[str]:
        behind, waiting = set[str](), [start]
        while waiting:
            new = imported[waiting.pop()] - behind
            behind |= new
            waiting += new
        return behind

    cyclic = {module for module in modules if module in reached(module)}
    assert not cyclic
