import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from dssl.augment import ViewMaker
from dssl.data import open_source
from dssl.graph import View
from dssl.report.pictures import Picture, SheetRow, contact_sheet, draw_gallery, picture


def _pixels(made: Picture) -> np.ndarray:
    assert made.source.startswith("data:image/png;base64,")
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(made.source.split(",", 1)[1]))))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_small_image_keeps_every_pixel(channels: int) -> None:
    image = np.arange(32 * 20 * channels, dtype=np.uint32).astype(np.uint8).reshape(32, 20, channels)
    made = picture(image, description="d")
    assert np.array_equal(_pixels(made).reshape(image.shape), image)
    assert (made.width, made.height, made.enlarge) == (20, 32, True)


@pytest.mark.parametrize(
    ("shape", "size"), [((400, 500, 3), (144, 115)), ((3000, 1, 1), (1, 144)), ((100, 80, 3), (80, 100))]
)
def test_a_large_image_becomes_a_thumbnail(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    made = picture(np.full(shape, 77, dtype=np.uint8), description="d")
    assert (made.width, made.height) == size
    assert not made.enlarge
    assert set(_pixels(made).ravel().tolist()) == {77}


def test_the_sheet_draws_a_no_break_space_as_a_space() -> None:
    images = [np.zeros((8, 8, 3), dtype=np.uint8)]
    broken, plain = (
        contact_sheet([SheetRow(title=f"a{space}b", note=f"50{space}%", images=images)], title="t", cell=60)
        for space in ("\N{NO-BREAK SPACE}", " ")
    )
    assert broken.tobytes() == plain.tobytes()


def test_the_sheet_shows_every_image_in_its_cell() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    images = [np.broadcast_to(np.array(c, dtype=np.uint8), (32, 32, 3)).copy() for c in colours]
    gray = np.full((10, 20, 1), 99, dtype=np.uint8)
    rows = [
        SheetRow(title="colour <b>", note="x" * 200, images=images),
        SheetRow(title="gray", note="", images=[gray] * 3, alarm=True),
    ]
    sheet = contact_sheet(rows, title="t" * 400, cell=50)
    pixels = np.asarray(sheet)
    for colour in colours:
        assert (pixels == colour).all(axis=2).sum() == 50 * 50
    assert (pixels == (99, 99, 99)).all(axis=2).sum() >= 3 * 50 * 25
    assert np.array_equal(pixels, np.asarray(contact_sheet(rows, title="t" * 400, cell=50)))


def test_a_gallery_that_cannot_be_written_is_a_warning_and_not_the_end_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker = ViewMaker([View(name="s1", policy="resize")], size=32, seed=0, channels=3)
    source = open_source("shapes:9")
    drawn = draw_gallery(source, maker, tmp_path / "views.png")
    with Pillow.open(tmp_path / "views.png") as written:
        assert np.array_equal(np.asarray(written), drawn)
    (tmp_path / "file").write_text("")
    again = draw_gallery(source, maker, tmp_path / "file" / "views.png")
    assert np.array_equal(again, drawn)
    assert "views.png could not be written" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "views.png"]
