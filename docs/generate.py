"""The pages of the reference that are made from the code: commands, settings, recipes, the Python API. Run by conf.py.

Nothing here knows an option: help texts are what the commands print, settings are the fields of the dataclasses with the
docstrings below them, and the API is ``dssl.__all__``.
"""

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dssl
from dssl import recipes
from dssl.commands import COMMANDS
from dssl.config import RunConfig
from dssl.methods import METHODS, MethodSettings

GROUPS = {
    "api": "Run it",
    "graph": "View graphs",
    "objective": "Train in your own loop",
    "methods": "Methods",
    "models": "Encoders and weights",
    "weights": "Encoders and weights",
    "config": "Settings",
    "recipes": "Settings",
}
"""The heading of a public name, by the module that it comes from."""


def write(folder: Path) -> None:
    """Write the four pages, and leave those that have not changed alone, so that Sphinx need not read them again."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "commands": commands(),
        "configuration": configuration(),
        "recipes": recipes_side_by_side(),
        "api": api(),
    }
    for name, lines in pages.items():
        path, text = folder / f"{name}.md", "\n".join(lines) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def commands() -> Iterator[str]:
    """What every command prints with --help, in a fresh process as a user would see it."""
    yield from ("# Command line", "", "What `dssl COMMAND --help` prints.", "")
    environment = os.environ | {"COLUMNS": "78", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}

    def helped(words: list[str]) -> str:
        command = [sys.executable, "-m", "dssl", *words, "--help"]
        text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return "\n".join(
            textwrap.fill(line, 78) if len(line) > 78 and line[0] != " " else line for line in text.splitlines()
        )

    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(helped, [[], *([name] for name in COMMANDS)])
    for name, text in zip(["", *COMMANDS], texts, strict=True):
        if name:
            yield from (f"## dssl {name}", "")
        yield from ("```text", text.rstrip(), "```", "")


def fields_of(settings: type[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and docstring of each field of a dataclass, those that it inherits included."""
    kinds: dict[str, str] = {}
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(settings)):
        if not dataclasses.is_dataclass(owner):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                kinds[ast.unparse(field.target)] = ast.unparse(field.annotation)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    texts[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    for field in dataclasses.fields(settings):
        if field.default_factory is not dataclasses.MISSING:
            default = f"{type(field.default_factory()).__name__}()"
        else:
            default = "required" if field.default is dataclasses.MISSING else repr(field.default)
        yield field.name, kinds[field.name], default, texts.get(field.name, "")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    """Text in a cell of a table, as code."""
    return f"`{text}`".replace("|", "\\|")


def table(settings: type[Any], prefix: str = "") -> Iterator[str]:
    yield from ("| setting | type | default | what it does |", "|---|---|---|---|")
    for name, kind, default, text in fields_of(settings):
        yield f"| {code(prefix + name)} | {code(kind)} | {code(default)} | {cell(text)} |"
    yield ""


def configuration() -> Iterator[str]:
    yield from ("# Configuration", "", "Everything that defines a run.", "")
    yield "A field `batch_size` is the flag `--batch-size`, a keyword of `dssl.train`, and a key of a configuration file."
    yield "A field of a group is `--optimizer.weight-decay` on the command line, and a key of the table `optimizer` in a file."
    yield from ("The defaults are those of the class; a recipe has its own.", "", "## Run", "", *table(RunConfig))
    for name in ("optimizer", "checkpoint", "health", "adapt"):
        group = next(kind for kind in _groups(RunConfig) if kind.__name__.lower() == f"{name}config")
        yield from (f"## {name}", "", inspect.getdoc(group) or "", "", *table(group, f"{name}."))
    for name, settings in METHODS.items():
        yield from (f"## method: {name}", "", inspect.getdoc(settings) or "", "", *table(settings, "method."))


def _groups(settings: type[Any]) -> Iterator[type[Any]]:
    module = sys.modules[settings.__module__]
    yield from (kind for kind in vars(module).values() if inspect.isclass(kind) and dataclasses.is_dataclass(kind))


def flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, MethodSettings):
            yield f"{prefix}{field.name}", value.name
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def recipes_side_by_side() -> Iterator[str]:
    """The settings in which recipes differ, each built by the public function."""
    names = list(recipes.RECIPES)
    columns = {name: dict(flat(dssl.recipe(name))) for name in names}
    yield from (
        "# Recipes side by side",
        "",
        "`dssl train RECIPE` starts from these settings, and flags change single ones.",
    )
    yield from ("The table has the settings in which recipes differ; the rest is the same in all of them.", "")
    for name in names:
        about = (inspect.getdoc(recipes.RECIPES[name]) or "").split("\n\n")[0].replace("\n", " ")
        yield f"- **{name}**: {about}"
    yield from ("", f"| setting | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|")
    for setting in dict.fromkeys(setting for column in columns.values() for setting in column):
        values = [column.get(setting, "") for column in columns.values()]
        if len({repr(value) for value in values}) > 1:
            yield f"| `{setting}` | {' | '.join(cell(str(value)) for value in values)} |"
    yield ""


def api() -> Iterator[str]:
    """Every name of ``dssl.__all__``, by the module that it comes from."""
    yield from ("# Python API", "", "Everything that `import dssl` exports; nothing else is public.")
    yield from ("Names are loaded when they are first used, so that `import dssl` does not import torch.", "")
    groups: dict[str, list[str]] = {heading: [] for heading in (*GROUPS.values(), "Other")}
    for name in dssl.__all__:
        home = getattr(getattr(dssl, name), "__module__", "").split(".")
        groups[GROUPS.get(home[1] if len(home) > 1 else "", "Other")].append(name)
    for heading, names in groups.items():
        if not names:
            continue
        yield from (f"## {heading}", "")
        for name in names:
            thing = getattr(dssl, name)
            kind = "class" if inspect.isclass(thing) else "function" if callable(thing) else "data"
            if inspect.isclass(thing) and issubclass(thing, BaseException):
                kind = "exception"
            yield from ("```{eval-rst}", f".. auto{kind}:: dssl.{name}")
            if kind == "class" and "Config" not in name:
                yield "   :members:"
            yield from ("```", "")


if __name__ == "__main__":
    write(Path(__file__).parent / "reference" / "generated")
