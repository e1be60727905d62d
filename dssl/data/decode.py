"""From a file to an 8-bit image: JPEG, PNG, WebP, BMP, TIFF and GIF, by what is in the file and not by its name.

The rules for what is not plain 8-bit colour are fixed: 16-bit values keep their high byte; alpha is laid over white; CMYK goes
through Pillow's plain formula; the first frame of an animation counts; EXIF's orientation is applied; floating-point and
32-bit pixels are refused, since nothing says what range they have.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import warnings
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

from dssl.data.jpeg import decode_colour
from dssl.errors import DsslError

if TYPE_CHECKING:
    from dssl.types import Image  # which imports torch, and a look at data does not need it

MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MB in colour; a file that claims more is refused before it is read
MAX_BYTES = 1 << 30  # of a file; some decoders read it whole
MAX_SIDE = 32_767  # what the view kernels can address
_AT_ONCE = 1 << 24  # bytes of a file that is read whole before anybody looks at it
EXTENSIONS = frozenset(["jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "tif", "tiff", "gif"])

# Pillow warns about odd metadata without naming the file; whatever matters is raised, and named, by `decode`
warnings.filterwarnings("ignore", module=r"PIL\.")

_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


class UnreadableImage(DsslError):
    """A file that gives no image: its path, printable, and the reason."""

    def __init__(self, path: str | bytes, reason: str) -> None:
        self.path = printable(path)
        self.reason = printable(reason)
        super().__init__(f"{self.path}: {self.reason}")


def printable(text: str | bytes) -> str:
    """The text without line breaks, terminal escapes or invalid UTF-8: each such character as a Python escape."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def kind_of(mode: int) -> str:
    """What a file that is not a regular one is called."""
    return f"not a regular file but {_KINDS.get(stat.S_IFMT(mode), 'something else')}"


def open_regular(path: str | bytes) -> tuple[io.FileIO, int]:
    """Open a regular file for reading, and say how long it is; anything else is refused without being opened or waited for."""
    mode = os.stat(path).st_mode  # noqa: PTH116 (the path may be bytes)
    if stat.S_ISREG(mode):
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)  # not blocking, in case a FIFO took its place just now
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
    try:
        file, size = open_regular(path)
        with file:
            if size > MAX_BYTES:
                raise ValueError(f"{size:,} bytes are more than the limit of {MAX_BYTES:,}")
            if size > _AT_ONCE:
                return decode(io.BufferedReader(file), channels=channels, shrink=shrink)
            content = bytearray(size)
            del content[file.readinto(content) :]  # of a regular file all that is there comes at once
        if channels == 3:
            image = decode_colour(content, shrink=shrink, check_size=_check_size)
            if image is not None:
                return image
        return decode(io.BytesIO(content), channels=channels, shrink=shrink)
    except (UnreadableImage, MemoryError):
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise DsslError(
                f"{printable(path)}: {error.strerror}: this is the machine's state, not the file's"
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
        turn = _TURNS.get(_orientation(picture))
        plain = _eight_bits(picture, "RGB" if channels == 3 else "L")
        if turn is not None:
            plain = plain.transpose(turn)
        pixels = np.array(plain)  # a copy: writable and contiguous, as kernels expect
    return pixels if channels == 3 else pixels[:, :, None]


def _check_size(width: int, height: int) -> None:
    """Refuses what claims to be too large, before it is read."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{width} x {height} pixels: no side may be longer than {MAX_SIDE:,}")


def _identify(file: IO[bytes]) -> ImageFile.ImageFile:
    """The decoder for these first bytes; without Pillow's open(), whose warning about size cannot be handled per thread."""
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


def _orientation(picture: Pillow.Image) -> int:
    """EXIF's orientation, 1 (upright) where there is none or it cannot be read."""
    try:
        return int(picture.getexif().get(0x0112, 1))
    except Exception:  # metadata never decides whether an image is readable
        return 1


def _eight_bits(picture: Pillow.Image, mode: str) -> Pillow.Image:
    """The picture as RGB or L, 8 bits a channel, by the rules at the top of this file."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and isinstance(picture, PngImagePlugin.PngImageFile)):
        picture = Pillow.fromarray((np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise ValueError("32-bit or floating-point pixels have no fixed range: convert the file to 8 or 16 bits")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    if picture.mode not in ("RGB", "L"):
        picture = picture.convert("RGB")  # through colour, also for gray: Pillow has no direct way from every mode
    return picture if picture.mode == mode else picture.convert(mode)


def _reason(error: Exception) -> str:
    """One short line that says why, also for exceptions without a message."""
    if isinstance(error, struct.error):
        return "damaged header"
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__
