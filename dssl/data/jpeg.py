"""Colour JPEGs decoded by torchvision, in groups and without the interpreter's lock, where its pixels are certain to be Pillow's.

Both are libjpeg-turbo, but they differ in what they refuse and how they treat the unusual. So a file is given to torchvision
only if its header is beyond doubt: every segment is intact and of a known kind; baseline or progressive, 8 bits, YCbCr at 4:4:4,
4:2:2 or 4:2:0; and the file ends where a JPEG ends.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image as Pillow

from dssl.types import Image

MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MB in colour; a file that claims more is refused before it is read
MAX_SIDE = 32_767  # what the view kernels can address
# from stored to upright by EXIF's orientation: the direction of the rows and of the columns, after a transposition from 5 on
_TURNS = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}

# segments of a JPEG
_QUANTISATION, _HUFFMAN, _RESTART, _SCAN, _COMMENT = 0xDB, 0xC4, 0xDD, 0xDA, 0xFE
_FRAMES = (0xC0, 0xC2)  # baseline and progressive
_SAMPLINGS = (b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11")
_ORIENTATION = 0x0112  # of EXIF


class Doubt(Exception):
    """A file that only Pillow should decode."""


def read_header(content: bytes | bytearray) -> tuple[int, int, int]:
    """Width, height and EXIF orientation of a JPEG; raises Doubt, struct.error or IndexError for an unusual one."""
    if content[-2:] != b"\xff\xd9":
        raise Doubt
    place, size, orientation, hidden = 2, None, None, False
    while True:
        mark, kind, length = struct.unpack_from(">BBH", content, place)
        begin, end = place + 4, place + 2 + length
        if mark != 0xFF or length < 2 or end > len(content):
            raise Doubt
        if kind == _SCAN:
            break
        if 0xE0 <= kind <= 0xEF:
            another, hides = _read_application(kind, content[begin:end])
            if another is not None and orientation is not None:
                raise Doubt  # Pillow joins them
            orientation, hidden = orientation or another, hidden or hides
        elif kind in _FRAMES:
            bits, height, width, layers = struct.unpack_from(">BHHB", content, begin)
            layer = bytes(content[begin + 6 : end])
            if (bits, layers, len(layer)) != (8, 3, 9) or size is not None or not width or not height:
                raise Doubt
            if layer[0::3] != b"\x01\x02\x03" or layer[1::3] not in _SAMPLINGS:
                raise Doubt
            size = width, height
        elif kind == _QUANTISATION:
            if (length - 2) % 65 or any(content[at] > 3 for at in range(begin, end, 65)):
                raise Doubt
        elif kind not in (_HUFFMAN, _RESTART, _COMMENT):
            raise Doubt
        place = end
    if size is None or (hidden and not orientation):
        raise Doubt
    return *size, orientation or 1


def _read_application(kind: int, segment: bytes | bytearray) -> tuple[int | None, bool]:
    """The orientation in an application segment (0: EXIF without one), and whether another may be hidden in it."""
    if kind == 0xE0 and segment[:4] == b"JFIF" and len(segment) < 12:
        raise Doubt
    if kind == 0xE1 and segment[:6] == b"Exif\0\0":
        return _read_exif(segment), False
    if kind == 0xE1:
        return None, b"tiff:Orientation" in segment
    if kind == 0xE2 and segment[:12] == b"ICC_PROFILE\0" and len(segment) < 14:
        raise Doubt
    if kind == 0xED and segment[:14] == b"Photoshop 3.0\0":
        _check_photoshop(segment)
    if kind == 0xEE and segment[:5] == b"Adobe" and (len(segment) < 12 or segment[11] != 1):
        raise Doubt  # RGB that was never converted to YCbCr, or something else
    return None, False


def _check_photoshop(segment: bytes | bytearray) -> None:
    place = 14
    while segment[place : place + 4] == b"8BIM":
        place += 7 + segment[place + 6]
        place += place & 1
        place += 4 + struct.unpack_from(">I", segment, place)[0]
        place += place & 1


def _read_exif(segment: bytes | bytearray) -> int:
    """The orientation in a segment of EXIF data, as Pillow reads it, 0 where it has none."""
    exif = Pillow.Exif()
    try:
        exif.load(bytes(segment))
        return int(exif.get(_ORIENTATION, 0))
    except Exception as error:  # Pillow raises whatever it stumbles over
        raise Doubt from error


class Jpeg(NamedTuple):
    """A file that torchvision may decode, and what its header says."""

    content: bytearray
    width: int
    height: int
    orientation: int

    @property
    def nbytes(self) -> int:
        """Of the file or of its pixels, whichever are more."""
        return max(len(self.content), self.height * self.width * 3)


def recognise(content: bytearray) -> Jpeg | None:
    """The JPEG in a whole file; None where Pillow has to decide. Raises ValueError for one that is too large."""
    if content[:3] != b"\xff\xd8\xff" or "torch" not in sys.modules or _decoder() is None:
        return None  # a look at data does not import torch
    try:
        width, height, orientation = read_header(content)
    except (Doubt, struct.error, IndexError):
        return None
    check_size(width, height)
    return Jpeg(content, width, height, orientation)


def decode_together(jpegs: list[Jpeg]) -> list[Image | None]:
    """The images, upright; None where Pillow has to decide."""
    decoder = _decoder() if jpegs else None
    if decoder is None:
        return [None] * len(jpegs)
    try:
        images = decoder([jpeg.content for jpeg in jpegs])
    except RuntimeError:  # it does not say which of them it refuses
        return [None] if len(jpegs) == 1 else [image for jpeg in jpegs for image in decode_together([jpeg])]
    return [
        upright(pixels, jpeg.orientation) if pixels.shape == (jpeg.height, jpeg.width, 3) else None
        for pixels, jpeg in zip(images, jpegs, strict=True)
    ]


@functools.cache
def _decoder() -> Callable[[list[bytearray]], list[Image]] | None:
    """torchvision's decoder, from the bytes of files to height x width x 3 each; None where this build has none.

    The operator and not ``torchvision.io.decode_jpeg``, which warns at every call that it will move to another package. An
    operator runs without the interpreter's lock.
    """
    try:
        import torch
        import torchvision.io  # noqa: F401 (registers the operator)

        operator, frombuffer, byte = torch.ops.image.decode_jpeg.default, torch.frombuffer, torch.uint8
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None

    def decode(files: list[bytearray]) -> list[Image]:
        return [operator(frombuffer(file, dtype=byte), 3, False).permute(1, 2, 0).numpy() for file in files]

    return decode


def check_size(width: int, height: int) -> None:
    """Refuse an image that claims to be too large, before it is read."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels: no side may be longer than {MAX_SIDE:,}")


def upright(pixels: Image, orientation: int) -> Image:
    """The pixels turned and mirrored as EXIF says, contiguous."""
    if orientation not in _TURNS:
        return pixels
    down, across = _TURNS[orientation]
    return np.ascontiguousarray((pixels.transpose(1, 0, 2) if orientation >= 5 else pixels)[::down, ::across])
