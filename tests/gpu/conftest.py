"""A table of what was found on GPUs, printed at the end of ``make test-gpu`` to be pasted."""

from collections.abc import Callable

import pytest
import torch

from dssl.text import markdown

Row = Callable[[str, str], None]
_ROWS = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """``row(what, found)`` adds a line to the table."""
    rows = request.config.stash.setdefault(_ROWS, [])
    return lambda what, found: rows.append((what, found))


@pytest.fixture
def gpus() -> int:
    """How many there are; a test that asks is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU was found")
    return torch.cuda.device_count()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows and torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        terminalreporter.write_line(f"\n{names}; torch {torch.__version__}, CUDA {torch.version.cuda}\n")
        for line in markdown(("check", "found"), rows):
            terminalreporter.write_line(line)
