"""``dssl completion``: a script that lets the shell complete commands and flags."""

import dataclasses
import importlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dssl.commands import COMMANDS, module_name
from dssl.methods import METHODS, MethodSettings
from dssl.presets import PRESETS
from dssl.recipes import RECIPES

_VALUES = {"--method": tuple(METHODS), "--graph": tuple(PRESETS)}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a completion script; put eval "$(dssl completion bash)" into ~/.bashrc, or the same with zsh into ~/.zshrc."""

    shell: Literal["bash", "zsh"]
    """The shell that reads the script."""


def run(arguments: Arguments) -> int:
    print(script(arguments.shell))
    return 0


def flags(kind: Any, prefix: str = "--") -> Iterator[str]:
    """The flags of a dataclass; nested dataclasses add a prefix, except ``config``, which holds the command's own settings."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        hint = hints[field.name]
        nested = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        if hint is MethodSettings:
            for method in METHODS.values():
                yield from flags(method.settings, f"{name}.")
        elif nested:
            yield from flags(nested[0], prefix if field.name == "config" else f"{name}.")
        elif field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
            yield name  # what has no default is given without a flag


def script(shell: str) -> str:
    """A bash function, which zsh runs through bashcompinit."""
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    lines += ["_dssl() {", '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""']
    lines += [
        f'  if [ "$COMP_CWORD" = 1 ]; then words="{" ".join(COMMANDS)} --help --version"; else',
        '  case "$before" in',
    ]
    lines += [f'    {flag}) words="{" ".join(values)}";;' for flag, values in _VALUES.items()]
    lines += ['    *) case "${COMP_WORDS[1]}" in']
    for name in COMMANDS:
        known = sorted({*flags(importlib.import_module(f"dssl.commands.{module_name(name)}").Arguments), "--help"})
        first = {"train": [*RECIPES, "--config", "--method", "--guard"], "graph": list(PRESETS)}.get(name, [])
        lines.append(f'      {name}) words="{" ".join([*first, *known])}";;')
    lines += ["    esac;;", "  esac; fi"]
    lines += ['  COMPREPLY=($(compgen -W "$words" -- "$word"))', "}", "complete -o default -F _dssl dssl"]
    return "\n".join(lines)
