"""Generated configurations, thousands in one process: no traceback, no run with a bad value, no file anywhere."""

import copy
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dssl import config_io
from dssl.cli import main
from dssl.config import RunConfig
from dssl.errors import DsslError
from dssl.methods import METHODS
from dssl.recipes import RECIPES, recipe
from tests.faults.conftest import Tally
from tests.faults.test_disk import one_line

BAD: dict[str, list[Any]] = {
    "epochs": [0, -1, 1.5, "3", True, None, 10**9, [3], {}, 1e400],
    "batch_size": [0, 1, -8, 2.5, "256", None, False],
    "image_size": [0, -32, 5000, 10**12, "32", 32.0, None],
    "channels": [0, 2, 4, "3", True, 3.0, None],
    "bad_share": [-0.1, 1, 2.0, float("nan"), float("inf"), "half", None],
    "threads": [0, -1, 10**6, 1.0, "all"],
    "limit": [0, 1, -5, 2.5, "many"],
    "knn_every": [-1, 0.5, "never", None],
    "seed": [0.5, "7", None, [1]],
    "normalization": ["imagenet21k", "", 3, None],
    "precision": ["fp8", "BF16", 16, None],
    "device": ["gpu", "cuda:0", 0, None],
    "graph": ["", "s1", "s1->s1", "s1<->s2:nan", "s1<->s2:-1", "s1<->", "dsssl", 3, "s1<->s2, s1<->s2"],
    "standard": ["", "standrad", "ra(", "ra(2,99)", "crop >", 7],
    "heavy": ["nothing", "-1*ra(2,5) | 2*jigsaw(4)", "ra(-1,5)", "jigsaw(0)", None],
    "compile": ["yes", 1, None],
    "tf32": [0, "no"],
    "optimizer": [None, [], "sgd", 3, {"rate": 0}, {"rate": -1}, {"rate": float("nan")}, {"rate": "fast"}, {"name": "adam"},
                  {"momentum": 1}, {"momentum": -0.1}, {"weight_decay": -1}, {"warmup_epochs": -1}, {"warmup_epochs": 10**5},
                  {"clip": 0}, {"clip": float("inf")}, {"learning_rate": 1}, {"decay_norms_and_biases": "no"}],
    "checkpoint": [None, {"every_epochs": 0}, {"every_minutes": 0}, {"every_minutes": -1}, {"keep": 0}, {"keep_every": 0},
                   {"keepp": 1}, {"keep": 1.5}],
    "health": [None, {"every": 0}, {"stop": "no"}, {"sotp": True}, []],
    "method": ["simsam", None, 3, {"name": "ibot"}, {"hiden": 3}, {"hidden": 0}, {"hidden": 10**9}, {"hidden": "x"},
               {"projector_layers": 4}, {"name": ["simsiam"]}],
    "init": [3, [], True],
    "data": [3, None, []],
    "encoder": [None, 18],
}  # fmt: skip
"""By setting, values that no run may start with."""


def mutated(generator: random.Random) -> tuple[str, dict[str, Any]]:
    """A recipe's settings with one bad value, one unknown name, or one name misspelt, among harmless changes."""
    plain = config_io.to_dict(recipe(generator.choice(list(RECIPES)), method=generator.choice(list(METHODS))))
    for key, value in (("seed", generator.randrange(10**6)), ("epochs", generator.randrange(200, 900)), ("tf32", True)):
        if generator.random() < 0.3:
            plain[key] = value
    kind = generator.choice(["bad", "bad", "bad", "typo", "unknown"])
    key = generator.choice(sorted(BAD))
    if kind == "bad":
        value = copy.deepcopy(generator.choice(BAD[key]))
        plain[key] = plain[key] | value if isinstance(value, dict) and value and isinstance(plain[key], dict) else value
        if key == "method" and isinstance(value, dict) and "name" not in value:
            plain["method"] = {"name": "simsiam"} | value
        return f"{key} = {value!r}", plain
    if kind == "typo":
        place = generator.randrange(len(key))
        wrong = key[:place] + generator.choice("xq9") + key[place + generator.choice((0, 1)) :]
        plain[wrong] = plain.pop(key)
        return f"{key} misspelt {wrong}", plain
    plain[generator.choice(["lr", "", "__class__", "data\n", "epochs ", "Epochs"])] = 1
    return "an unknown name", plain


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The runs that would have been started."""
    runs: list[RunConfig] = []

    def record(config: RunConfig, out: Path, **more: object) -> object:
        runs.append(config)
        return SimpleNamespace(checkpoint=None, signal=None, exit_code=0)

    monkeypatch.setattr("dssl.training.pretrain.train", record)
    return runs


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.faults)])
def test_bad_settings_are_refused_by_name(count: int, tally: Tally) -> None:
    generator = random.Random(count)
    for _ in range(count):
        what, plain = mutated(generator)
        with tally.trial("a configuration with a bad value, a typo or an unknown name"):
            try:
                config_io.from_dict(plain)
            except DsslError as error:
                assert "\n" not in str(error).strip(), what  # noqa: PT017 (what was accepted must be named)
                continue
            pytest.fail(f"accepted: {what}")


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.faults)])
def test_no_command_with_a_bad_file_starts_a_run(
    count: int, started: list[RunConfig], tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    generator = random.Random(count)
    file = tmp_path / "settings.json"
    for _ in range(count):
        what, plain = mutated(generator)
        file.write_text(json.dumps(plain))
        with tally.trial("a command with a bad file of settings"):
            assert main(["train", "--config", str(file), "--out", "out"]) == 2, what
            assert one_line(capsys)
            assert started == [], what
            assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


FLAGS = {
    "epochs": ["0", "-1", "1.5", "three", "", "1e3", "9999999999"],
    "batch-size": ["0", "1", "-8", "2.5", "all"],
    "image-size": ["0", "-1", "99999", "32x32"],
    "channels": ["0", "-3", "99999", "RGB"],
    "bad-share": ["-1", "1", "nan", "inf", "5%"],
    "threads": ["0", "-2", "1000000", "two"],
    "optimizer.rate": ["0", "-1", "nan", "inf", "fast", ""],
    "optimizer.momentum": ["1", "-0.1", "nan"],
    "optimizer.name": ["adam", "SGD"],
    "optimizer.warmup-epochs": ["-1", "nan", "99999"],
    "optimizer.clip": ["0", "-1", "nan"],
    "checkpoint.keep": ["0", "-1", "all"],
    "checkpoint.every-minutes": ["0", "-1", "nan"],
    "health.every": ["0", "often"],
    "graph": ["", "s1", "s1<->s2:nan", "dsssl"],
    "heavy": ["", "ra(", "nothing"],
    "method": ["ibot", "", "SimSiam"],
    "method.hidden": ["0", "-5", "99999999999", "wide"],
    "precision": ["fp8", "auto "],
    "device": ["gpu", "cuda:7"],
    "accumulate": ["1", "2"],
    "epohcs": ["3"],
    "optimizer.lr": ["0.1"],
    "": ["3"],
}


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.faults)])
def test_no_command_with_a_bad_flag_starts_a_run(
    count: int, started: list[RunConfig], tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    generator = random.Random(count)
    cases = [(flag, value) for flag, values in FLAGS.items() for value in values]
    generator.shuffle(cases)
    for number in range(count):
        flag, value = cases[number % len(cases)]
        good = ["--seed", str(generator.randrange(99)), "--threads", "2", "--knn-every", "3"]
        words = [f"--{flag}", value] if generator.random() < 0.5 else [f"--{flag}={value}"]
        with tally.trial("a command with a bad flag"):
            assert _code(["train", generator.choice(["shapes", "cifar10"]), *good, *words, "--out", "out"]) == 2, words
            assert one_line(capsys), words
            assert started == [], words
            assert list(tmp_path.iterdir()) == []


def test_the_commands_above_would_start_a_run_without_the_fault(started: list[RunConfig], tmp_path: Path) -> None:
    """Else the tests above would prove nothing."""
    flags = ["--seed", "5", "--threads", "2", "--knn-every", "3", "--out", str(tmp_path / "o")]
    assert _code(["train", "shapes", *flags]) == 0
    (tmp_path / "settings.toml").write_text('data = "shapes"\nepochs = 30\n[method]\nname = "byol"\n')
    assert _code(["train", "--config", str(tmp_path / "settings.toml")]) == 0
    assert [config.seed for config in started] == [5, 0]


def _code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:  # the parser of flags ends this way
        return int(end.code or 0)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


FILES: dict[str, tuple[str, bytes]] = {
    "empty JSON": (".json", b""),
    "a list": (".json", b"[1, 2]"),
    "a name twice": (".json", b'{"epochs": 3, "epochs": 4}'),
    "a name twice below": (".json", b'{"optimizer": {"rate": 1, "rate": 2}}'),
    "a name twice in TOML": (".toml", b"epochs = 3\nepochs = 4\n"),
    "deep JSON": (".json", nested(200_000).encode()),
    "deep TOML": (".toml", b"a = " + nested(200_000).encode()),
    "NaN": (".json", b'{"optimizer": {"rate": NaN}}'),
    "Infinity": (".json", b'{"bad_share": -Infinity}'),
    "no UTF-8": (".json", b'{"data": "\xff"}'),
    "zero bytes": (".toml", bytes(1000)),
    "too large": (".json", b" " * 2_000_000),
    "escapes": (".json", b'{"\\u001b[2J": 1}'),
    "a huge number": (".json", b'{"seed": ' + b"9" * 5000 + b"}"),
    "conflict": (".json", b'{"epochs": 2, "optimizer": {"warmup_epochs": 3}}'),
    "conflicting method": (".json", b'{"method": {"name": "simclr", "bottleneck": 3}}'),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_settings_that_are_none(
    kind: str, started: list[RunConfig], tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending, content = FILES[kind]
    with tally.trial("a file of settings that is none"):
        (tmp_path / f"file{ending}").write_bytes(content)
        assert main(["train", "--config", str(tmp_path / f"file{ending}"), "--out", str(tmp_path / "out")]) == 2
        line = one_line(capsys)
        assert "\x1b" not in line
        assert len(line) < 2000
        assert started == []
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "FIFO", "folder", "nowhere"])
def test_files_of_settings_that_are_no_files(
    place: str, tally: Tally, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tally.trial("a file of settings that is none"):
        path = Path(place) if place.startswith("/") else tmp_path / place
        if place == "FIFO":
            os.mkfifo(path)
        elif place == "folder":
            path.mkdir()
        assert main(["train", "--config", str(path)]) == 2
        assert str(path) in one_line(capsys)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.faults)])
def test_mutated_text_is_read_or_refused(count: int, tally: Tally, tmp_path: Path) -> None:
    """Whatever comes out is a whole, valid configuration, or one line."""
    generator = random.Random(count)
    whole = json.dumps(config_io.to_dict(recipe("shapes"))).encode()
    file = tmp_path / "settings.json"
    for _ in range(count):
        damaged = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        with tally.trial("a mutated file of settings"):
            try:
                config = config_io.load(file)
            except DsslError:
                continue
            assert config_io.from_dict(config_io.to_dict(config)) == config
