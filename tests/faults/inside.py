"""Runs inside this process with a fault at a chosen step."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dssl.cli import main
from dssl.data.loader import Batch, Batches
from tests.faults.processes import command


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, fault: Callable[[], object]) -> None:
    """Let the fault happen once, when the batch of this step is asked for."""
    original = Batches.at
    left = [fault]

    def at(self: Batches, wanted: int) -> Batch:
        if wanted == step and left:
            left.pop()()
        return original(self, wanted)

    monkeypatch.setattr(Batches, "at", at)


def train(method: str, out: Path, *extra: str) -> int:
    """``dssl train`` in this process; six steps unless told otherwise."""
    return main(command(method, out, *extra))
