"""Configurations in and out: TOML and JSON, strict about every name and type, with the difference of two in words."""

import dataclasses
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dssl.config import METHOD_CONFIGS, RunConfig, method_name
from dssl.errors import DsslError, choices

Plain = dict[str, Any]
_LARGEST = 1_000_000  # bytes of a file of settings


def to_dict(config: RunConfig) -> Plain:
    """Plain data, as JSON and TOML know it; ``from_dict`` is the inverse."""
    plain: Plain = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    plain["method"] = {"name": method_name(config.method), **plain["method"]}
    return plain


def from_dict(plain: Mapping[str, Any], *, default: RunConfig | None = None, where: str = "configuration") -> RunConfig:
    """A configuration from plain data; a field that is missing is taken from ``default``, one too many is refused."""
    if not isinstance(plain, Mapping):
        raise DsslError(f"{where} holds {type(plain).__name__}, expected a table of settings")
    values = dict(plain)
    base = default or RunConfig()
    if "method" in values:
        values["method"] = _method(values["method"], base, where)
    return typing.cast(RunConfig, _build(RunConfig, values, base, where, ""))


def load(path: Path, *, default: RunConfig | None = None) -> RunConfig:
    """Read a TOML or JSON file."""
    if path.exists() and not path.is_file():
        raise DsslError(f"{path} is no regular file: expected a TOML or JSON file of settings")
    if path.exists() and path.stat().st_size > _LARGEST:
        raise DsslError(f"{path} has {path.stat().st_size:,} bytes: expected a TOML or JSON file of settings")
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text, object_pairs_hook=_no_repeats) if path.suffix == ".json" else tomllib.loads(text)
    except DsslError as error:
        raise DsslError(f"{path}: {error}") from None
    except ValueError as error:  # of TOML, of JSON, of UTF-8, of numbers with thousands of digits
        raise DsslError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise DsslError(f"{path} cannot be read: it is nested too deeply") from None
    return from_dict(plain, default=default, where=str(path))


def _no_repeats(pairs: list[tuple[str, Any]]) -> Plain:
    """A JSON object; the parser alone would let the last of two equal names win in silence, which TOML forbids."""
    plain: Plain = {}
    for name, value in pairs:
        if name in plain:
            raise DsslError(f"the setting {name!r} is given twice: keep one of them")
        plain[name] = value
    return plain


def fingerprint(config: RunConfig) -> str:
    """A short hash of everything that can change a result."""
    text = json.dumps({key: value for key, value in _flat(to_dict(config)) if not _harmless(key)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(old: RunConfig, new: RunConfig) -> list[str]:
    """What differs in a way that can change a result: ``epochs: 100 -> 200``."""
    before, after = dict(_flat(to_dict(old))), dict(_flat(to_dict(new)))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not _harmless(key)
    ]


def _harmless(key: str) -> bool:
    """Settings that a run may change half-way, since no weight depends on them."""
    return key.startswith(("checkpoint.", "health.")) or key in ("threads", "knn_every", "bad_share")


def _flat(plain: Plain, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _method(value: Any, base: RunConfig, where: str) -> Any:
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise DsslError(f"{where}: method is {value!r}, expected a name or a table with a name")
    settings = dict(value)
    name = settings.pop("name", method_name(base.method))
    if not isinstance(name, str) or name not in METHOD_CONFIGS:
        raise choices("method", str(name), METHOD_CONFIGS)
    kind = METHOD_CONFIGS[name]
    default = base.method if isinstance(base.method, kind) else kind()
    return _build(kind, settings, default, where, "method.")


def _build(kind: type, values: Mapping[str, Any], default: Any, where: str, prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise DsslError(f"{where}: {choices('setting', prefix + name, (prefix + one for one in known))}")
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            assert isinstance(hints[name], type)
            changes[name] = _build(hints[name], value, getattr(default, name), where, f"{prefix}{name}.")
        else:
            changes[name] = _convert(value, hints[name], f"{where}: {prefix}{name}")
    return dataclasses.replace(default, **changes)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value as its type wants it; only loss-free steps are taken (an int for a float, a text for a path)."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in inside and type(value) in {type(one) for one in inside}:
            return value
        raise DsslError(f"{name} is {value!r}, expected one of {', '.join(map(str, inside))}")
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inside:
            return None
        if any(dataclasses.is_dataclass(one) for one in inside):
            if isinstance(value, inside):
                return value
            raise DsslError(f"{name} is {value!r}, expected a table")
        return _convert(value, next(one for one in inside if one is not type(None)), name)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = getattr(hint, "__name__", str(hint))
    raise DsslError(f"{name} is {value!r}, expected {'a table' if dataclasses.is_dataclass(hint) else wanted}")
