"""The header of a JPEG that two decoders are certain to read the same way.

Every segment is intact and of a known kind; baseline or progressive, 8 bits, YCbCr at 4:4:4, 4:2:2 or 4:2:0; and the file ends
where a JPEG ends. Anything else is in doubt.
"""

import struct

# segments of a JPEG
_QUANTISATION, _HUFFMAN, _RESTART, _SCAN, _COMMENT = 0xDB, 0xC4, 0xDD, 0xDA, 0xFE
_FRAMES = (0xC0, 0xC2)  # baseline and progressive
_SAMPLINGS = (b"\x11\x11\x11", b"\x21\x11\x11", b"\x22\x11\x11")
_ORIENTATION, _RESOLUTION, _UNIT = 0x0112, 0x011A, 0x0128
_SHORT, _RATIONAL = 3, 5
_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8)  # bytes of a value by its TIFF type


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
