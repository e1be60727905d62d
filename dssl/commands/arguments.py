"""What commands do with their arguments: check counts, expand paths, open weights, and turn them back into a command line."""

import dataclasses
import os
import shlex
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from dssl.errors import DsslError
from dssl.settings import LARGEST

if TYPE_CHECKING:
    from dssl.weights.load import LoadedEncoder

T = TypeVar("T")


def check_counts(arguments: object, names: Iterable[str]) -> None:
    """Refuse a number below 1, or above the limit that a configuration has for the same name; None means the default."""
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
    """The arguments with a leading ~ of every path expanded; a shell expands it only at the beginning of a word."""
    assert dataclasses.is_dataclass(arguments)
    changes = {}
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if (expanded := _expanded(value)) != value:
            changes[field.name] = expanded
    return dataclasses.replace(arguments, **changes) if changes else arguments  # type: ignore[type-var]  # T is one


class NamesWeights(Protocol):
    """The arguments by which an encoder is found, and told what its file does not say."""

    @property
    def weights(self) -> Path: ...
    @property
    def encoder(self) -> str | None: ...
    @property
    def stem(self) -> Literal["cifar", "padding2", "norelu"] | None: ...
    @property
    def image_size(self) -> int | None: ...
    @property
    def normalization(self) -> Literal["cifar10", "imagenet"] | None: ...


def open_encoder(arguments: NamesWeights) -> "LoadedEncoder":
    """The encoder; what was loaded and what was not is printed."""
    from dssl.augment import CIFAR10, IMAGENET
    from dssl.weights.load import open_weights

    loaded = open_weights(
        arguments.weights,
        encoder=arguments.encoder,
        stem=arguments.stem,
        image_size=arguments.image_size,
        normalization={"cifar10": CIFAR10, "imagenet": IMAGENET, None: None}[arguments.normalization],
    )
    print(loaded.report.text())
    return loaded


def default_folder(weights: Path) -> Path:
    """The run's folder for a run or a checkpoint in it; the current folder for any other file."""
    from dssl.weights.checkpoint import FOLDER

    if weights.is_dir():
        return weights.parent if weights.name == FOLDER else weights
    return weights.parent.parent if weights.parent.name == FOLDER else Path()


def command_line(command: str, arguments: Any, *, always: Container[str] = (), leave_out: Container[str] = ()) -> str:
    """The command that has these arguments: positional ones, then every flag whose value is not the default.

    ``always`` names flags that are given even at their default, ``leave_out`` those that do not belong to the result.
    """
    positional, flags = [], []
    for name, value, default in _fields(arguments):
        if default is dataclasses.MISSING:
            positional += _words(value)
        elif name not in leave_out and (name in always or value != default):
            parent, dot, last = name.replace("_", "-").rpartition(".")
            if isinstance(value, bool):
                flags.append(f"--{parent}{dot}{'' if value else 'no-'}{last}")
            else:
                flags += [f"--{parent}{dot}{last}", *_words(value)]
    return shlex.join(["dssl", command, *positional, *flags])


def _fields(arguments: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of every field; those of a nested ``config`` are the command's own, others get a prefix."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, prefix if field.name == "config" else f"{prefix}{field.name}.")
        else:
            make = field.default_factory
            yield prefix + field.name, value, field.default if make is dataclasses.MISSING else make()


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def _expanded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_expanded(one) for one in value)
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111 (unknown users stay)
