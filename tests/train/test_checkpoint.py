"""A checkpoint is whole or refused: flipped bits, cut files, foreign files, other versions."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dssl import log, state
from dssl.config import CheckpointConfig
from dssl.run import RunFolder
from dssl.state import Checkpointer, HealthCheck, RunLength, Verdict
from dssl.weights import checkpoint
from dssl.weights.checkpoint import CheckpointError
from tests.rejecting import rejects


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "step-000000007.safetensors"
    tensors = {
        "method.encoder.weight": torch.randn(8, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        "method.bn.num_batches_tracked": torch.tensor(5),
        "optimizer.encoder.weight.momentum_buffer": torch.randn(8, 3, 3, 3).to(torch.bfloat16),
        "empty": torch.zeros(0),
    }
    checkpoint.write(path, {"step": 7, "config": {"seed": 1}}, tensors)
    return path


def test_what_was_written_is_read(saved: Path) -> None:
    loaded = checkpoint.read(saved)
    assert loaded.header["step"] == 7
    assert loaded.tensors["method.encoder.weight"].shape == (8, 3, 3, 3)
    torch.manual_seed(0)
    assert torch.equal(loaded.tensors["method.encoder.weight"], torch.randn(8, 3, 3, 3))
    assert loaded.part("method").keys() == {"encoder.weight", "bn.num_batches_tracked"}
    assert not list(saved.parent.glob(".*tmp"))
    (saved.parent / "other").touch()
    assert saved.stat().st_mode == (saved.parent / "other").stat().st_mode


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    generator = random.Random(0)
    for _ in range(1000):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            checkpoint.read(saved)


def test_every_truncation_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in {0, 1, 7, 8, 9, len(whole) - 1, *random.Random(1).sample(range(len(whole)), 94)}:
        saved.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            checkpoint.read(saved)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError):
        checkpoint.read(saved)


def test_pickle_is_never_executed(tmp_path: Path) -> None:
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return (Path.touch, (tmp_path / "executed",))  # type: ignore[return-value]

    path = tmp_path / "step-000000001.safetensors"
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert not (tmp_path / "executed").exists()


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.read(path)


def test_a_huge_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError):
        checkpoint.read(path)


def test_a_newer_format_is_refused(saved: Path) -> None:
    header, tensors = json.dumps({"step": 7, "format_version": 2}), {"a": torch.zeros(1)}
    save_file(tensors, saved, metadata={"dssl": header, "sha256": checkpoint.content_hash(header, tensors)})
    with rejects(saved, "version 2", "version 1", error=CheckpointError):
        checkpoint.read(saved)


def test_the_newest_good_one_is_found(saved: Path) -> None:
    folder = saved.parent
    newer = checkpoint.path_at(folder, 9)
    newer.write_bytes(saved.read_bytes()[:-3])
    found = checkpoint.newest_good(folder)
    assert found is not None
    path, loaded, warnings = found
    assert path == saved
    assert loaded.header["step"] == 7
    assert len(warnings) == 1
    assert "step-000000009" in warnings[0]
    saved.write_bytes(b"")
    with pytest.raises(CheckpointError, match=str(folder)):
        checkpoint.newest_good(folder)
    assert checkpoint.newest_good(folder / "nothing") is None


def test_a_failed_write_leaves_the_old_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def broken(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match=r"Input/output error.*4\.0 MB"):
        checkpoint.write(saved, {"step": 8}, {"a": torch.zeros(1_000_000)})
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_pruning_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint.path_at(tmp_path, step).touch()
    (tmp_path / ".step-000000006.safetensors.99.part").touch()
    (tmp_path / "notes.txt").touch()
    checkpoint.prune(tmp_path, newest=5, keep=2, protected=[1])
    assert checkpoint.steps_in(tmp_path) == [1, 4, 5]
    assert sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("step")) == ["notes.txt"]


@pytest.mark.parametrize(("keep", "left"), [(2, [2, 3, 5]), (1, [3, 5])])
def test_a_damaged_newer_checkpoint_takes_nobodys_place(tmp_path: Path, keep: int, left: list[int]) -> None:
    """The run resumed before it: what it writes next is older, and must not be deleted for it."""
    for step in (1, 2, 3, 5):
        checkpoint.path_at(tmp_path, step).touch()
    checkpoint.prune(tmp_path, newest=3, keep=keep, protected=[])
    assert checkpoint.steps_in(tmp_path) == left


def test_metadata_can_be_read_by_anybody(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved, framework="pt") as file:
        assert json.loads(file.metadata()["dssl"])["config"] == {"seed": 1}


def test_what_is_saved_by_epochs_depends_on_the_epoch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves for the minutes, or a resume, do not move them; epochs that are to be kept are saved."""
    now = 0.0
    monkeypatch.setattr(state.time, "monotonic", lambda: now)
    config = CheckpointConfig(every_epochs=5, every_minutes=15, keep_every=2)
    at = SimpleNamespace(step=0)
    length = RunLength(total=400, steps_per_epoch=10, round=10, counted="epoch")
    checkpointer = Checkpointer(RunFolder(tmp_path), config, at, length=length, header={})
    found = set()
    for step in range(1, 201):
        at.step, now = step, now + 24  # an epoch takes 4 minutes
        if step == 35:  # resumed
            checkpointer = Checkpointer(RunFolder(tmp_path), config, at, length=length, header={})
        if checkpointer.due(round_ends=step % 10 == 0, last=False, leaving=False):
            found.add(step)
            checkpointer.begin_again()
    assert {step for step in range(10, 201, 10) if step % 50 == 0 or step % 20 == 0} <= found
    assert 30 not in found


def test_measuring_and_saving_are_no_part_of_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    length = RunLength(total=40, steps_per_epoch=10, round=10, counted="epoch")
    with log.Log(RunFolder(tmp_path), start=0, length=length, batch_size=32, active=True) as one:
        for step in range(20):
            now += 1.0
            one.step(0.25)
            if step % 10 == 9:
                one.check(
                    HealthCheck(step=step, loss=1.0, record={}, text="", verdict=Verdict("healthy", step)), rate=0.1
                )
                with one.aside():
                    now += 100.0  # kNN
    written = RunFolder(tmp_path).metrics()
    assert [(record["images_per_second"], record["data_share"]) for record in written] == [(32.0, 0.25)] * 2
