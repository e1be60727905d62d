"""Configurations in and out: TOML and JSON, strict about every name and type, and the difference between two in words.

It reads and writes any frozen dataclass of settings: ``RunConfig``, and COCO's.
"""

import dataclasses
import hashlib
import json
import os
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from dssl.config import RunConfig
from dssl.errors import DsslError, choices
from dssl.methods import METHODS, MethodSettings

Plain = dict[str, Any]
RENAMED = {
    "adapt.most_drift": "adapt.max_drift",
    "method.regularise": "method.regularize",
    "look_every": "health_every",
}
"""Settings by the name that earlier versions wrote, which files may have and fingerprints keep."""
_ADDED: Plain = {
    "method.guard": 0.0, "method.predictor": "shared", "method.decoupled": False, "schedule_from": 0,
    "relation.temperature": 0.1, "relation.target_temperature": 0.04, "relation.queue": 0,
    **dict.fromkeys(("teacher", "teacher_encoder", "adapt", "shuffle", "window", "range")),
}  # fmt: skip
"""Settings that came later, with the value that changes nothing: at it they are no part of a fingerprint."""
_LARGEST = 1_000_000  # bytes of a file of settings


class Settings(Protocol):
    """A frozen dataclass of settings; ``HARMLESS`` are those that change no result, a prefix standing for all below it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    HARMLESS: ClassVar[tuple[str, ...]]

    @property
    def device(self) -> str: ...

    @property
    def batch_size(self) -> int: ...


T = TypeVar("T", bound=Settings)


def to_dict(config: Settings) -> Plain:
    """As JSON and TOML know it; ``from_dict`` is the inverse."""
    plain: Plain = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, MethodSettings):
            plain[field.name] = {"name": value.name, **plain[field.name]}
    return plain


def from_dict(plain: Mapping[str, Any], *, where: str = "configuration") -> RunConfig:
    """The configuration of a run; a missing field has its default, an unknown one is an error."""
    return build(RunConfig, plain, where=where)


def build(kind: type[T], plain: Mapping[str, Any], *, base: Mapping[str, Any] | None = None, where: str) -> T:
    """Settings of this kind from plain data; what they do not say is as in ``base``, or has its default."""
    if not isinstance(plain, Mapping):
        raise DsslError(f"{where} contains {type(plain).__name__}, expected a table of settings")
    return typing.cast(T, _build(kind, plain, base or {}, where, ""))


def load(path: Path) -> RunConfig:
    """Read a TOML or JSON file."""
    if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
        problem = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is not a regular file"
        raise DsslError(f"{path} {problem}: expected a TOML or JSON file of settings")
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text, object_pairs_hook=_no_repeats) if path.suffix == ".json" else tomllib.loads(text)
    except DsslError as error:
        raise DsslError(f"{path}: {error}") from None
    except ValueError as error:  # of TOML, of JSON, of UTF-8, of numbers with thousands of digits
        raise DsslError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise DsslError(f"{path} cannot be read: it is nested too deeply") from None
    own = plain.get("config") if isinstance(plain, dict) and "dssl_version" in plain else None
    if isinstance(own, dict):  # a run's config.json
        plain = own | {"minutes": None}  # which were spent: its epochs are settings now
    return from_dict(plain, where=str(path))


def _no_repeats(pairs: list[tuple[str, Any]]) -> Plain:
    """A JSON object; the parser alone would let the last of two equal names win silently, which TOML forbids."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise DsslError(f"the setting {name!r} is given twice: keep one of them")
    return dict(pairs)


def fingerprint(config: Settings) -> str:
    """A short hash of everything that can change a result."""
    earlier = {new: old for old, new in RENAMED.items()}  # results keep their names
    values = {
        earlier.get(key, key): value
        for key, value in flat(to_dict(config)).items()
        if not is_harmless(key, config) and (key not in _ADDED or value != _ADDED[key])
    }
    return hashlib.sha256(json.dumps(values | {"accumulate": 1}, sort_keys=True).encode()).hexdigest()[:16]


def difference(old: Mapping[str, Any], new: Settings, *, ignoring: Sequence[str] = ()) -> list[str]:
    """What differs from the plain settings of an earlier start in a way that can change a result: ``epochs: 100 -> 200``.

    A setting that it does not have, since it came later, had its default then.
    """
    before = {RENAMED.get(key, key): value for key, value in flat(old).items()}
    after = flat(to_dict(new))
    if any(key not in before for key in after):
        came_later = {key: value for key, value in _ADDED.items() if key in after}
        before = flat(_defaults(type(new))) | came_later | before
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and key not in ignoring and not is_harmless(key, new)
    ]


def _defaults(kind: type[Settings]) -> Plain:
    """Plain defaults of the fields that have one, without those of a method, which its name decides."""
    plain: Plain = {}
    for field in dataclasses.fields(kind):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value) and not isinstance(value, type | MethodSettings):
            value = dataclasses.asdict(value)
        if value is not dataclasses.MISSING and not isinstance(value, MethodSettings):
            plain[field.name] = value
    result: Plain = json.loads(json.dumps(plain, default=str))
    return result


def is_harmless(key: str, config: Settings) -> bool:
    """Whether a resumed run may change this setting, since no result depends on it."""
    return any(key.startswith(name) if name.endswith(".") else key == name for name in config.HARMLESS)


def flat(plain: Mapping[Any, Any], prefix: str = "") -> Plain:
    """Tables within tables as one, their names joined by dots."""
    table: Plain = {}
    for key, value in plain.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


def _method(value: Any, base: MethodSettings | None, where: str) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise DsslError(f"{where}: method is {value!r}, expected a name or a table with a name")
    settings = dict(value)
    name = settings.pop("name", "simsiam" if base is None else base.name)
    if not isinstance(name, str) or name not in METHODS:
        raise choices("method", str(name), METHODS)
    kind = METHODS[name]
    return _build(kind, settings, vars(base) if isinstance(base, kind) else {}, where, "method.")


def _build(kind: type, values: Mapping[str, Any], base: Mapping[str, Any], where: str, prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    changes: dict[str, Any] = {}
    for given, value in values.items():
        name = RENAMED.get(prefix + given, prefix + given).removeprefix(prefix)
        if name not in names:
            raise DsslError(f"{where}: {choices('setting', prefix + name, _names(kind, prefix))}")
        if hints[name] is MethodSettings:
            changes[name] = _method(value, base.get(name), where)
        elif (table := table_in(hints[name])) is not None and isinstance(value, Mapping):
            before = base.get(name)
            changes[name] = _build(table, value, {} if before is None else vars(before), where, f"{prefix}{name}.")
        else:
            changes[name] = _convert(value, hints[name], f"{where}: {prefix}{name}")
    return kind(**({name: value for name, value in base.items() if name in names} | changes))


def _names(kind: type, prefix: str = "") -> Iterator[str]:
    """The settings of a kind, with those of its tables but for the method's, which its name decides."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        table = None if hint is MethodSettings else table_in(hint)
        yield from [name] if table is None else _names(table, f"{name}.")


def path_of(text: str | Path) -> Path:
    """A path with a leading ~ expanded: a shell does it only at the beginning of a word, a file of settings never."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user is left as it is, not an error)


def table_in(hint: Any) -> type | None:
    """The dataclass that a setting is, or may be."""
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value in its declared type; only lossless conversions are made (an int to a float, a text to a path)."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in inside and type(value) in map(type, inside):
            return value
        raise DsslError(f"{name} is {value!r}, expected one of {', '.join(map(str, inside))}")
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inside:
            return None
        return _convert(value, next(kind for kind in inside if kind is not type(None)), name)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return path_of(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(entry, inside[0], name) for entry in value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise DsslError(f"{name} is {value!r}, expected {'a table' if dataclasses.is_dataclass(hint) else wanted}")
