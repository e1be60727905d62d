"""From a file to an 8-bit image: JPEG, PNG, WebP, BMP, TIFF and GIF, recognised by content and not by name.

The rules for anything but plain 8-bit colour are fixed: 16-bit values keep their high byte; transparency is laid over white; CMYK
goes through Pillow's plain formula; the first frame of an animation counts; EXIF's orientation is applied; floating-point and
32-bit pixels are refused, since nothing says what range they have.

Colour JPEGs are decoded by torchvision, without the interpreter's lock, where its pixels are certain to be Pillow's. Both are
libjpeg-turbo, but they differ in what they refuse and how they treat the unusual. So a file is given to torchvision only if its
header is beyond doubt: every segment intact and of a known kind, baseline or progressive, 8 bits, YCbCr at 4:4:4, 4:2:2 or 4:2:0,
and the file ends where a JPEG ends. Everything else is left to Pillow, and so is whatever torchvision refuses.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL import Image as Pillow

from dssl.errors import DsslError
from dssl.files import printable

if TYPE_CHECKING:
    from dssl.types import Image

MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MB in colour; a file that claims more is refused before it is read
MAX_BYTES = 1 << 30  # of a file; some decoders read it whole
MAX_SIDE = 32_767  # what the view kernels can address
_AT_ONCE = 1 << 24  # bytes; a larger file is not read whole before it is decoded
EXTENSIONS = frozenset(["jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "tif", "tiff", "gif"])

# Pillow warns about odd metadata without naming the file; whatever matters is raised, and named, by `decode`
warnings.filterwarnings("ignore", module=r"PIL\.")

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
# from stored to upright by EXIF's orientation: the direction of the rows and of the columns, after a transposition from 5 on
_TURNS = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}

# segments of a JPEG
_QUANTISATION, _HUFFMAN, _RESTART, _SCAN, _COMMENT = 0xDB, 0xC4, 0xDD, 0xDA, 0xFE
_FRAMES = (0xC0, 0xC2)  # baseline and progressive
_SAMPLINGS = (b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11")
_ORIENTATION, _RESOLUTION, _UNIT = 0x0112, 0x011A, 0x0128
_SHORT, _RATIONAL = 3, 5
_COLOUR = 3  # torchvision's ImageReadMode.RGB
_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8)  # bytes of a value by its TIFF type


class UnreadableImage(DsslError):
    """A file that cannot be decoded: its path, printable, and the reason."""

    def __init__(self, path: str | bytes, reason: str) -> None:
        self.path = printable(path)
        self.reason = printable(reason)
        super().__init__(f"{self.path}: {self.reason}")


def kind_of(mode: int) -> str:
    """What to call a file that is not a regular one."""
    return f"not a regular file but {_KINDS.get(stat.S_IFMT(mode), 'something else')}"


def open_regular(path: str | bytes) -> tuple[io.FileIO, int]:
    """Open a regular file and return its size too; anything else is refused without being opened or waited for."""
    mode = os.stat(path).st_mode  # noqa: PTH116 (the path may be bytes)
    if stat.S_ISREG(mode):
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)  # not blocking, in case a FIFO has just taken its place
        status = os.fstat(descriptor)
        mode = status.st_mode
        if stat.S_ISREG(mode):
            return io.FileIO(descriptor, "rb"), status.st_size
        os.close(descriptor)
    raise UnreadableImage(path, kind_of(mode))


def read_image(path: str | bytes, *, channels: int = 3, shrink: int | None = None) -> Image:
    """Decode one file to height x width x channels; raises UnreadableImage with the path and the reason.

    With `shrink`, a JPEG is decoded at 1/2, 1/4 or 1/8 of its size where its shorter side stays at least that long: several
    times faster on large photos, with slightly different pixels.
    """
    with naming(path):
        file, size = open_regular(path)
        with file:
            check_length(size)
            if size > _AT_ONCE:
                return decode(io.BufferedReader(file), channels=channels, shrink=shrink)
            content = bytearray(size)
            del content[file.readinto(content) :]  # one call reads all there is of a regular file
        return decode_content(content, channels=channels, shrink=shrink)


def check_length(size: int) -> None:
    """Refuse an image of too many bytes before they are read."""
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes are more than the limit of {MAX_BYTES:,}")


def decode_content(content: bytearray, *, channels: int = 3, shrink: int | None = None) -> Image:
    """Decode the bytes of a whole file; raises whatever the decoder raises."""
    if channels == 3:
        image = decode_colour(content, shrink=shrink)
        if image is not None:
            return image
    return decode(io.BytesIO(content), channels=channels, shrink=shrink)


@contextmanager
def naming(path: str | bytes) -> Iterator[None]:
    """Turn whatever goes wrong while an image is read and decoded into an UnreadableImage with its path and the reason."""
    try:
        yield
    except (UnreadableImage, MemoryError):
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise DsslError(
                f"{printable(path)}: {error.strerror}: the machine is at a limit, the file is not at fault"
            ) from error
        raise UnreadableImage(path, error.strerror or _reason(error)) from error
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error on damaged files
        raise UnreadableImage(path, _reason(error)) from error


def decode(file: IO[bytes], *, channels: int = 3, shrink: int | None = None) -> Image:
    """Decode an open file; raises whatever the decoder raises."""
    picture = _identify(file)
    with picture:
        _check_size(*picture.size)
        if shrink is not None and isinstance(picture, JpegImagePlugin.JpegImageFile):
            picture.draft(None, (shrink, shrink))  # None: keep the mode
        picture.load()
        orientation = _orientation(picture)
        pixels = np.array(_eight_bits(picture, "RGB" if channels == 3 else "L"))  # a copy: writable, as kernels expect
    return _upright(pixels if channels == 3 else pixels[:, :, None], orientation)


def _check_size(width: int, height: int) -> None:
    """Refuse an image that claims to be too large, before it is read."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels: no side may be longer than {MAX_SIDE:,}")


def _identify(file: IO[bytes]) -> ImageFile.ImageFile:
    """The decoder for these first bytes; not Pillow's open(), whose warning about size cannot be handled per thread."""
    head = file.read(16)
    file.seek(0)
    if head[:3] == b"\xff\xd8\xff":
        return JpegImagePlugin.JpegImageFile(file)
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return PngImagePlugin.PngImageFile(file)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    if head[:2] == b"BM":
        return BmpImagePlugin.BmpImageFile(file)
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return TiffImagePlugin.TiffImageFile(file)
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return GifImagePlugin.GifImageFile(file)
    raise ValueError("the file is empty" if not head else "not a JPEG, PNG, WebP, BMP, TIFF or GIF")


def ending_of(content: bytes) -> str:
    """The usual extension for these bytes; raises ValueError where they are not an image."""
    kind = str(_identify(io.BytesIO(content)).format)
    return {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())


def _orientation(picture: Pillow.Image) -> int:
    """EXIF's orientation, 1 (upright) where there is none or it cannot be read."""
    try:
        return int(picture.getexif().get(0x0112, 1))
    except Exception:  # metadata never decides whether an image is readable
        return 1


def _eight_bits(picture: Pillow.Image, mode: str) -> Pillow.Image:
    """The picture as RGB or L, 8 bits per channel, by the rules at the top of this file."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and isinstance(picture, PngImagePlugin.PngImageFile)):
        picture = Pillow.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError("32-bit or floating-point pixels have no fixed range: convert the file to 8 or 16 bits")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    if picture.mode not in ("RGB", "L"):
        picture = picture.convert("RGB")  # gray goes through colour too: Pillow does not convert every mode directly
    return picture if picture.mode == mode else picture.convert(mode)


def _reason(error: Exception) -> str:
    """The reason in one short line, also for an exception without a message."""
    if isinstance(error, struct.error):
        return "damaged header"
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


class Doubt(Exception):
    """A file that only Pillow should decode."""


def decode_colour(content: bytearray, *, shrink: int | None) -> Image | None:
    """The image in a whole file, upright; None where Pillow has to decide. Raises ValueError for one that is too large."""
    if content[:3] != b"\xff\xd8\xff":
        return None
    decoder = _decoder() if "torch" in sys.modules else None  # a look at data does not import torch
    if decoder is None:
        return None
    try:
        width, height, orientation = read_header(content)
    except (Doubt, struct.error, IndexError):
        return None
    _check_size(width, height)
    if shrink is not None and min(width, height) >= 2 * shrink:
        return None  # Pillow decodes at a fraction of the size
    try:
        pixels = decoder(content)
    except RuntimeError:
        return None
    return _upright(pixels, orientation) if pixels.shape == (height, width, 3) else None


@functools.cache
def _decoder() -> Callable[[bytearray], Image] | None:
    """torchvision's decoder, from the bytes of a file to height x width x 3; None where this build has none.

    The operator and not ``torchvision.io.decode_jpeg``, which warns at every call that it will move to another package.
    """
    try:
        import torch
        import torchvision.io  # noqa: F401 (registers the operator)

        operator, frombuffer, byte = torch.ops.image.decode_jpeg.default, torch.frombuffer, torch.uint8
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None

    def decode(content: bytearray) -> Image:
        planes: Image = operator(frombuffer(content, dtype=byte), _COLOUR, False).numpy()
        return planes.transpose(1, 2, 0)  # how the decoder laid it out in memory

    return decode


def _upright(pixels: Image, orientation: int) -> Image:
    """The pixels turned and mirrored as EXIF says, contiguous."""
    if orientation not in _TURNS:
        return pixels
    down, across = _TURNS[orientation]
    return np.ascontiguousarray((pixels.transpose(1, 0, 2) if orientation >= 5 else pixels)[::down, ::across])


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
            found, hides = _read_application(kind, content[begin:end])
            if found is not None and orientation is not None:
                raise Doubt  # Pillow joins them
            orientation, hidden = orientation or found, hidden or hides
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
        return _read_exif(segment[6:]), False
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


def _read_exif(data: bytes | bytearray) -> int:
    """The orientation in a block of EXIF data, 0 where it has none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]))
    if order is None:
        raise Doubt
    (place,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, place)
    orientation = 0
    for tag, kind, values, where in struct.iter_unpack(f"{order}HHII", data[place + 2 : place + 2 + 12 * count]):
        if not 1 <= kind < len(_SIZES) or (_SIZES[kind] * values > 4 and where + _SIZES[kind] * values > len(data)):
            raise Doubt
        if tag in (_ORIENTATION, _UNIT) and (kind, values) != (_SHORT, 1):
            raise Doubt
        if tag == _RESOLUTION and (kind, values) != (_RATIONAL, 1):
            raise Doubt
        if tag == _ORIENTATION:
            if orientation:
                raise Doubt
            orientation = (where if order == "<" else where >> 16) & 0xFFFF
    if len(data) < place + 2 + 12 * count:
        raise Doubt
    return orientation
