"""Damaged and hostile files of weights: read or answered by one line, in a process that must live to say so."""

import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def honest(path: Path, kind: str) -> Path:
    """A small file as other programs write them; ``kind`` ends with the protocol of a pickle."""
    arrays = {
        "stem.conv1.weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 2, 2),
        "stem.conv1.norm.num": np.array(3),
        "res2.0.conv1.weight": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "res2.0.conv1.norm.bias": np.arange(3, dtype=">f4"),
    }
    if kind == "torch's old format":
        torch.save(
            {"state_dict": {name: torch.from_numpy(value.astype("f4")) for name, value in arrays.items()}, "epoch": 3},
            path, _use_new_zipfile_serialization=False,
        )  # fmt: skip
    else:
        content = {"model": arrays, "__author__": "x", "loss": np.float64(0.5), "names": list(map(str, range(300)))}
        path.write_bytes(pickle.dumps(content, protocol=int(kind[-1])))
    return path


KINDS = ("a pickle of protocol 2", "a pickle of protocol 4", "a pickle of protocol 5", "torch's old format")


def test_a_mutated_file_is_read_or_answered_by_one_line(tmp_path: Path) -> None:
    paths = [honest(tmp_path / f"{number}.pkl", kind) for number, kind in enumerate(KINDS)]
    assert read_in_child(*paths, mutations=0) == {"read": len(paths)}
    counts = read_in_child(*paths, mutations=1_000)
    assert min(counts["read"], counts["one line"]) > 100


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind: str, tally: Tally, tmp_path: Path) -> None:
    count = 8_000 if kind == "torch's old format" else 34_000
    with tally.trial(f"a mutated file of weights: {kind}", count):
        read_in_child(honest(tmp_path / "w.pkl", kind), mutations=count, seed=1)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def ask(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


OBJECT = ask("numpy", "dtype") + text("O8") + b"\x89\x88\x87R"
FIELDS = b"(" + text("f") + b"t}" + text("f") + OBJECT + b"K\x00\x86s"
POINTER = ask("numpy", "dtype") + text("V8") + b"\x89\x88\x87R(K\x03" + text("|") + b"N" + FIELDS + b"K\x08K\x01K\x01tb"
ARRAY = ask("numpy._core.multiarray", "_reconstruct") + ask("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
ADDRESS = b"C\x08" + struct.pack("<Q", 0x414141414140)
TWICE = b"q\x01}" + text("a") + b"h\x01s" + text("b") + b"h\x01s"
HOSTILE = {
    "an address for the interpreter to release": (
        b"}" + text("a") + ARRAY + b"(K\x01K\x01\x85" + POINTER + b"\x89" + ADDRESS + b"tbs"
    ),
    "a table of 4 billion places": b"}r\xff\xff\xff\xff",
    "a table within itself": b"}q\x00" + text("a") + b"h\x00s",
    "a table twice within each of 64": b"}" + 64 * TWICE,
    "a name of 5,000 digits": b"}\x8b" + struct.pack("<I", 2_100) + b"\x7f" * 2_100 + b"}s",
    "a type changed for the next file": ask("numpy", "dtype") + b"N}" + text("__init__") + b"K\x00s\x86b",
}


def test_a_hostile_pickle_is_answered_by_one_line(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.pkl" for number in range(len(HOSTILE))]
    for path, content in zip(paths, HOSTILE.values(), strict=True):
        path.write_bytes(b"\x80\x02" + content + b".")
    assert read_in_child(*paths, mutations=0) == {"one line": len(paths)}
