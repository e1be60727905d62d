"""Images as PNG: thumbnails inside a page, contact sheets for a slide, and the gallery of a run's views."""

import base64
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from dssl.augment import BaseViewMaker
from dssl.data import Source, UnreadableImage
from dssl.data.decode import resize
from dssl.files import write_atomically
from dssl.report.figures import COLORS
from dssl.types import Image

logger = logging.getLogger("dssl")

PICTURE_SIDE = 144
"""Pixels of the longer side of a picture on a page, at most."""

_ENLARGE_UP_TO = 64
"""Images up to this many pixels a side are kept whole and enlarged with hard edges: each pixel is what the model sees."""

_MARGIN, _GAP, _TEXT, _WIDEST = 28, 8, 15, 300
_GALLERY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image as a page holds it; ``flag`` says why it has a red frame."""

    source: str
    width: int
    height: int
    description: str
    enlarge: bool
    caption: str = ""
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRow:
    """A title, a line below it, and the images; ``alarm`` sets the line in red."""

    title: str
    note: str
    images: Sequence[Image]
    alarm: bool = False


def to_pillow(image: Image) -> Pillow.Image:
    """What can be seen of an image: gray or colour, the first channel of two, the first three of more."""
    return Pillow.fromarray(np.ascontiguousarray(image[:, :, 0] if image.shape[2] < 3 else image[:, :, :3]))


def png(image: Pillow.Image, *, optimize: bool = True) -> bytes:
    """The bytes of a PNG, the same for the same pixels: no time, no software name."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=optimize)
    return buffer.getvalue()


def shrunk(image: Image, *, side: int) -> Image:
    """The image with its longer side reduced to ``side`` pixels (Lanczos); a smaller one is returned as it is."""
    if max(image.shape[:2]) <= side:
        return image
    return resize(image, _fitting((image.shape[1], image.shape[0]), side), Pillow.Resampling.LANCZOS)


def embedded(
    image: Pillow.Image,
    *,
    description: str,
    enlarge: bool = False,
    caption: str = "",
    flag: str = "",
    photo: bool = False,
) -> Picture:
    """An image inside the page at its full size; a large ``photo`` as JPEG, an eighth of the bytes."""
    buffer = io.BytesIO()
    if photo:
        image.save(buffer, format="JPEG", quality=85)
    content = buffer.getvalue() if photo else png(image)
    return Picture(
        source=f"data:image/{'jpeg' if photo else 'png'};base64,{base64.b64encode(content).decode('ascii')}",
        width=image.width,
        height=image.height,
        description=description,
        enlarge=enlarge,
        caption=caption,
        flag=flag,
    )


def picture(image: Image, *, description: str, side: int = PICTURE_SIDE, caption: str = "", flag: str = "") -> Picture:
    """A thumbnail whose longer side has at most ``side`` pixels; small images are never resampled."""
    enlarge = max(image.shape[:2]) <= _ENLARGE_UP_TO
    shown = to_pillow(image if enlarge else shrunk(image, side=side))
    return embedded(shown, description=description, enlarge=enlarge, caption=caption, flag=flag)


def contact_sheet(rows: Sequence[SheetRow], *, title: str, cell: int = 128) -> Pillow.Image:
    """Rows of square cells on white; an image is enlarged without smoothing, or reduced with antialiasing, to fit its cell."""
    heading, bold, plain = (ImageFont.load_default(size) for size in (_TEXT + 7, _TEXT + 1, _TEXT - 2))
    texts = [(_cut(row.title, bold, _WIDEST), _cut(row.note, plain, _WIDEST)) for row in rows]
    left = _MARGIN + round(max(max(bold.getlength(title), plain.getlength(note)) for title, note in texts)) + 2 * _GAP
    top = _MARGIN + 44
    columns = max(len(row.images) for row in rows)
    width = left + columns * (cell + _GAP) - _GAP + _MARGIN
    sheet = Pillow.new("RGB", (width, top + len(rows) * (cell + _GAP) - _GAP + _MARGIN), COLORS["surface"])
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN - 4), _cut(title, heading, width - 2 * _MARGIN), fill=COLORS["ink"], font=heading)
    for number, (row, (row_title, note)) in enumerate(zip(rows, texts, strict=True)):
        y = top + number * (cell + _GAP)
        draw.text((_MARGIN, y + cell / 2 - 20), row_title, fill=COLORS["ink"], font=bold)
        draw.text((_MARGIN, y + cell / 2 + 2), note, fill=COLORS["bad" if row.alarm else "muted"], font=plain)
        for column, image in enumerate(row.images):
            small = max(image.shape[:2]) < cell
            kind = Pillow.Resampling.NEAREST if small else Pillow.Resampling.LANCZOS
            fitted = _fitted(to_pillow(image), cell, kind)
            x = left + column * (cell + _GAP) + (cell - fitted.width) // 2
            sheet.paste(fitted, (x, y + (cell - fitted.height) // 2))
    return sheet


def draw_gallery(source: Source, maker: BaseViewMaker, path: Path) -> NDArray[np.uint8]:
    """Write a sheet of a few originals and every view of the graph below them, and return it: look before you train."""
    originals: list[Image] = []
    indices: list[int] = []
    for index in range(len(source)):
        try:
            originals.append(source.image(index))
        except UnreadableImage:
            continue
        indices.append(index)
        if len(originals) == _GALLERY:
            break
    views = maker.allocate(len(originals))
    plan = maker.plan(np.array(indices, np.int64), epoch=0)
    for row, image in enumerate(originals):
        maker.apply_many(plan, row, [image], views, row)
    rows = [SheetRow(title="original", note=source.name, images=originals)]
    rows += [SheetRow(title=name, note="", images=list(views[name])) for name in maker.names]
    sheet = contact_sheet(rows, title="The views of this run", cell=96)
    try:
        write_atomically(path, [png(sheet, optimize=False)])  # optimizing would cost every start 0.4 s
    except OSError as error:  # a picture is not worth a run
        logger.warning(f"{path} could not be written ({error.strerror})")
    return np.asarray(sheet)


def _fitted(image: Pillow.Image, side: int, kind: Pillow.Resampling) -> Pillow.Image:
    return image.resize(_fitting(image.size, side), kind)


def _fitting(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Width and height scaled so that the longer one is this."""
    scale = side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: float) -> str:
    """The text, cut with an ellipsis where it is too long; the font has no glyph for a no-break space."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."
