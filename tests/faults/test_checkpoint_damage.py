"""A damaged or foreign checkpoint of a real run is refused, and the one before it is offered."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dssl.cli import main
from dssl.weights import checkpoint
from dssl.weights.checkpoint import CheckpointError
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.faults.test_disk import one_line
from tests.train.running import end_of


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps with the checkpoints of steps 5 and 6."""
    out = tmp_path_factory.mktemp("damage") / "run"
    assert train("simsiam", out) == 0
    return out


@pytest.fixture
def out(run_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def newest(out: Path) -> Path:
    return checkpoint.path_at(out / "checkpoints", 6)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.faults)])
def test_flipped_bits_of_a_real_checkpoint(count: int, out: Path, tally: Tally) -> None:
    """Half of them in the first bytes, where names, shapes and settings are."""
    path = newest(out)
    with path.open("rb") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
    generator = random.Random(count)
    for number in range(count):
        place = generator.randrange(head if number % 2 else path.stat().st_size)
        bit = 1 << generator.randrange(8)
        with tally.trial("one flipped bit in a checkpoint"):
            _flip(path, place, bit)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.read(path)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
            _flip(path, place, bit)
    assert checkpoint.read(path).header["step"] == 6  # each flip was undone: the damage is what was refused


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.faults)])
def test_truncations_of_a_real_checkpoint(count: int, out: Path, tally: Tally) -> None:
    whole = newest(out).read_bytes()
    generator = random.Random(count)
    lengths = [0, 1, 7, 8, 9, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(count - 6))]
    for length in sorted(lengths, reverse=True):
        with tally.trial("a checkpoint cut short"):
            os.truncate(newest(out), length)
            with pytest.raises(CheckpointError):
                checkpoint.read(newest(out))
            found = checkpoint.newest_good(out / "checkpoints")
            assert found is not None
            assert found[0].name == "step-000000005.safetensors"


def test_a_run_goes_on_from_the_one_before(
    out: Path, run_folder: Path, tally: Tally, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with tally.trial("the newest checkpoint is damaged"):
        _flip(newest(out), 2_000_000, 4)
        assert train("simsiam", out) == 0
        said = caplog.text
        assert "step-000000006.safetensors is damaged" in said
        assert "resuming from step-000000005.safetensors" in said
        assert end_of(out) == end_of(run_folder)


def test_evaluation_says_that_it_takes_an_older_one(
    out: Path, tally: Tally, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tally.trial("the newest checkpoint is damaged"):
        _flip(newest(out), 2_000_000, 4)
        assert main(["embed", str(out), "shapes:4", "--out", str(tmp_path / "e.csv")]) == 0
        assert "step-000000006.safetensors is damaged" in caplog.text
        assert "using step-000000005.safetensors instead" in caplog.text


def test_when_none_is_good_nothing_is_started_afresh_or_deleted(
    out: Path, tally: Tally, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("every checkpoint is damaged"):
        for step in (5, 6):
            _flip(checkpoint.path_at(out / "checkpoints", step), 2_000_000, 4)
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"}
        assert train("simsiam", out) == 2
        assert "can be trusted" in one_line(capsys)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != ".lock"} == before


def _rewritten(out: Path, *, header: object, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """The newest checkpoint with another header and a hash that fits it."""
    with safe_open(newest(out), framework="pt") as file:
        kept = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    tensors = kept if tensors is None else tensors
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, newest(out), metadata={"dssl": text, "sha256": checkpoint.content_hash(text, tensors)})


def _header(out: Path) -> dict[str, object]:
    with safe_open(newest(out), framework="pt") as file:
        return dict(json.loads(file.metadata()["dssl"]))


FOREIGN = {
    "no JSON": lambda header: "{",
    "JSON that is no table": lambda header: [1],
    "JSON of a thousand levels": lambda header: "[" * 100_000,
    "no version": lambda header: {},
    "a newer format": lambda header: header | {"format_version": 2},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_right_hash_does_not_make_a_checkpoint(kind: str, out: Path, tally: Tally) -> None:
    with tally.trial("a foreign header under a right hash"):
        _rewritten(out, header=FOREIGN[kind](_header(out)))
        with pytest.raises(CheckpointError):
            checkpoint.read(newest(out))


def test_what_a_run_needs_and_a_checkpoint_lacks(out: Path, tally: Tally, capsys: pytest.CaptureFixture[str]) -> None:
    for missing in ("health", "step"):
        with tally.trial("a foreign header under a right hash"):
            header = _header(out)
            header.pop(missing, None)
            _rewritten(out, header=header)
            assert train("simsiam", out) == 2
            assert "lacks" in one_line(capsys)


def test_another_architecture(out: Path, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tally.trial("a checkpoint of another architecture", 2):
        assert train("simclr", tmp_path / "other", "--epochs", "1") == 0
        capsys.readouterr()
        other = checkpoint.newest_good(tmp_path / "other" / "checkpoints")
        assert other is not None
        _rewritten(out, header=_header(out), tensors=other[1].tensors)
        assert train("simsiam", out) == 2
        assert "does not fit" in one_line(capsys)
        for flags in (["--encoder", "resnet18"], ["--encoder", "timm:resnet10t"]):
            assert main(["embed", str(out), "shapes:4", "--out", str(tmp_path / "e.csv"), *flags]) == 2
            assert "choose the encoder that the file was made with" in one_line(capsys)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "link loop", "device"])
def test_what_is_no_file_is_not_waited_for(kind: str, out: Path, tally: Tally) -> None:
    with tally.trial("a checkpoint that is no regular file"):
        path = newest(out)
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link loop":
            path.symlink_to(path)
        else:
            path.symlink_to("/dev/zero")
        found = checkpoint.newest_good(out / "checkpoints")
        assert found is not None
        assert found[0].name == "step-000000005.safetensors"
        assert len(found[2]) == 1


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ bit]))
