"""Damaged and hostile files of weights: read or answered by one line, in a process that must live to say so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.conftest import Tally

ROOT = Path(__file__).parents[2]


def read_in_child(*paths: Path, mutations: int, seed: int = 0) -> dict[str, int]:
    """How reading files, and that many mutations of each, came out."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.faults.mutated_weights", str(mutations), str(seed), *map(str, paths)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    counts: dict[str, int] = json.loads(child.stdout)
    assert sum(counts.values()) == len(paths) * (1 + mutations)
    assert set(counts) <= {"read", "one line"}
    return counts


def honest(path: Path) -> Path:
    """A small file as torch wrote them before it wrote zip archives: it has no checksums."""
    tensors = {"conv1.weight": torch.linspace(-1, 1, 24).reshape(2, 3, 2, 2), "bn1.num": torch.tensor(3.0)}
    content = {"state_dict": tensors, "epoch": 3, "names": list(map(str, range(300)))}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_a_mutated_file_is_read_or_answered_by_one_line(tmp_path: Path) -> None:
    path = honest(tmp_path / "w.pth")
    assert read_in_child(path, mutations=0) == {"read": 1}
    counts = read_in_child(path, mutations=1_000)
    assert min(counts["read"], counts["one line"]) > 50


@pytest.mark.faults
def test_many_mutated_files(tally: Tally, tmp_path: Path) -> None:
    with tally.trial("a mutated file of weights: torch's old format", 8_000):
        read_in_child(honest(tmp_path / "w.pth"), mutations=8_000, seed=1)


def test_hostile_tables_are_answered_by_one_line(tmp_path: Path) -> None:
    itself: dict[Any, Any] = {}
    itself["a"] = itself
    doubled: dict[Any, Any] = {}
    deep: dict[Any, Any] = {}
    for _ in range(64):
        doubled = {"a": doubled, "b": doubled}
    for _ in range(150):
        deep = {"a": deep}
    paths = [tmp_path / f"{number}.pth" for number in range(4)]
    for path, content in zip(paths, (itself, doubled, deep, {10**5_000: {}}), strict=True):
        torch.save(content, path, _use_new_zipfile_serialization=False)
    assert read_in_child(*paths, mutations=0) == {"one line": len(paths)}


def test_a_hostile_pickle_is_not_even_read(tmp_path: Path) -> None:
    table = tmp_path / "w.pkl"
    table.write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")  # a table of 4 billion places
    assert read_in_child(table, mutations=0) == {"one line": 1}
