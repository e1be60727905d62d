"""What the commands do with their arguments before they do anything else."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from dssl.errors import DsslError
from dssl.settings import LARGEST

T = TypeVar("T")


def check_counts(arguments: object, names: Iterable[str]) -> None:
    """Refuse a number below 1, or one above what a configuration allows under the same name; None means the default."""
    for name in names:
        value = getattr(arguments, name)
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value < 1:
            raise DsslError(f"{flag} is {value}: expected 1 or more")
        if value > LARGEST.get(name, value):
            raise DsslError(f"{flag} is {value}: expected at most {LARGEST[name]:,}")


def with_home(arguments: T) -> T:
    """The arguments with ~ at the beginning of a path expanded; a shell does so only at the beginning of a word."""
    assert dataclasses.is_dataclass(arguments)
    changes = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if (expanded := _expanded(value)) != value:
            changes[field.name] = expanded
    return dataclasses.replace(arguments, **changes) if changes else arguments  # type: ignore[type-var]


def _expanded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_expanded(one) for one in value)
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111 (unknown users stay)
