"""The command line: one table of commands, each imported only when called, so that help is instant."""

import contextlib
import ctypes
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dssl import plugins
from dssl.commands import COMMANDS, TAKE_PLUGINS, module_name
from dssl.errors import DsslError, InvalidSetting, Stopped, choices, one_line
from dssl.text import columns
from dssl.version import VERSION

_HELP_WORDS = ("-h", "--help", "help")
_VERSION_WORDS = ("-V", "--version", "version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``dssl COMMAND ...``; a user's mistake is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["help"] and words[1:2]:  # dssl help train
            words = [words[1], "--help"]
        if not words or words[0] in _HELP_WORDS:
            print(_help())
            return 0
        if words[0] in _VERSION_WORDS:
            print(f"dssl {VERSION}")
            return 0
        return _run(words[0], words[1:])
    except BrokenPipeError:
        raise
    except Stopped as stopped:
        print(f"dssl: {stopped}", file=sys.stderr)
        return 128 + stopped.signal
    except KeyboardInterrupt:
        return 130
    except Exception as mistake:
        place, known = plugins.place_of(mistake), isinstance(mistake, DsslError | OSError)
        if os.environ.get("DSSL_TRACEBACK") == "1" or not (place or known):
            raise
        what = _one_line(mistake) if known else f"{type(mistake).__name__}: {one_line(mistake)}"
        print(f"dssl: {place}{': ' if place else ''}{what}", file=sys.stderr)
        return 2


def _run(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise DsslError(f"{choices('command', name, COMMANDS)}. See dssl --help".replace("?.", "?"))
    from dssl.commands.options import build, help_text, options_of, scan

    takes_plugins = name in TAKE_PLUGINS
    if takes_plugins:
        words = _load_plugins(words)
    command = importlib.import_module(module_name(name))
    kind, help_wanted = command.Arguments, not {"-h", "--help"}.isdisjoint(words)
    try:
        given = scan(kind, [word for word in words if word not in ("-h", "--help")])
    except DsslError as mistake:
        end = "" if str(mistake).endswith("?") else "."
        raise DsslError(f"{mistake}{end} See dssl {name} --help") from None
    try:
        # the settings of a training are its recipe's, which the other words change
        base = command.base(given) if name == "train" and (given or not help_wanted) else None
        if help_wanted:
            print(help_text(kind, f"dssl {name}", base=base, plugins=takes_plugins))
            return 0
        code: int = command.run(build(kind, given, base))
    except InvalidSetting as mistake:
        flags = {option.name: option.flag for option in options_of(kind)}
        flags |= {option: typed.flag for option, typed in given.items()}
        raise DsslError(f"{flags.get(mistake.setting, mistake.setting)} {mistake.problem}") from mistake
    sys.stdout.flush()  # a closed pipe must show up here, not at interpreter exit
    return code


def _load_plugins(words: list[str]) -> list[str]:
    """Execute the files of --plugin, before anything asks what exists; returns the other words."""
    rest, waiting = [], iter(words)
    for word in waiting:
        flag, equals, value = word.partition("=")
        if flag != "--plugin":
            rest.append(word)
        elif path := value if equals else next(waiting, ""):
            plugins.load(Path(path).expanduser())
        else:
            raise DsslError("--plugin needs a value: expected a Python file")
    return rest


def _help() -> str:
    commands = "\n".join(f"  {line}" for line in columns(list(COMMANDS.items())))
    return f"""usage: dssl COMMAND [arguments]        (see dssl COMMAND --help)

Pretrain or adapt a vision encoder on unlabelled images, make it robust, and see whether it works.

{commands}"""


def _one_line(mistake: Exception) -> str:
    if isinstance(mistake, OSError) and mistake.strerror:
        place = f"{mistake.filename}: " if mistake.filename is not None else ""
        return f"{place}{mistake.strerror}"
    return " ".join(str(mistake).split())


def _open_closed_streams() -> None:
    """Give a program that was started with a closed stdin, stdout or stderr an empty one: a file of ours would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # a new descriptor has the lowest free number
        continue
    os.close(descriptor)
    nothing = Path(os.devnull)
    sys.stdin, sys.stdout = sys.stdin or nothing.open(), sys.stdout or nothing.open("w")
    sys.stderr = sys.stderr or nothing.open("w")


def keep_freed_memory() -> None:
    """Let glibc reuse the large buffers of a step in the next one, instead of returning them to the system and asking again.

    Every step needs the same sizes; clearing fresh pages took longer than the arithmetic in a virtual machine.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems, and other libraries of C, have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: none from mmap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: up to 2 GB stay


def entry() -> None:
    """What the installed command calls."""
    keep_freed_memory()
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of another encoding shows an escape, as stderr does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main()
    except BrokenPipeError:
        # the reader of our output went away: exit silently, and keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
