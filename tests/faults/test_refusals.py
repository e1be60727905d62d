"""What only a run can refuse: folders that are not ours, devices, images and memory that are not there; one line, no run."""

import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.cli import main
from tests.faults.conftest import Tally
from tests.faults.inside import train
from tests.faults.test_disk import one_line

OUT: dict[str, Callable[[Path], None]] = {
    "other things": lambda out: (out.mkdir(), (out / "thesis.tex").write_text("years")),  # type: ignore[func-returns-value]
    "a file": lambda out: out.write_text("x"),  # type: ignore[func-returns-value]
    "checkpoints of somebody else": lambda out: (
        (out / "checkpoints").mkdir(parents=True),
        (out / "checkpoints" / "a.pt").touch(),
    ),
    "a broken config.json": lambda out: (out.mkdir(), (out / "config.json").write_text("{")),  # type: ignore[func-returns-value]
    "another program's config.json": lambda out: (out.mkdir(), (out / "config.json").write_text('{"a": 1}')),  # type: ignore[func-returns-value]
    "a config.json of nonsense": lambda out: (out.mkdir(), (out / "config.json").write_text('{"config": [1]}')),  # type: ignore[func-returns-value]
    "a dangling link": lambda out: out.symlink_to("/proc/nowhere/at/all"),
}


@pytest.mark.parametrize("kind", OUT)
def test_an_out_that_is_not_ours(kind: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tally.trial("an --out that is not ours"):
        out = tmp_path / "out"
        OUT[kind](out)

        def content() -> dict[Path, object]:
            paths = [path for path in tmp_path.rglob("*") if path.name != ".lock"]
            return {path: path.read_bytes() if path.is_file() else path.is_dir() for path in paths}

        before = content()
        assert train("simsiam", out) == 2
        assert str(out) in one_line(capsys)
        assert content() == before


CONFLICTS = {
    "device of another machine": "--device mps",
    "no such images": "--data /nowhere/at/all",
    "too few images": "--data shapes:3",
    "a gray run on colour images": "--channels 1",
    "an unknown encoder": "--encoder resnet19",
    "an encoder outside": "--encoder ../../etc/passwd",
    "weights that are none": "--init /etc/hostname",
    "a device as weights": "--init /dev/zero",
    "more images than can be": "--data shapes:99999999999",
    "a batch beyond the data": "--batch-size 100000000000",
    "a head beyond the memory": "--method.hidden 65536 --method.output 65536 --method.bottleneck 65536",
}


@pytest.mark.parametrize("kind", CONFLICTS)
def test_values_that_only_the_run_can_refuse(
    kind: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with tally.trial("a value that only the run can refuse"):
        if "memory" in kind:
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, limits[1]))
        try:
            assert train("simsiam", tmp_path / "out", *CONFLICTS[kind].split()) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert one_line(capsys)
        assert not (tmp_path / "out" / "config.json").exists()


FOLDERS = {"empty": (0, 1), "one image": (1, 1), "smaller than the batch": (5, 1)}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_that_cannot_be_trained_on(
    kind: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, _ = FOLDERS[kind]
    with tally.trial("a folder with too few images"):
        (tmp_path / "images").mkdir()
        for number in range(images):
            Image.new("RGB", (40, 40)).save(tmp_path / "images" / f"{number}.png")
        assert train("simsiam", tmp_path / "out", "--data", str(tmp_path / "images")) == 2
        assert str(tmp_path / "images") in one_line(capsys)
        assert not (tmp_path / "out" / "config.json").exists()


def test_labels_of_one_class(tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Enough to train on, too little to measure: kNN is left out, and `dssl evaluate` says why."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        (tmp_path / "images" / split / "cat").mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / split / "cat" / f"{number}.png")
    with tally.trial("labels of one class"):
        assert train("simsiam", tmp_path / "run", "--data", str(tmp_path / "images"), "--knn-every", "1") == 0
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        assert main(["evaluate", str(tmp_path / "run")]) == 2
        assert "only one class" in one_line(capsys)
        assert sorted(tmp_path.rglob("*")) == before
