"""`dssl data`: what it prints, and that options which would do nothing are refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dssl
from dssl.commands.data import Arguments, run
from dssl.data import open_source
from tests.rejecting import rejects


@pytest.fixture
def photos(tmp_path):
    generator = np.random.default_rng(0)
    for number in range(40):
        place = tmp_path / "photos" / f"class {number % 4}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 24, 3), np.uint8)).save(place)
    (tmp_path / "photos" / "class 0" / "bad\n.jpg").write_bytes(b"x")
    return tmp_path / "photos"


def test_show(photos, capsys):
    assert run(Arguments(action="show", data=str(photos), measure=True)) == 0
    said = capsys.readouterr().out
    assert "41 images" in said
    assert "10  class 3" in said
    assert "20 x 24 to 20 x 24" in said
    assert "bad\\n.jpg: not a JPEG" in said
    mean = [float(value) for value in said.split("mean")[1].split("(")[0].split(",")]
    assert all(abs(value - 0.5) < 0.02 for value in mean)


def test_show_without_labels(capsys, tmp_path):
    Image.new("RGB", (3, 3)).save(tmp_path / "a.png")
    assert run(Arguments(action="show", data=str(tmp_path), all=True)) == 0
    assert "images without labels" in capsys.readouterr().out


def test_without_home_and_with_a_plain_locale(photos, tmp_path):
    (photos / "class 1" / os.fsdecode(b"\xff\xc3.png")).write_bytes((photos / "class 1" / "1.png").read_bytes())
    (photos / "class 1").rename(photos / "klasse größe")
    code = (
        "import sys; from dssl.commands.data import Arguments, run\n"
        "sys.exit(run(Arguments(action='show', data=sys.argv[1], all=True)))"
    )
    environment = {"LANG": "C", "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(dssl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code, photos], env=environment, capture_output=True, check=True, cwd=tmp_path
    )
    assert "klasse größe" in done.stdout.decode()
    assert done.stderr == b""


def test_too_many_bad_files(photos):
    with rejects("1 of 41", "1.0%", r"bad\n.jpg"):
        run(Arguments(action="show", data=str(photos), bad_share=0.01))


def test_pack(photos, capsys, tmp_path):
    assert run(Arguments(action="pack", data=str(photos), out=tmp_path / "packed", image_size=10)) == 0
    assert "40 images" in capsys.readouterr().out
    copy = open_source(f"packed:{tmp_path / 'packed'}")
    assert copy.image(0).shape == (10, 12, 3)
    with rejects("--out", "missing"):
        run(Arguments(action="pack", data=str(photos)))


def test_pack_counts_what_it_wrote(photos, capsys, tmp_path):
    (photos / "class 0" / "gone.jpg").symlink_to("nowhere")
    assert run(Arguments(action="pack", data=str(photos), out=tmp_path / "packed", bad_share=0.1)) == 0
    said = capsys.readouterr().out
    assert "train: 40 images" in said
    assert "unreadable   2 files" in said
    assert len(open_source(f"packed:{tmp_path / 'packed'}")) == 40


def test_cifar10_from_nowhere(tmp_path):
    with rejects(f"cifar10:{tmp_path}/missing", "dssl data cifar10 FOLDER"):
        run(Arguments(action="cifar10", data=str(tmp_path / "target"), origin=str(tmp_path / "missing")))
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("action", "option"),
    [
        ("show", {"image_size": 32}),
        ("show", {"origin": "file"}),
        ("pack", {"measure": True}),
        ("cifar10", {"split": "test"}),
    ],
)
def test_options_of_other_actions(action, option):
    flag = "--" + next(iter(option)).replace("_", "-")
    with rejects(flag, f"dssl data {action}"):
        run(Arguments(action=action, data="shapes", **option))
