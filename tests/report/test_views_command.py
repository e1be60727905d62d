"""``dssl views`` from the files to the page."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file

from dssl.augment import CIFAR10
from dssl.commands.views import Arguments, run
from dssl.config import RunConfig
from dssl.config_io import to_dict
from dssl.data import open_source
from dssl.errors import DsslError
from dssl.models import build_encoder
from dssl.recipes import recipe
from dssl.report.views import survey
from dssl.weights import checkpoint
from tests.rejecting import rejects, states

HOSTILE = "<img src=x onerror=alert(1)>&quot;'\"{{7*7}}.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind that a page must bear: hostile names, one channel, transparency, a cut-off file."""
    path = tmp_path_factory.mktemp("files")
    pixels = np.random.default_rng(1).integers(0, 256, (40, 60, 4), dtype=np.uint8)
    Pillow.fromarray(pixels[:, :, :3]).save(path / HOSTILE)
    Pillow.fromarray(pixels[:, :, 0]).save(path / "gray.png")
    Pillow.fromarray(pixels).save(path / "transparent.png")
    Pillow.fromarray(pixels[:, :, :3]).save(path / "whole.jpg")
    (path / "cut.jpg").write_bytes((path / "whole.jpg").read_bytes()[:300])
    return path


@pytest.mark.parametrize("channels", [3, 1])
def test_a_folder_becomes_a_page_that_a_browser_shows_well(
    browser, folder: Path, tmp_path: Path, channels: int, capsys
) -> None:
    out = tmp_path / "new" / "page.html"
    code = run(Arguments(data=str(folder), heavy=("ra(2,5)", "jigsaw(4)"), out=out, image_size=32, channels=channels))
    assert code == 0
    said = capsys.readouterr().out
    assert str(out) in said
    assert "cut.jpg" in said
    with Pillow.open(out.with_suffix(".png")) as sheet:
        assert sheet.width > 400
    for width, scheme in ((1280, "light"), (400, "dark")):
        browser.open(out, width=width, scheme=scheme)
        assert browser.warnings() == []
        assert browser.overflow() == []
        assert browser.broken_images() == 0
    titles = browser.run("return [...document.querySelectorAll('.picture figcaption')].map(e => e.title)")
    assert any(title.endswith(HOSTILE) for title in titles)
    assert browser.run("return document.querySelector('.notice').textContent").count("cut.jpg") == 1
    assert browser.run("return document.querySelectorAll('.pictures:not(.strip) tr').length") == 4


@pytest.mark.parametrize("name", ["folder", "shapes"])
def test_size_and_standard_policy_are_those_of_training(name: str, folder: Path, tmp_path: Path) -> None:
    source, out = {"folder": str(folder), "shapes": "shapes:8"}[name], tmp_path / "page.html"
    usual = recipe(name)
    run(Arguments(data=source, heavy=("identity",), out=out, show=1, sample=2))
    page = out.read_text()
    assert f"{usual.image_size} x {usual.image_size} x 3" in page
    assert f">{usual.standard}<" in page
    run(Arguments(data=source, heavy=("identity",), out=out, show=1, sample=2, image_size=24))
    assert f">{usual.standard}<" in out.read_text()


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in ("first", "second"):
        out = tmp_path / name / "page.html"
        run(Arguments(data="shapes:40", heavy=("ra(2,5)",), out=out, sample=20, show=2))
        page = out.read_text().replace(str(out), "OUT")
        made.append((page, out.with_suffix(".png").read_bytes()))
    assert made[0] == made[1]
    assert "dssl views shapes:40 --heavy &#39;ra(2,5)&#39; --out OUT --show 2 --sample 20" in made[0][0]


def test_distances_by_the_features_of_an_encoder(folder: Path, tmp_path: Path, capsys) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("small", image_size=32, channels=3)
    weights = tmp_path / "weights.safetensors"
    save_file(encoder.state_dict(), weights)
    out = tmp_path / "page.html"
    asked = Arguments(
        data="shapes:40", heavy=("ra(2,5)", "ra(8,16)"), out=out, sample=20, show=20, weights=weights,
        encoder="small",
    )  # fmt: skip
    run(asked)
    said = capsys.readouterr().out

    def features(images: np.ndarray) -> np.ndarray:
        mean, deviation = (np.float32(values) for values in (CIFAR10.mean, CIFAR10.std))
        pixels = ((images / np.float32(255) - mean) / deviation).transpose(0, 3, 1, 2)
        with torch.no_grad():
            return encoder.eval()(torch.from_numpy(np.ascontiguousarray(pixels))).numpy()

    expected = survey(
        open_source("shapes:40"), policies=asked.heavy, standard="standard-cifar", size=32, channels=3, seed=0, examples=1,
        sample=20, features=features,
    )  # fmt: skip
    for policy in expected.policies:
        line = next(line for line in said.splitlines() if line.startswith(policy.policy))
        assert line.split()[3:5] == f"{100 * policy.farther:.0f} %".split()
    page = out.read_text()
    states(page, "small", "weights.safetensors")
    assert f"--weights {weights} --encoder small" in page
    with pytest.raises(DsslError, match="--channels 3"):
        run(dataclasses.replace(asked, channels=1))
    # of a run of gray images the channels are known
    gray = build_encoder("small", image_size=32, channels=1).state_dict()
    header = {
        "config": to_dict(RunConfig(encoder="small", image_size=32, channels=1)), "normalization": CIFAR10.gray().plain(),
        "step": 1, "epoch": 1,
    }  # fmt: skip
    tensors = {f"method.encoder.{name}": value for name, value in gray.items()}
    checkpoint.write(tmp_path / "gray.safetensors", header, tensors)
    run(dataclasses.replace(asked, data=str(folder), weights=tmp_path / "gray.safetensors", encoder=None))
    assert "gray.safetensors" in capsys.readouterr().out


def test_the_contact_sheet_does_not_become_one_of_the_images(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    with rejects("--out", "views.html"):
        run(Arguments(data="."))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"heavy": ()}, ["--heavy", "empty"]),
        ({"heavy": ("ra(2,5",)}, ["'ra(2,5'"]),
        ({"heavy": ("jigsw(4)",)}, ["'jigsw'", "'jigsaw'"]),
        ({"table": "dssl61"}, ["'dssl61'", "'dssl16'"]),
        ({"out": Path("page.pdf")}, ["page.pdf", ".html"]),
        ({"image_size": 0}, ["image_size", 0]),
        ({"encoder": "small"}, ["--encoder small", "--weights"]),
        ({"weights": Path("missing.pth")}, ["missing.pth"]),
        ({"sample": -1}, ["sample", -1]),
        ({"show": 30, "sample": 20}, ["--show 30", "--sample 20"]),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path, given: dict, facts: list[object]) -> None:
    settings = {"data": "shapes:10", "out": tmp_path / "page.html", "sample": 8} | given
    with rejects(*facts):
        run(Arguments(**settings))
    assert list(tmp_path.iterdir()) == []
