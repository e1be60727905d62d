"""The versions that the tests run with are allowed; what is imported is declared, and what is private has an upper bound."""

import ast
import operator
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

import dssl

ROOT = Path(__file__).parents[1]
PACKAGES = ("dssl", "dssl_coco", "dssl_reproduce")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "pillow_heif": "pillow-heif",
    "sklearn": "scikit-learn",
}
"""Of modules that are not called like what installs them."""
INTERNAL = {"numba.core": "numba", "llvmlite.ir": "llvmlite"}
"""Modules that are private without an underscore."""
ATTRIBUTES = {
    "_mode": "pillow",
    **dict.fromkeys(
        ("_BatchNorm", "_apply", "_buffers", "_cdata", "_modules", "_overloadpacket", "_parameters"), "torch"
    ),
    "_exit": None,  # of os, and documented
    "_replace": None,  # of named tuples, and documented
}
"""Private attributes of other packages' objects: whose they are."""


def requirements() -> list[Requirement]:
    extras = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
    wanted = (Requirement(text) for text in (*PROJECT["dependencies"], *extras))
    return [requirement for requirement in wanted if requirement.name != "dssl"]


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """The full names of all that is imported, at the top of the file and inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def distribution(name: str) -> str | None:
    """What has to be installed for this import; None where nothing has to."""
    top = name.partition(".")[0]
    return None if top in (*PACKAGES, *sys.stdlib_module_names) else DISTRIBUTIONS.get(top, top)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_packages() -> Iterator[tuple[Path, str]]:
    """Every use of another package's private parts."""
    own = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                own.add(node.attr)
    for path, tree in trees():
        modules = {
            node.asname or node.name for part in ast.walk(tree) if isinstance(part, ast.Import) for node in part.names
        }
        for name in imported(tree):
            package = distribution(name)
            internal = any(name.startswith(start) for start in INTERNAL)
            if package is not None and (internal or any(map(is_private, name.split(".")))):
                yield path, package
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and is_private(node.attr)):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in modules and node.attr not in ATTRIBUTES:
                package = distribution(node.value.id)
                if package is not None:
                    yield path, package
            elif node.attr not in own:
                assert node.attr in ATTRIBUTES, f"{path}:{node.lineno}: whose is {node.attr}?"
                package = ATTRIBUTES[node.attr]
                if package is not None:
                    yield path, package


def test_constraints_are_within_the_bounds() -> None:
    files = (ROOT / "tests" / "integrations" / "constraints.txt", ROOT / "constraints.txt")  # extras that dev has not
    pins = dict(line.split("==") for file in files for line in file.read_text().split())
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for requirement in requirements():
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_what_is_imported_is_declared() -> None:
    declared = {requirement.name for requirement in requirements()}
    needed = {(str(path), distribution(name)) for path, tree in trees() for name in imported(tree)}
    assert [(path, name) for path, name in sorted(needed, key=str) if name is not None and name not in declared] == []


def test_what_is_private_is_bounded() -> None:
    bounded = {
        requirement.name
        for requirement in requirements()
        if any(part.operator == "<" for part in requirement.specifier)
    }
    used = set(private_packages())
    assert {"torch", "pillow", "numba"} <= {package for _, package in used}
    assert [(str(path), name) for path, name in sorted(used) if name not in bounded] == []


def test_the_docstring_of_the_package_names_what_works() -> None:
    names = re.findall(r"``(dssl\.[\w.]+)``", dssl.__doc__ or "")
    assert "dssl.train" in names
    for name in names:
        assert callable(operator.attrgetter(name.removeprefix("dssl."))(dssl))
