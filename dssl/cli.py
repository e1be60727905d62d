"""The command line: one table of commands, each imported only when called, so that help is instant."""

import contextlib
import ctypes
import difflib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dssl import plugins
from dssl.commands import COMMANDS, TAKE_PLUGINS, module_name
from dssl.errors import DsslError, Stopped, choices, one_line
from dssl.text import columns
from dssl.version import VERSION

_HELP_WORDS = ("-h", "--help", "help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``dssl COMMAND ...``; a user's mistake is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in _HELP_WORDS:
            print(_help())
            return 0
        if words[0] == "--version":
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
        raise choices("command", name, COMMANDS)
    from dssl.commands.arguments import with_home

    if name in TAKE_PLUGINS:
        words = _load_plugins(words)
    command = importlib.import_module(module_name(name))
    # a command whose settings depend on what is asked for (train) takes those words out first
    default, words = command.defaults(words) if hasattr(command, "defaults") else (None, words)
    parsed = parse(command.Arguments, f"dssl {name}", words, default)
    code: int = command.run(with_home(parsed))
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


def parse(arguments: type[Any], program: str, words: list[str], default: Any) -> Any:
    """The arguments of a command from its words; what was wrong with them is one line."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                arguments,
                prog=program,
                description=_described(arguments, program),
                args=words,
                default=default,
                # what has no default is given by position: `dssl graph dssl`; a union keeps the class of its default
                config=(tyro.conf.PositionalRequiredArgs, tyro.conf.AvoidSubcommands),
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise DsslError(f"{_what_was_wrong(said.getvalue())}; see {program} --help") from None


def _described(arguments: type[Any], program: str) -> str:
    about = inspect.getdoc(arguments) or ""
    if program.removeprefix("dssl ") in TAKE_PLUGINS:
        about += "\n\n--plugin FILE executes a Python file first, which may register methods, encoders, operations and sources."
    return about


def _what_was_wrong(box: str) -> str:
    """The first paragraph of tyro's box, and the closest of the options that it suggests."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", box)  # on a terminal it is coloured
    lines = [line.strip("│ ") for line in plain.splitlines()[1:] if not line.startswith("╰")]  # the first is its title
    paragraphs = [text for text in re.split(r"[─-]{8,}", "\n".join(lines)) if text.strip()]  # not all terminals have ─
    what = " ".join(paragraphs[0].split())
    proposed = [
        word for text in paragraphs[1:] if "meant" in text for word in re.findall(r"^(--[^\s,]+)", text, re.MULTILINE)
    ]
    wrong = re.search(r"--[^\s,]+", what)
    if wrong and (best := difflib.get_close_matches(wrong.group(), proposed, n=1, cutoff=0)):
        what += f"; did you mean {best[0]}?"
    return what


def _help() -> str:
    commands = "\n".join(f"  {line}" for line in columns(list(COMMANDS.items())))
    return f"""usage: dssl COMMAND [arguments]        (see dssl COMMAND --help)

Pretrain or adapt a vision encoder on unlabelled images, also with heavy augmentations, and see whether it works.

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
