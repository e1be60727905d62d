"""Images as PNG: thumbnails inside a page, contact sheets, the gallery of a run's views, and maps of an embedding."""

import base64
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor

from dssl import rng
from dssl.augment import BaseViewMaker
from dssl.data import Source, UnreadableImage
from dssl.data.decode import resize
from dssl.evaluation.knn import neighbours
from dssl.files import write_atomically
from dssl.report.page import COLORS
from dssl.types import Image

logger = logging.getLogger("dssl")

PICTURE_SIDE = 144
"""Pixels of the longer side of a picture on a page, at most."""

_ENLARGE_UP_TO = 64
"""Images up to this many pixels a side are kept whole and enlarged with hard edges: each pixel is what the model sees."""

MAPPED = 1_500
"""Images on a map, at most."""

_CELL = 36
"""Pixels of a side of a cell of the map."""

_MARGIN, _GAP, _TEXT, _WIDEST = 28, 8, 15, 300
_GALLERY = 8
Positions: TypeAlias = NDArray[np.float64]
"""In the plane: N x 2."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a page holds it; ``flag`` says why it has a red frame."""

    source: str
    width: int
    height: int
    description: str
    enlarge: bool
    caption: str = ""
    flag: str = ""


@dataclass(frozen=True, slots=True)
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
    source = f"data:image/{'jpeg' if photo else 'png'};base64,{base64.b64encode(content).decode('ascii')}"
    return Picture(source, image.width, image.height, description, enlarge, caption, flag)


def picture(
    image: Image,
    *,
    description: str,
    side: int = PICTURE_SIDE,
    caption: str = "",
    flag: str = "",
    photo: bool = False,
) -> Picture:
    """A thumbnail whose longer side has at most ``side`` pixels, as JPEG for a ``photo``; small images stay as they are."""
    enlarge = max(image.shape[:2]) <= _ENLARGE_UP_TO
    thumbnail = to_pillow(image if enlarge else shrunk(image, side=side))
    return embedded(
        thumbnail, description=description, enlarge=enlarge, caption=caption, flag=flag, photo=photo and not enlarge
    )


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
            fitted = _fitted(image, cell, Pillow.Resampling.NEAREST if small else Pillow.Resampling.LANCZOS)
            x = left + column * (cell + _GAP) + (cell - fitted.width) // 2
            sheet.paste(fitted, (x, y + (cell - fitted.height) // 2))
    return sheet


def draw_gallery(source: Source, maker: BaseViewMaker, path: Path) -> NDArray[np.uint8]:
    """Write a sheet of a few originals and every view of the graph below them, and return it: look before you train."""
    originals: dict[int, Image] = {}
    for index in range(len(source)):
        with suppress(UnreadableImage):
            originals[index] = source.image(index)
        if len(originals) == _GALLERY:
            break
    views = maker.allocate(len(originals))
    plan = maker.plan(np.array(list(originals), np.int64), epoch=0)
    for row, image in enumerate(originals.values()):
        maker.apply_many(plan, row, [image], views, row)
    rows = [SheetRow("original", source.name, list(originals.values()))]
    rows += [SheetRow(name, "", list(views[name])) for name in maker.names]
    sheet = contact_sheet(rows, title="The views of this run", cell=96)
    try:
        write_atomically(path, [png(sheet, optimize=False)])  # optimizing would cost every start 0.4 s
    except OSError as error:  # a picture is not worth a run
        logger.warning(f"{path} could not be written ({error.strerror})")
    return np.asarray(sheet)


def centred(features: Tensor) -> Tensor:
    """Features of length one, around their mean."""
    unit = F.normalize(features.double(), dim=1)
    return unit - unit.mean(dim=0)


def pca(features: Tensor, *, dimensions: int = 2) -> Positions:
    """The main axes of the normalised, centred features; signs are fixed, so that the same features give the same map."""
    rows = centred(features)
    _, axes = torch.linalg.eigh(rows.T @ rows)
    axes = axes[:, -min(dimensions, axes.shape[1]) :].flip(1)
    largest = axes.abs().argmax(dim=0)
    points = rows @ (axes * axes[largest, torch.arange(axes.shape[1])].sign())
    return points.numpy() if points.shape[1] >= 2 else np.pad(points.numpy(), ((0, 0), (0, 1)))


def layout(features: Tensor, *, seed: int) -> tuple[str, NDArray[np.int64], Positions]:
    """How images lie in the plane, which of them, and where: by t-SNE, or by PCA without scikit-learn or with few images."""
    rows = rng.sample(rng.key(seed, "map"), len(features), MAPPED)
    chosen = features[torch.from_numpy(rows)]
    reduced = pca(chosen, dimensions=50)
    # of one point for all images scikit-learn's t-SNE would take the process with it
    if len(rows) >= 50 and np.isfinite(reduced).all() and np.ptp(reduced, axis=0).max() > 0:
        with suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other libraries
            from sklearn.manifold import TSNE

            state = rng.key(seed, "map") % 2**31
            points = TSNE(random_state=state, init="pca", perplexity=min(30, len(rows) // 4)).fit_transform(reduced)
            return "t-SNE", rows, np.asarray(points, np.float64)
    return "PCA", rows, pca(chosen)


def map_picture(points: Positions, image: Callable[[int], Image], *, cells: tuple[int, int] = (29, 20)) -> Pillow.Image:
    """The images at their positions, on a grid so that none hides another; the first in a cell wins.

    Only those that win are asked for: decoding a photo takes longer than everything else here.
    """
    columns, rows = cells
    canvas = Pillow.new("RGB", (columns * _CELL, rows * _CELL), COLORS["sunken"])
    # outliers would squeeze the rest into a corner: the outermost hundredth is moved to the rim
    low, high = np.quantile(points, (0.01, 0.99), axis=0)
    place = np.clip((points - low) / np.where(high > low, high - low, 1.0), 0, 1)
    taken: set[tuple[int, int]] = set()
    for number, (x, y) in enumerate(place):
        cell = round(x * (columns - 1)), round((1 - y) * (rows - 1))
        if cell not in taken:
            taken.add(cell)
            thumbnail = _fitted(image(number), _CELL - 2, Pillow.Resampling.BILINEAR)
            canvas.paste(thumbnail, (cell[0] * _CELL + 1, cell[1] * _CELL + 1))
    return canvas


def retrieve(
    features: Tensor, rows: NDArray[np.int64], *, queries: int, count: int, seed: int
) -> dict[int, list[tuple[int, float]]]:
    """For some images, chosen by the seed, their nearest neighbours among all others, with the similarities."""
    if len(features) < 2:
        return {}
    chosen = rng.sample(rng.key(seed, "retrieval"), len(features), queries)
    similarities, indices = neighbours(features, features[torch.from_numpy(chosen)], k=count + 1)
    nearest = {}
    for query, values, places in zip(chosen.tolist(), similarities.tolist(), indices.tolist(), strict=True):
        others = [(int(rows[place]), value) for place, value in zip(places, values, strict=True) if place != query]
        nearest[int(rows[query])] = others[:count]
    return nearest


def _fitted(image: Image, side: int, method: Pillow.Resampling) -> Pillow.Image:
    whole = to_pillow(image)
    return whole.resize(_fitting(whole.size, side), method)


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
