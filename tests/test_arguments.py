"""What every command does with numbers and paths before it does anything else."""

import importlib
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from dssl.cli import main
from dssl.commands import module_name, report
from dssl.commands.arguments import Progress, command_line
from dssl.commands.options import Usage, parse
from dssl.recipes import recipe


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("embed WEIGHTS shapes --threads -1", "--threads is -1"),
        ("embed WEIGHTS shapes --threads 0", "--threads is 0"),
        ("embed WEIGHTS shapes --image-size 0", "--image-size is 0"),
        ("embed WEIGHTS shapes --batch-size 0", "--batch-size is 0"),
        ("embed WEIGHTS shapes --shard 0", "--shard is 0"),
        ("embed WEIGHTS shapes --threads 5000", "--threads is 5000"),
        ("evaluate WEIGHTS --threads -1", "--threads is -1"),
        ("evaluate WEIGHTS --threads 0", "--threads is 0"),
        ("evaluate WEIGHTS --image-size 0", "--image-size is 0"),
        ("evaluate WEIGHTS --image-size 100000", "--image-size is 100000"),
        ("explore WEIGHTS shapes --label 0", "--label is 0"),
        ("export WEIGHTS --image-size 0", "--image-size is 0"),
        ("views shapes:10 --size 0", "--size is 0"),
        ("data pack shapes:10 --out OUT --side 0", "--side is 0"),
        ("train shapes --threads 0", "--threads is 0"),
        ("train shapes --image-size 4", "--image-size is 4"),
        ("train shapes --lr 0", "--lr is 0"),
        ("train shapes --guard -1", "--guard is -1"),
        ("train shapes --batch_size 1", "--batch_size is 1"),
        ("evaluate-coco scratch FOLDER --threads 0", "--threads is 0"),
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


@pytest.mark.parametrize(
    "words",
    [
        "views shapes:40",
        "views 'my photos' --heavy 'ra(2,5)' '0.9*ra(2,5) | 0.1*ua' --out 'a b.html' --image-size 32",
        "report runs/a 'runs/b c' --out page.html --images 0",
        "evaluate run --stem padding2 --image-size 64 --threads 2 --protocols knn probe --no-page",
        "explore run --label 20",
        "explore run photos --query a.jpg 'b c.jpg' --duplicates 0.97 --split test",
        "demo --out 'my runs' --seed 3",
        "reproduce table2 --scale hour --seeds 0 1 --jobs 4 --plan",
        "evaluate-coco scratch coco --steps 12 --out runs/x",
    ],
)
def test_the_command_line_is_the_inverse_of_its_parser(words: str) -> None:
    """Parsed by the real parser and written down again: the same words, and the same arguments once more."""
    name, *rest = shlex.split(words)
    kind = importlib.import_module(module_name(name)).Arguments
    parsed = parse(kind, rest)
    written = command_line(name, parsed)
    assert written == f"dssl {words}"
    assert parse(kind, shlex.split(written)[2:]) == parsed


def test_progress_in_a_log_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    eager, patient = Progress(pause=0.0), Progress(pause=3600.0)
    for done in (300, 1200):
        eager(done, 1000)
        patient(done, 1000)
    assert capsys.readouterr().err == "300 of 1,000\n1,000 of 1,000\n"


@dataclass(frozen=True, kw_only=True)
class Inner:
    on: bool = True
    many: tuple[int, ...] = field(default_factory=lambda: (1, 2))


@dataclass(frozen=True, kw_only=True)
class Outer:
    USAGE: ClassVar[Usage] = Usage()
    inner: Inner = Inner()
    settings: Inner = Inner()
    place: Path | None = Path("here")


def test_flags_of_nested_arguments_and_those_that_are_written_always_or_never() -> None:
    given = Outer(inner=Inner(on=False, many=()), settings=Inner(on=False, many=(3,)), place=None)
    assert command_line("x", given) == "dssl x --inner.no-on --inner.many --no-on --many 3 --place None"
    told = command_line("x", Outer(inner=Inner(on=False)), always=("inner.many", "on"), leave_out=("inner.on",))
    assert told == "dssl x --inner.many 1 2 --on"


def test_the_home_folder_is_expanded_in_paths_of_words_and_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert parse(report.Arguments, ["a~", "~nobody-of-this-name", "~"]).runs == (
        Path("a~"), Path("~nobody-of-this-name"), Path("/home/of/mine"),
    )  # fmt: skip
    assert parse(Outer, ["--place=~/a"]).place == Path("/home/of/mine/a")
    for given in (Path("~/w.pth"), "~/w.pth"):
        assert recipe("adapt", data="shapes", init=given).init == Path("/home/of/mine/w.pth")
