"""The contact sheet: one PNG with a row for each kind of view, for a slide or a message."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from dssl.report.figures import COLORS
from dssl.report.pictures import to_pillow
from dssl.types import Image

_MARGIN, _GAP, _TEXT, _WIDEST = 28, 8, 15, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetRow:
    """A title, a line below it, and the images; ``alarm`` sets the line in red."""

    title: str
    note: str
    images: Sequence[Image]
    alarm: bool = False


def contact_sheet(rows: Sequence[SheetRow], *, title: str, cell: int = 128) -> Pillow.Image:
    """Rows of square cells on white; an image is enlarged without smoothing, or reduced with antialiasing, to fit its cell."""
    heading, bold, plain = (ImageFont.load_default(size) for size in (_TEXT + 7, _TEXT + 1, _TEXT - 2))
    texts = [(_fit(row.title, bold, _WIDEST), _fit(row.note, plain, _WIDEST)) for row in rows]
    left = _MARGIN + round(max(max(bold.getlength(title), plain.getlength(note)) for title, note in texts)) + 2 * _GAP
    top = _MARGIN + 44
    columns = max(len(row.images) for row in rows)
    width = left + columns * (cell + _GAP) - _GAP + _MARGIN
    sheet = Pillow.new("RGB", (width, top + len(rows) * (cell + _GAP) - _GAP + _MARGIN), COLORS["surface"])
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, _MARGIN - 4), _fit(title, heading, width - 2 * _MARGIN), fill=COLORS["ink"], font=heading)
    for number, (row, (row_title, note)) in enumerate(zip(rows, texts, strict=True)):
        y = top + number * (cell + _GAP)
        draw.text((_MARGIN, y + cell / 2 - 20), row_title, fill=COLORS["ink"], font=bold)
        color = COLORS["bad" if row.alarm else "muted"]
        draw.text((_MARGIN, y + cell / 2 + 2), note, fill=color, font=plain)
        for column, image in enumerate(row.images):
            fitted = _fitted(to_pillow(image), cell)
            x = left + column * (cell + _GAP) + (cell - fitted.width) // 2
            sheet.paste(fitted, (x, y + (cell - fitted.height) // 2))
    return sheet


def _fitted(image: Pillow.Image, cell: int) -> Pillow.Image:
    scale = cell / max(image.size)
    kind = Pillow.Resampling.NEAREST if scale > 1 else Pillow.Resampling.LANCZOS
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), kind)


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: float) -> str:
    """The text, cut with an ellipsis where it is longer than the room; the font has no glyph for a no-break space."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."
