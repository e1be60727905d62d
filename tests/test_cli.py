"""The command line as a real process: help, one-line errors, exit codes."""

import fcntl
import importlib
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from PIL import Image

from dssl import cli
from dssl.commands import COMMANDS, module_name
from dssl.commands.options import ALIASES, options_of, parse
from dssl.recipes import recipe
from tests.rejecting import states


def dssl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dssl", *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], {"torch", "argparse", "numpy"}),
        (["graph", "dssl"], {"torch", "torchvision", "numba"}),
        (["graph", "dssl", "--steps"], {"torch", "torchvision", "numba"}),
        (["train", "--help"], {"torch", "torchvision", "numba", "numpy"}),
        (["train", "cifar10", "--method", "byol", "--help"], {"torch", "torchvision", "numba"}),
        (["doctor", "--help"], {"torch", "torchvision", "numba", "numpy"}),
    ],
)
def test_what_trains_nothing_does_not_wait_for_torch(words: list[str], absent: set[str]) -> None:
    code = f"""
import sys, dssl.cli
try:
    code = dssl.cli.main({words})
except SystemExit as leaving:
    code = leaving.code
print([code or 0, sorted({absent} & set(sys.modules))])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert len(result.stdout.splitlines()) > 1
    assert result.stdout.splitlines()[-1] == "[0, []]"


def test_graph_prints_views_edges_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", "dssl"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("s1<->s2, h1->s1, h2->s2\n")
    assert "h1    heavy on the pixels of s1" in said
    assert "byol         6               2" in said
    assert "2n² + 2n" in said


def test_graph_prints_the_steps_of_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", "s1<->s2", "--steps"]) == 0
    simsiam, byol, others = capsys.readouterr().out.splitlines()
    assert simsiam == (
        "simsiam, swav: predict s1 · target s1 · predict s2 · compare s2->s1 · backward [s2->s1] · "
        "target s2 · compare s1->s2 · backward [s1->s2]"
    )
    assert byol.startswith(
        "byol, moco, dino, match: target s1 · target s2 · predict s1 · compare s1->s2 · backward [s1->s2] · "
    )
    assert others.startswith("simclr, vicreg, barlowtwins, lejepa: ")
    assert others.endswith("backward [s1->s2, s2->s1]")
    assert cli.main(["graph", "s1<->s2", "--steps", "--method", "byol"]) == 0
    assert capsys.readouterr().out == f"{byol}\n".replace("byol, moco, dino, match", "byol")


@pytest.mark.parametrize(
    ("text", "divisor"),
    [
        ("s2->s1:3", "divided by 3 (normalize=similarity: all weights"),
        ("dssl", "divided by 2 (normalize=similarity: the"),
    ],
)
def test_graph_says_what_the_sum_is_divided_by(text: str, divisor: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", text]) == 0
    assert divisor in capsys.readouterr().out


def test_graph_of_the_ablation_says_what_is_inferred(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", "ablation-d"]) == 0
    assert "inferred, not stated outright in the paper" in capsys.readouterr().out


def test_the_folder_of_a_drawing_is_made(tmp_path: Path) -> None:
    assert cli.main(["graph", "dssl", "--out", str(tmp_path / "new" / "dssl.svg")]) == 0
    assert (tmp_path / "new" / "dssl.svg").is_file()


def test_graph_is_drawn_and_the_same_in_every_process(tmp_path: Path) -> None:
    outs = [tmp_path / f"graph.{ending}" for ending in ("png", "svg", "pdf")]
    commands = [["graph", "ablation-h", "--out", str(out)] for out in outs]
    assert [cli.main(words) for words in commands] == [0, 0, 0]
    first = [out.read_bytes() for out in outs]
    with Image.open(outs[0]) as picture:
        assert len(set(picture.convert("RGB").getcolors(maxcolors=2**24))) > 20
    assert b"<text" in first[1]
    assert b"similarity of the method" in first[1]
    code = f"from dssl import cli; print([cli.main(words) for words in {commands}])"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=True)
    assert [out.read_bytes() for out in outs] == first


def test_a_drawing_that_fails_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: matplotlib has written a part when it fails."""

    def full(figure: object, path: Path, **_: object) -> None:
        Path(path).write_text("half")
        raise OSError("No space left on device")

    out = tmp_path / "dssl.svg"
    out.write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert cli.main(["graph", "dssl", "--out", str(out)]) == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("grpah",), ["'grpah'", "'graph'"]),
        (("graph", "dsssl"), ["'dsssl'", "'dssl'"]),
        (("graph", "s1<->s1"), ["s1->s1"]),
        (("graph", "dssl", "--steps", "--method", "simclrr"), ["'simclrr'", "'simclr'"]),
        (("graph", "dssl", "--method", "byol"), ["--method byol", "--steps"]),
        (("graph", "dssl", "--out", "picture.jpeg"), ["picture.jpeg", ".svg"]),
        (("graph", "dssl", "--out", "/dev/null/all.png"), ["/dev/null"]),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(list(words)) == 2
    said = capsys.readouterr().err
    states(said, *facts)
    assert said.startswith("dssl: ")
    assert said.count("\n") == 1


def test_a_mistake_is_one_line_of_the_process() -> None:
    result = dssl("grpah")
    assert result.returncode == 2
    assert result.stderr.startswith("dssl: ")
    assert result.stderr.count("\n") == 1


def test_version() -> None:
    from dssl.version import VERSION

    assert dssl("--version").stdout == f"dssl {VERSION}\n"


def test_help_and_version_as_other_programs_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    for words, same in (
        (["help", "graph"], ["graph", "--help"]),
        (["version"], ["--version"]),
        (["-V"], ["--version"]),
    ):
        said = []
        for either in (words, same):
            assert cli.main(either) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = f"{sys.executable} -m dssl graph dssl | head -c 5"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "s1<->"
    assert result.stderr == ""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize(("words", "code"), [("graph dssl", 0), ("graph nothing", 2)])
def test_closed_streams_are_no_error(closed: tuple[int, ...], words: str, code: int) -> None:
    """And no file that the program opens gets the number of one of them."""
    test = (
        "import os, sys, tempfile; from dssl import cli\n"
        "ran = cli.main\n"
        "cli.main = lambda: ran(sys.argv[1:]) if tempfile.TemporaryFile().fileno() > 2 else 1\n"
        "cli.entry()"
    )
    redirections = " ".join(f"{number}>&-" for number in closed)
    command = f"{sys.executable} -c {shlex.quote(test)} {words} {redirections}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr


def test_a_terminal_of_another_encoding_gets_an_escape() -> None:
    code = "from dssl import cli; cli.main = lambda: print('64 – 66') or 0; cli.entry()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "64 \\u2013 66\n", "")


def on_terminal(*words: str, columns: int) -> str:
    """What a real terminal of this width shows on stderr and stdout."""
    first, second = pty.openpty()
    fcntl.ioctl(second, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "dssl", *words],
        stdin=second,
        stdout=second,
        stderr=second,
        env=environment | {"TERM": "xterm"},
    ) as process:
        os.close(second)
        said = b""
        while True:
            try:
                part = os.read(first, 4096)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                break
            said += part
    os.close(first)
    assert process.returncode == 2
    return said.decode()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("train", "shapes", "--epoch", "3"), ["--epoch", "--epochs"]),
        (("graph", "dssl", "--stepss"), ["--stepss", "--steps"]),
        (("train", "shapes", "--epochs", "many"), ["--epochs", "'many'"]),
    ],
)
def test_a_mistake_in_the_flags_is_plain_on_a_terminal(words: tuple[str, ...], facts: list[str]) -> None:
    said = on_terminal(*words, columns=80)
    assert said.startswith("dssl: ")
    states(said, *facts)
    assert not re.search(r"[\x1b│─╭╰]", said)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["train", "shapes", "--epoch", "3"], ["--epoch", "--epochs"]),
        (["train", "shapes", "--learning-rate", "3"], ["--learning-rate", "--optimizer.rate"]),
        (["train", "shapes", "--lerning_rate", "3"], ["--lerning_rate", "--optimizer.rate"]),
        (["train", "shapes", "--weight-decay", "3"], ["--weight-decay", "--optimizer.weight-decay"]),
        (["train", "shapes", "--workers", "3"], ["--workers", "--threads"]),
        (["train", "shapes", "--gpus", "2"], ["--gpus", "torchrun"]),
        (["train", "shapes", "--heavy", "randaug(2,5)"], ["'randaug'", "'ra'"]),
        (["train", "shapes", "--encoder", "vit_small_patch16_224"], ["timm:vit_small_patch16_224"]),
        (["train", "shapes", "--epochs", "many"], ["--epochs", "'many'"]),
        (["train", "shapes", "--device", "gpu"], ["--device", "'gpu'"]),
        (["train", "shapes", "--epochs"], ["--epochs"]),
        (["train", "shapes", "--compile=yes"], ["--no-compile"]),
        (["train", "shapes", "--adapt.average", "0"], ["--adapt.average"]),
        (["train", "shapes", "--method", "simclr", "--guard", "1"], ["--guard", "simclr"]),
        (["train", str(Path(__file__).parent)], [f"dssl train folder {Path(__file__).parent}"]),
        (["train", "shapes", "--momentum", "0.9"], ["--momentum", "--optimizer.momentum"]),
        (["train", "shapes", "--optimizer", "adam"], ["--optimizer", "--optimizer.name"]),
        (["train", "shapes", "--wandb"], ["--wandb", "--log"]),
        (["train", "simclr", "photos"], ["simclr", "dssl train folder", "--method simclr"]),
        (["robust", "photos"], ["robust", "'train'"]),
        (["eval", "runs/x"], ["eval", "'evaluate'"]),
        (["train", "shapes", "--keep-head"], ["--keep-head", "shapes", "robust"]),
        (["train", "shapes", "--minutes", "1", "--hours", "1"], ["--minutes", "--hours"]),
        (["train", "shapes", "--channels", "2", "--range", "1"], ["--range", "'1'"]),
        (["train", "shapes", "--heavy", "ra(2,50)"], ["'ra(2,50)'", 50, 30]),
        (["train", "--config", "nosuch.toml"], ["--config", "nosuch.toml"]),
        (["evaluate"], ["WEIGHTS", "dssl evaluate"]),
        (["data", "photos"], ["'photos'", "show"]),
        (["graph", "dssl", "extra"], ["extra"]),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(words, facts, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("dssl: ")
    states(err, *facts)
    assert len(err) < 400


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_and_three_examples_that_parse(command, capsys):
    kind = importlib.import_module(module_name(command)).Arguments
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    flags = {option.flag for option in options_of(kind) if not option.name.startswith("method.")}
    flags -= {f"--{name.replace('_', '-')}" for name in kind.USAGE.positional}
    assert [flag for flag in flags if flag[2:] not in said.replace("[no-]", "")] == []
    assert [old for old in ALIASES if f"--{old} " in said and f"--{old}" not in flags | {"--lr"}] == []
    assert not re.search(
        r"None|\{|MISSING|<|>\.", said.replace("s1->", "").replace("s1<->s2", "").replace("h1->s1", "")
    )
    assert max(map(len, said.splitlines())) <= 100
    examples = said.rpartition("examples:\n")[2].splitlines()
    assert len(examples) == 3
    for line in examples:
        assert cli.main([*shlex.split(line.partition("dssl ")[2]), "--help"]) == 0, line


def test_the_help_of_training_shows_the_recipes_defaults_and_the_methods_settings(capsys):
    assert cli.main(["train", "--help"]) == 0
    plain = capsys.readouterr().out
    assert "default:" not in plain
    assert (
        plain.index("--optimizer.rate") < plain.index("\ndata:\n") < plain.index("--limit") < plain.index("advanced:")
    )
    assert plain[plain.index("common options:") : plain.index("\ndata:\n")].count("\n  --") == 10
    assert cli.main(["train", "cifar10", "--method", "byol", "--help"]) == 0
    said = capsys.readouterr().out
    settings = recipe("cifar10", method="byol")
    assert f"(default: {settings.epochs})" in said
    assert "--method.momentum X" in said
    assert f"(default: {settings.method.momentum})" in said
    assert "--adapt." not in said


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("train shapes --lr 0.5 --epochs 3", "train shapes --optimizer.rate 0.5 --epochs 3"),
        ("train shapes --rate 0.5", "train shapes --optimizer.rate 0.5"),
        (
            "train shapes --batch_size 32 --optimizer-momentum 0.8",
            "train shapes --batch-size=32 --optimizer.momentum=0.8",
        ),
        ("train shapes --size 16 --max-bad 0.5", "train shapes --image-size 16 --bad-share 0.5"),
        ("train shapes --guard 1 --hours 2", "train shapes --method.guard 1 --minutes 120"),
        ("train shapes --health-every 5 --look-every 7", "train shapes --health.every 7"),
        ("train shapes --optimizer.no-decay-norms-and-biases", "train shapes --no-optimizer.decay-norms-and-biases"),
        ("train adapt x --adapt.most-drift none", "train adapt --data x --adapt.max-drift None"),
        (
            "train shapes --method vicreg --method.regularise all",
            "train shapes --method vicreg --method.regularize all",
        ),
        ("train folder photos", "train folder --data photos"),
        ("train --recipe shapes --policies ua", "train shapes --heavy ua"),
        ("views photos --policies ua ta --size 32", "views --data photos --heavy ua ta --image-size 32"),
        (
            "data pack photos --out x --side 64 --max-bad 0.1",
            "data pack --data photos --out x --image-size 64 --bad-share 0.1",
        ),
        ("data show photos --every", "data show photos --all"),
        ("evaluate runs/x photos", "evaluate --weights runs/x --data photos"),
        ("explore runs/x photos", "explore runs/x --data photos"),
        ("doctor photos --side 64", "doctor --data photos --image-size 64"),
        (
            "evaluate-coco scratch coco --look-every 5 --lr 0.1",
            "evaluate-coco scratch coco --health.every 5 --rate 0.1",
        ),
    ],
)
def test_one_thing_has_one_name_and_the_others_still_work(words, same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = []
    for line in (words, same):
        command, *rest = line.split()
        module = importlib.import_module(module_name(command))
        arguments = parse(module.Arguments, rest, base=module.base if command == "train" else None)
        parsed.append(arguments.settings if command == "train" else arguments)
    assert parsed[0] == parsed[1]


def test_large_buffers_are_reused_without_asking_the_system_again() -> None:
    code = """
import resource, sys
import numpy as np
from dssl.cli import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = [
        int(subprocess.run([sys.executable, "-c", code, word], capture_output=True, check=True, text=True).stdout)
        for word in ("keep", "plain")
    ]
    if not sys.platform.startswith("linux") or faults[1] < 1000:
        pytest.skip("this library of C keeps freed memory by itself")
    assert faults[0] < faults[1] / 10
