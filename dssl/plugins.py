"""Python files that ``--plugin`` names: executed once, they register methods, encoders, operations and sources."""

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dssl.errors import DsslError

_loaded: dict[str, str] = {}
"""The SHA-256 of every file that was executed, by its path as given."""


def load(path: Path) -> None:
    """Execute the file, unless this process has already done so."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DsslError(f"--plugin is {path} ({error.strerror}): expected a Python file") from None
    name, digest = str(path), hashlib.sha256(content).hexdigest()
    if _loaded.get(name) == digest:
        return
    _loaded[name] = digest
    module = ModuleType(f"dssl_plugin_{digest[:16]}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where dataclasses look up the annotations of settings
    exec(compile(content, name, "exec"), vars(module))


def loaded() -> list[dict[str, str]]:
    """Path and SHA-256 of every plugin, as a run records them."""
    return [{"path": path, "sha256": digest} for path, digest in _loaded.items()]


def words() -> list[str]:
    """The part of a command line that names the plugins again."""
    return [word for path in _loaded for word in ("--plugin", path)]


def check(recorded: list[dict[str, str]], *, place: Path) -> None:
    """An error unless the plugins are those that the run in this folder was started with; they may have moved."""
    before, now = ({plugin["sha256"] for plugin in plugins} for plugins in (recorded, loaded()))
    if before != now:
        then, given = (
            ", ".join(f"{plugin['path']} (SHA-256 {plugin['sha256'][:12]})" for plugin in plugins) or "none"
            for plugins in (recorded, loaded())
        )
        raise DsslError(
            f"{place} was started with other plugins: then {then}, now {given}: "
            "give the same files with --plugin, or another --out"
        )


def place_of(error: BaseException) -> str:
    """The line of a plugin at which an error arose, as ``my.py, line 3``; empty if none of its lines took part."""
    if isinstance(error, SyntaxError) and error.filename in _loaded:
        return f"{error.filename}, line {error.lineno}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _loaded]
    return f"{lines[-1].filename}, line {lines[-1].lineno}" if lines else ""
