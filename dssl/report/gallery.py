"""The views that a run learns from, as a picture in its folder: nobody should train on views they have not seen."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dssl.augment import ViewMaker
from dssl.data import Source, UnreadableImage
from dssl.report.sheet import SheetRow, contact_sheet
from dssl.types import Image

logger = logging.getLogger("dssl")
_COLUMNS = 8


def draw_gallery(source: Source, maker: ViewMaker, path: Path) -> NDArray[np.uint8]:
    """Originals in the first row, every view of the graph below it; returns the picture that was written."""
    originals: list[Image] = []
    indices: list[int] = []
    for index in range(len(source)):
        try:
            originals.append(source.image(index))
        except UnreadableImage:
            continue
        indices.append(index)
        if len(originals) == _COLUMNS:
            break
    views = maker.allocate(len(originals))
    plan = maker.plan(np.array(indices, np.int64), epoch=0)
    for row, image in enumerate(originals):
        maker.apply(plan, row, image, views, row)
    rows = [SheetRow(title="original", note=source.name, images=originals)]
    rows += [SheetRow(title=name, note="", images=list(views[name])) for name in maker.names]
    sheet = contact_sheet(rows, title="The views of this run", cell=96)
    temporary = path.with_suffix(".tmp.png")
    try:
        sheet.save(temporary)
        temporary.replace(path)
    except OSError as error:  # a picture is not worth a run
        logger.warning(f"{path} could not be written ({error.strerror})")
    return np.asarray(sheet.convert("RGB"))
