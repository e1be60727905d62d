"""What every command does with numbers and paths before it does anything else."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from dssl.cli import main
from dssl.commands.arguments import with_home


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("embed WEIGHTS shapes --threads -1", "--threads is -1"),
        ("embed WEIGHTS shapes --threads 0", "--threads is 0"),
        ("embed WEIGHTS shapes --image-size 0", "--image-size is 0"),
        ("embed WEIGHTS shapes --batch-size 0", "--batch-size is 0"),
        ("embed WEIGHTS shapes --shard 0", "--shard is 0"),
        ("embed WEIGHTS shapes --threads 5000", "--threads is 5000: expected at most 1,024"),
        ("evaluate WEIGHTS --threads -1", "--threads is -1"),
        ("evaluate WEIGHTS --threads 0", "--threads is 0"),
        ("evaluate WEIGHTS --image-size 0", "--image-size is 0"),
        ("evaluate WEIGHTS --image-size 100000", "--image-size is 100000: expected at most 4,096"),
        ("export WEIGHTS --image-size 0", "--image-size is 0"),
        ("views shapes:10 --size 0", "--size is 0"),
        ("data pack shapes:10 --out OUT --side 0", "--side is 0"),
        ("train shapes --threads 0", "threads is 0"),
        ("train shapes --image-size 0", "image_size is 0"),
        ("evaluate-coco scratch FOLDER --threads 0", "threads is 0"),
    ],
)
def test_a_number_that_means_nothing_is_one_line(
    words: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert flag in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Given:
    one: Path
    several: tuple[Path, ...]
    none: Path | None
    text: str


def test_the_home_folder_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    given = Given(Path("~/a"), (Path("b"), Path("~")), None, "~/c")
    assert with_home(given) == Given(Path("/home/of/mine/a"), (Path("b"), Path("/home/of/mine")), None, "~/c")
    same = Given(Path("a~"), (), Path("~nobody-of-this-name"), "")
    assert with_home(same) is same


def test_the_home_folder_is_expanded_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["graph", "dssl", "--out=~/graph.svg"]) == 0
    assert (tmp_path / "home" / "graph.svg").is_file()
    assert main(["train", "shapes", "--write-config=~/run.json"]) == 0
    assert main(["train", "--config=~/run.json", "--write-config=~/again.json"]) == 0
    first, again = (json.loads((tmp_path / "home" / name).read_text()) for name in ("run.json", "again.json"))
    assert first == again
    assert main(["data", "cifar10", "~/cifar", "--origin=~/archive.tar.gz"]) == 2
    assert str(tmp_path / "home" / "archive.tar.gz") in capsys.readouterr().err
    assert main(["evaluate-coco", "~/weights.pth", "~/coco", "--out=~/run"]) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["home"]
