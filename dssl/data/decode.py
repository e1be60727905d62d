"""From a file to an 8-bit image: JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF and HEIC, recognised by content and not by name.

The rules for anything but plain 8-bit colour are fixed: 16-bit values keep their high byte; transparency is laid over white; CMYK
goes through Pillow's plain formula; the first frame of an animation counts; EXIF's orientation is applied; floating-point and
32-bit pixels are an error, because nothing says what range they have. With a range, the values of TIFF, PNG and NPY files are
read as they are stored and scaled by it (`scale.py`).

Colour JPEGs are decoded by torchvision where its pixels are certain to be Pillow's (see `jpeg.py`); everything else is left to
Pillow, and so is whatever torchvision refuses.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import stat
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TypeVar

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL import Image as Pillow

from dssl.data.jpeg import Jpeg, check_size, decode_together, recognise, upright
from dssl.data.scale import PNG, TIFF, Range, read_values, scaled
from dssl.errors import DsslError, one_line
from dssl.files import printable
from dssl.types import Image

T = TypeVar("T")
MAX_BYTES = 1 << 30  # of a file; some decoders read it whole
_AT_ONCE = 1 << 24  # bytes; a larger file is not read whole before it is decoded
GROUP = 1 << 23  # bytes of pixels; images are decoded and made into views together up to here
EXTENSIONS = frozenset(["jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "dib", "tif", "tiff", "gif", "avif",
                        "heic", "heif", "hif"])  # fmt: skip

# Pillow warns about odd metadata without naming the file; whatever matters is raised, and named, by `decode`
warnings.filterwarnings("ignore", module=r"PIL\.")

_BITS, _PHOTOMETRIC, _PLANES = 258, 262, 284  # tags of a TIFF; a photometric interpretation of 0 is WhiteIsZero
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


class UnreadableImage(DsslError):
    """A file that cannot be decoded: its path, printable, and the reason."""

    def __init__(self, path: str | bytes, reason: str) -> None:
        self.path = printable(path)
        self.reason = printable(reason)
        super().__init__(f"{self.path}: {self.reason}")


def kind_of(mode: int) -> str:
    """What to call a file that is not a regular one."""
    return f"not a regular file but {_KINDS.get(stat.S_IFMT(mode), 'something else')}"


def open_regular(path: str | bytes) -> tuple[int, int]:
    """Open a regular file: its descriptor and its size. Anything else is refused without being opened or waited for."""
    mode = os.stat(path).st_mode  # noqa: PTH116 (the path may be bytes)
    if stat.S_ISREG(mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not blocking, in case a FIFO has just taken its place
        status = os.fstat(descriptor)
        mode = status.st_mode
        if stat.S_ISREG(mode):
            return descriptor, status.st_size
        os.close(descriptor)
    raise UnreadableImage(path, kind_of(mode))


def read_image(path: str | bytes, *, channels: int = 3, value_range: Range | None = None) -> Image:
    """Decode one file to height x width x channels; raises UnreadableImage with the path and the reason.

    With a `value_range`, a TIFF, PNG or NPY of just so many channels is read as stored and scaled.
    """
    (image,) = read_images([path], channels=channels, value_range=value_range)
    if isinstance(image, UnreadableImage):
        raise image
    return image


def read_images(
    paths: Iterable[str | bytes], *, channels: int = 3, value_range: Range | None = None
) -> Iterator[Image | UnreadableImage]:
    """Like `read_image` for several files, in order; an unreadable one gives its error instead."""
    read = functools.partial(_read, channels=channels, value_range=value_range)
    return _in_groups((path, functools.partial(read, path)) for path in paths)


def decode_contents(
    named: Iterable[tuple[str | bytes, Callable[[], bytearray]]], *, channels: int = 3, value_range: Range | None = None
) -> Iterator[Image | UnreadableImage]:
    """Like `read_images` for images that are not files of their own: the name of each, and what gives its bytes."""

    def read(content: Callable[[], bytearray]) -> Image | Jpeg:
        return _recognised(content(), channels=channels, value_range=value_range)

    return _in_groups((name, functools.partial(read, content)) for name, content in named)


def _in_groups(images: Iterable[tuple[str | bytes, Callable[[], Image | Jpeg]]]) -> Iterator[Image | UnreadableImage]:
    """JPEGs are decoded in groups, each in one call without the interpreter's lock.

    Python, which runs several times slower with what a decoder leaves in the processor's caches, then needs the lock once per
    group and not several times per image.
    """
    group: list[tuple[str | bytes, Image | Jpeg | UnreadableImage]] = []
    held = 0
    for name, read in images:
        image = _attempt(name, read)
        held += 0 if isinstance(image, UnreadableImage) else image.nbytes
        group.append((name, image))
        if held >= GROUP:
            yield from _finish(group)
            group, held = [], 0
    yield from _finish(group)


def _read(path: str | bytes, *, channels: int, value_range: Range | None) -> Image | Jpeg:
    """A file, decoded by Pillow unless torchvision may do it."""
    descriptor, size = open_regular(path)
    try:
        check_length(size)
        if size > _AT_ONCE and value_range is None:
            with open(descriptor, "rb", closefd=False) as file:
                return decode(file, channels=channels)
        content = bytearray(size)
        del content[os.readv(descriptor, [content]) :]  # one call reads all there is of a regular file
    finally:
        os.close(descriptor)
    return _recognised(content, channels=channels, value_range=value_range)


def _recognised(content: bytearray, *, channels: int, value_range: Range | None) -> Image | Jpeg:
    """The bytes of a whole file, decoded unless torchvision may do it."""
    if value_range is not None:
        return scaled(read_values(content, channels=channels), value_range)
    jpeg = recognise(content) if channels == 3 else None
    return decode(io.BytesIO(content), channels=channels) if jpeg is None else jpeg


def check_length(size: int) -> None:
    """Refuse an image of too many bytes before they are read."""
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes are more than the limit of {MAX_BYTES:,}")


@contextmanager
def naming(path: str | bytes) -> Iterator[None]:
    """Turn whatever goes wrong while an image is read and decoded into an UnreadableImage with its path and the reason."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:
        raise _named(path, error) from error


def _finish(group: list[tuple[str | bytes, Image | Jpeg | UnreadableImage]]) -> Iterator[Image | UnreadableImage]:
    """The group with its JPEGs decoded."""
    decoded = iter(decode_together([image for _, image in group if isinstance(image, Jpeg)]))
    for name, image in group:
        if isinstance(image, Jpeg):
            pixels = next(decoded)
            by_pillow = functools.partial(decode, io.BytesIO(image.content))
            yield _attempt(name, by_pillow) if pixels is None else pixels
        else:
            yield image


def _attempt(name: str | bytes, read: Callable[[], T]) -> T | UnreadableImage:
    try:
        return read()
    except Exception as error:  # decoders raise anything from SyntaxError to struct.error on damaged files
        return _named(name, error)


def _named(path: str | bytes, error: Exception) -> UnreadableImage:
    """What is wrong with this file; raises an error that is not the file's fault."""
    if isinstance(error, UnreadableImage):
        return error
    if isinstance(error, MemoryError | DsslError):
        raise error
    reason = "damaged header" if isinstance(error, struct.error) else one_line(error)
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise DsslError(
                f"{printable(path)}: {error.strerror}: the machine has reached a limit; the file is not at fault"
            ) from error
        reason = error.strerror or reason
    named = UnreadableImage(path, reason)
    named.__cause__ = error
    return named


def decode(file: IO[bytes], *, channels: int = 3) -> Image:
    """Decode an open file; raises whatever the decoder raises."""
    picture = _identify(file)
    with picture:
        check_size(*picture.size)
        return pixels_of(picture, channels=channels)


def pixels_of(picture: Pillow.Image, *, channels: int = 3) -> Image:
    """The pixels of a picture of Pillow, upright, by the rules at the top of this file."""
    picture.load()
    orientation = _orientation(picture)
    pixels = np.array(_eight_bits(picture, "RGB" if channels == 3 else "L"))  # a copy: writable, as torch expects
    return upright(pixels if channels == 3 else pixels[:, :, None], orientation)


def _identify(file: IO[bytes]) -> ImageFile.ImageFile:
    """The decoder for these first bytes; not Pillow's open(), whose warning about size cannot be handled per thread."""
    head = file.read(64)
    file.seek(0)
    for start, decoder, _ in _FORMATS:
        if re.match(start, head, re.DOTALL):
            return decoder(file)
    raise ValueError("the file is empty" if not head else "not a JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC")


def _tiff(file: IO[bytes]) -> TiffImagePlugin.TiffImageFile:
    """A TIFF that Pillow reads as a photograph; the others need to be told what they are."""
    try:
        picture = TiffImagePlugin.TiffImageFile(file)
    except SyntaxError as error:
        raise ValueError(f"not a photograph ({error}): if this TIFF has N channels, use --channels N") from error
    bits, planes = picture.tag_v2.get(_BITS, (1,)), picture.tag_v2.get(_PLANES, 1)
    if planes == 2 and len(bits) > 1 and max(bits) > 8:
        raise ValueError("16 bits in separate planes, which Pillow misreads: use --range, such as --range 0,65535")
    return picture


def _heif(file: IO[bytes]) -> ImageFile.ImageFile:
    """A HEIC, by pillow-heif, which turns it upright; imported when the first such file is met."""
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise ValueError("HEIC needs the extra heif: pip install 'dssl[heif]'") from None
    picture: ImageFile.ImageFile = HeifImageFile(file)
    return picture


_FORMATS: tuple[tuple[bytes, Callable[[IO[bytes]], ImageFile.ImageFile], str], ...] = (
    (rb"\xff\xd8\xff", JpegImagePlugin.JpegImageFile, "jpg"),
    (re.escape(PNG), PngImagePlugin.PngImageFile, "png"),
    (rb"RIFF....WEBP", WebPImagePlugin.WebPImageFile, "webp"),
    (rb"BM", BmpImagePlugin.BmpImageFile, "bmp"),
    (b"|".join(map(re.escape, TIFF)), _tiff, "tif"),
    (rb"GIF8[79]a", GifImagePlugin.GifImageFile, "gif"),
    (rb"....ftyp(avi[fs]|(mif1|msf1).{0,44}avi[fs])", AvifImagePlugin.AvifImageFile, "avif"),
    (rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", _heif, "heic"),
)
"""How a file begins, what decodes it, and the usual extension."""


def ending_of(content: bytes | bytearray) -> str:
    """The usual extension for the bytes of an image; that of NumPy for anything that is no photograph."""
    return next((ending for start, _, ending in _FORMATS if re.match(start, content, re.DOTALL)), "npy")


def _orientation(picture: Pillow.Image) -> int:
    """EXIF's orientation, 1 (upright) where there is none or it cannot be read."""
    try:
        return int(picture.getexif().get(0x0112, 1))
    except Exception:  # metadata never decides whether an image is readable
        return 1


def _eight_bits(picture: Pillow.Image, mode: str) -> Pillow.Image:
    """The picture as RGB or L, 8 bits per channel, by the rules at the top of this file."""
    if picture.mode.startswith("I;16") or (picture.mode == "I" and isinstance(picture, PngImagePlugin.PngImageFile)):
        high = (np.asarray(picture).astype(np.int64) >> 8).astype(np.uint8)
        inverted = isinstance(picture, TiffImagePlugin.TiffImageFile) and picture.tag_v2.get(_PHOTOMETRIC) == 0
        picture = Pillow.fromarray(255 - high if inverted else high)  # Pillow inverts such a TIFF of 8 bits itself
    elif picture.mode in ("I", "F"):
        raise ValueError("32-bit or floating-point pixels have no fixed range: give one, such as --range 0,1")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Pillow.alpha_composite(Pillow.new("RGBA", picture.size, (255, 255, 255, 255)), picture)
    if picture.mode not in ("RGB", "L"):
        picture = picture.convert("RGB")  # gray goes through colour too: Pillow does not convert every mode directly
    return picture if picture.mode == mode else picture.convert(mode)


def resize(
    image: Image,
    size: tuple[int, int],
    kind: Pillow.Resampling,
    *,
    box: tuple[float, float, float, float] | None = None,
) -> Image:
    """The image, or a box of it, at width x height; Pillow treats every channel of a colour image by itself, too."""
    if image.shape[2] == 3:
        return np.array(Pillow.fromarray(image).resize(size, kind, box=box))
    planes = (np.ascontiguousarray(image[:, :, channel]) for channel in range(image.shape[2]))
    return np.stack([np.asarray(Pillow.fromarray(plane).resize(size, kind, box=box)) for plane in planes], axis=2)
