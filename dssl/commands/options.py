"""The command line from dataclasses: each field is an option, and the text under it is its help."""

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dssl.config_io import RENAMED, path_of, table_in
from dssl.errors import DsslError, nearest
from dssl.methods import METHODS, MethodSettings

NO_OPTION = {"option": False}
"""Metadata of a field that the command line does not set."""
ALIASES = RENAMED | {
    "size": "image_size", "side": "image_size", "max_bad": "bad_share", "policies": "heavy", "every": "all",
    "lr": "rate", "rate": "optimizer.rate", "guard": "method.guard", "method.name": "method",
}  # fmt: skip
"""Earlier and other names of options, which the help leaves out."""
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"} | {
    "data": "IMAGES", "encoder": "NAME", "method": "NAME", "graph": "GRAPH", "standard": "POLICY",
    "heavy": "POLICY", "init": "WEIGHTS", "teacher": "WEIGHTS", "teacher_encoder": "NAME", "resume": "RUN",
    "config": "FILE", "write_config": "FILE", "range": "LOW,HIGH",
}  # fmt: skip
_LEFT = 26
"""Columns of a help that the names of options have."""
_EXPECTED = {int: "a whole number", float: "a number", str: "a value"}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a command is called: ``USAGE`` of its arguments."""

    positional: Mapping[str, str] = field(default_factory=dict)
    """Options that may be given by position, in this order, with the words for them; in brackets if they may be left out."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Headings of the help with the names of their options, or with a prefix such as ``optimizer.``; the rest come last."""
    examples: Sequence[str] = ()
    defaults: str = ""
    """Where the defaults of the settings come from, if not from their classes."""


@dataclass(frozen=True, slots=True)
class Option:
    path: tuple[str, ...]
    """The fields that lead to it from the command's arguments."""
    name: str
    """As in a file of settings: ``optimizer.weight_decay``."""
    hint: Any
    default: Any
    owner: type

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def negative(self) -> str:
        """The flag that turns it off."""
        parent, dot, last = self.flag.removeprefix("--").rpartition(".")
        return f"--{parent}{dot}no-{last}"


@dataclass(frozen=True, slots=True)
class Typed:
    """An option as it was typed."""

    flag: str
    words: Sequence[str]

    def value(self, hint: Any) -> Any:
        """The value in the option's type."""
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            kind = next(kind for kind in inside if kind is not type(None))
            return None if [word.lower() for word in self.words] == ["none"] else self.value(kind)
        if origin is tuple:
            return tuple(Typed(self.flag, [word]).value(inside[0]) for word in self.words)
        word = self.words[-1]
        if hint is bool:
            return word == "yes"
        if hint is Path:
            return path_of(word)
        if origin is Literal:
            known = {str(choice): choice for choice in inside}
            if word not in known:
                raise DsslError(f"{self.flag} is {word!r}, expected one of {', '.join(known)}")
            return known[word]
        try:
            return hint(word)
        except ValueError:
            raise DsslError(f"{self.flag} is {word!r}, expected {_EXPECTED[hint]}") from None


Given = dict[str, Typed]


def word(given: Given, name: str) -> str | None:
    """The last word that was given for an option."""
    return given[name].words[-1] if name in given else None


def options_of(kind: type[Any], path: tuple[str, ...] = (), prefix: str = "") -> Iterator[Option]:
    """The options of a command; those of a field called ``settings`` are the command's own, those of others get a prefix."""
    hints = typing.get_type_hints(kind)
    for part in dataclasses.fields(kind):
        hint, here, name = hints[part.name], (*path, part.name), prefix + part.name
        if part.metadata == NO_OPTION:
            continue
        if hint is MethodSettings:
            yield Option(here, name, str, None, kind)
            for method in METHODS.values():
                yield from options_of(method, here, f"{name}.")
        elif (table := table_in(hint)) is not None:
            yield from options_of(table, here, "" if part.name == "settings" else f"{name}.")
        else:
            make = part.default_factory
            yield Option(here, name, hint, part.default if make is dataclasses.MISSING else make(), kind)


def parse(kind: type[Any], words: Sequence[str], *, base: Callable[[Given], Any] | None = None) -> Any:
    """The arguments of a command from its words; ``base`` finds the values of what was not given."""
    given = scan(kind, words)
    return build(kind, given, None if base is None else base(given))


def scan(kind: type[Any], words: Sequence[str]) -> Given:
    """Which option got which words."""
    options: dict[str, Option] = {}
    for option in options_of(kind):
        options.setdefault(_key(option.name), option)
    given, loose, waiting = Given(), list[str](), list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            loose += waiting
            break
        if not word.startswith("-") or word[1:2].isdigit() or word == "-":
            loose.append(word)
            continue
        flag, equals, value = word.partition("=")
        option, on = _find(flag, options)
        if _is(option.hint, bool):
            if equals:
                raise DsslError(f"{flag} takes no value: expected {option.flag} or {option.negative}")
            values = ["yes" if on else "no"]
        elif equals:
            values = [value]
        elif _is(option.hint, tuple):
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), waiting))
            del waiting[: len(values)]
        elif not waiting or waiting[0].startswith("--"):
            raise DsslError(f"{flag} needs a value, as in {flag} {_metavar(option)}")
        else:
            values = [waiting.pop(0)]
        given[option.name] = Typed(flag, values)
    for name, metavar in kind.USAGE.positional.items():
        if loose and name not in given:
            several = _is(options[_key(name)].hint, tuple)
            given[name] = Typed(metavar.strip("[.] "), loose if several else loose[:1])
            loose = [] if several else loose[1:]
    if loose:
        places = " ".join([*kind.USAGE.positional.values(), "[options]"])
        raise DsslError(f"unexpected {loose[0]!r}: expected {places}; options begin with --")
    return given


def build(kind: type[Any], given: Given, base: Any) -> Any:
    """The arguments, with the values of ``base`` (or the defaults) for what was not given."""
    if base is None:
        for option in options_of(kind):
            if option.name in given:
                given[option.name].value(option.hint)  # what is wrong comes before what is missing: dssl data photos
            elif option.default is dataclasses.MISSING:
                what = kind.USAGE.positional.get(option.name, option.flag)
                raise DsslError(f"{what} is missing, as in {kind.USAGE.examples[0]}")
    return _build(kind, given, base, "")


def _build(kind: type[Any], given: Given, base: Any, prefix: str) -> Any:
    hints, changes = typing.get_type_hints(kind), {}
    for part in dataclasses.fields(kind):
        name, hint = prefix + part.name, hints[part.name]
        if (table := table_in(hint)) is not None:
            below = "" if part.name == "settings" else f"{name}."
            value = None if base is None else vars(base)[part.name]
            if any(option.startswith(below) for option in given) or not below:
                changes[part.name] = _build(table if value is None else type(value), given, value, below)
        elif name in given:
            changes[part.name] = given[name].value(hint)
    return kind(**changes) if base is None else dataclasses.replace(base, **changes) if changes else base


def help_text(kind: type[Any], program: str, *, base: Any = None, plugins: bool = False) -> str:
    """The help of a command, with the values of ``base`` (or the defaults)."""
    usage: Usage = kind.USAGE
    options = {option.name: option for option in options_of(kind) if _is_shown(option, usage, base)}
    width = min(100, shutil.get_terminal_size().columns)
    sections = [f"usage: {' '.join([program, *usage.positional.values()])} [options]"]
    sections += [textwrap.fill(" ".join(part.split()), width) for part in (inspect.getdoc(kind) or "").split("\n\n")]
    if usage.defaults and base is None:
        sections.append(textwrap.fill(usage.defaults, width))
    places = [
        (metavar.strip("[]"), f"{_sentence(options[name])}{f' Also {options[name].flag}.' if name == 'data' else ''}")
        for name, metavar in usage.positional.items()
    ]
    options = {name: option for name, option in options.items() if name not in usage.positional}
    sections += [_rows(places, width)] if places else []
    for heading, entries in {**usage.groups, "advanced" if usage.groups else "options": [""]}.items():
        names = [
            name for entry in entries for name in options if name == entry or (entry[-1:] in ("", ".") and name.startswith(entry))
        ]  # fmt: skip
        rows = [_row(options.pop(name), usage, base) for name in names]
        if plugins and entries == [""]:
            rows.append(
                ("--plugin FILE", "Execute this Python file first; it may register methods, encoders and sources.")
            )
        sections += [f"{heading}:\n{_rows(rows, width)}"] if rows else []
    return "\n\n".join([*sections, "\n".join(["examples:", *(f"  {example}" for example in usage.examples)])])


def _is_shown(option: Option, usage: Usage, base: Any) -> bool:
    """Settings of a method depend on the method, and so do those of adaptation on the recipe."""
    if base is None:
        return not issubclass(option.owner, MethodSettings)
    owner = functools.reduce(lambda value, name: None if value is None else vars(value)[name], option.path[:-1], base)
    return isinstance(owner, option.owner)


def _row(option: Option, usage: Usage, base: Any) -> tuple[str, str]:
    value, text = option.default, _sentence(option)
    if base is not None:
        value = functools.reduce(lambda owner, name: vars(owner)[name], option.path, base)
    if _is(option.hint, bool):
        left = option.negative.replace("no-", "[no-]") if value else option.flag
        value = "on" if value else None
    else:
        left = f"{option.flag} {_metavar(option)}"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    elif isinstance(value, MethodSettings):
        value = value.name
    if value in (None, "", dataclasses.MISSING) or (base is None and usage.defaults):
        return left, text
    return left, f"{text.removesuffix('.')} (default: {value})"


def _rows(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Options on the left, their help on the right, or below if the option is long."""
    lines = []
    for option, text in rows:
        left, right = f"  {option}", textwrap.indent(textwrap.fill(text, width - _LEFT), " " * _LEFT)
        lines.append(f"{left}{right[len(left) :]}" if len(left) < _LEFT - 1 else f"{left}\n{right}")
    return "\n".join(lines)


def _metavar(option: Option) -> str:
    hints = (option.hint, *typing.get_args(option.hint))
    several = " ..." if _is(option.hint, tuple) else ""
    for hint in hints:
        if typing.get_origin(hint) is Literal:
            return "|".join(map(str, typing.get_args(hint))) + several
    kinds = [kind for hint in hints for kind in (hint, *typing.get_args(hint)) if kind in _METAVARS]
    return _METAVARS.get(option.name, _METAVARS[kinds[0]]) + several


def _sentence(option: Option) -> str:
    return _texts(option.owner).get(option.path[-1], "")


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """The text under each field of a dataclass and of those that it derives from."""
    texts: dict[str, str] = {}
    for owner in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]).body
        for first, second in itertools.pairwise(body):
            if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr):
                texts[ast.unparse(first.target)] = " ".join(ast.literal_eval(second.value).split())
    return texts


def _find(flag: str, options: Mapping[str, Option]) -> tuple[Option, bool]:
    """The option of a flag, and whether the flag turns it on."""
    parent, dot, last = flag.lstrip("-").replace("_", "-").removeprefix("no-").rpartition(".")
    for name in (flag.lstrip("-"), f"{parent}{dot}{last.removeprefix('no-')}"):
        key = _key(name)
        while key not in options and key in _ALIASES:
            key = _ALIASES[key]
        if key in options and (name == flag.lstrip("-") or _is(options[key].hint, bool)):
            return options[key], name == flag.lstrip("-")
    near = nearest(flag.lstrip("-").replace("-", "_"), [option.name for option in options.values()])
    hint = "" if near is None else f": did you mean --{near.replace('_', '-')}?"
    if "gpu" in flag:
        hint = ": with N GPUs, call torchrun --nproc-per-node N -m dssl"
    raise DsslError(f"unknown option {flag}{hint}")


def _key(name: str) -> str:
    """Dots, hyphens and underscores are the same: ``--batch_size``, ``--optimizer-rate``."""
    return name.replace("-", ".").replace("_", ".")


_ALIASES = {_key(old): _key(new) for old, new in ALIASES.items()}


def _is(hint: Any, kind: type) -> bool:
    """Whether an option is of a kind, or of a kind or nothing."""
    return any(part is kind or typing.get_origin(part) is kind for part in (hint, *typing.get_args(hint)))
