"""``dssl views`` from the files to the page."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from dssl.commands.views import Arguments, run
from dssl.recipes import recipe
from tests.rejecting import rejects

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
        ({"sample": -1}, ["sample", -1]),
        ({"show": 30, "sample": 20}, ["--show 30", "--sample 20"]),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path, given: dict, facts: list[object]) -> None:
    settings = {"data": "shapes:10", "out": tmp_path / "page.html", "sample": 8} | given
    with rejects(*facts):
        run(Arguments(**settings))
    assert list(tmp_path.iterdir()) == []
