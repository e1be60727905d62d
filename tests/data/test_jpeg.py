"""The decoder without the lock against Pillow: the same pixels, or none at all."""

import io
import struct
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torchvision
from PIL import Image, ImageOps

from dssl.data import decode, jpeg
from dssl.data.decode import UnreadableImage, read_image, read_images
from dssl.errors import DsslError

GENERATOR = np.random.default_rng(5)


def photo(height: int, width: int) -> Image.Image:
    """Smooth colours with some noise, as a camera sees them."""
    coarse = GENERATOR.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(smooth + GENERATOR.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8))


def saved(picture: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112], exif[0x011A], exif[0x0128] = "a camera", orientation, 72.0, 2
    return exif


def fast(content: bytes) -> np.ndarray | None:
    found = jpeg.recognise(bytearray(content))
    return None if found is None else jpeg.decode_together([found])[0]


def by_pillow(content: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def segment(kind: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(data) + 2) + data


def with_segment(content: bytes, kind: int, data: bytes) -> bytes:
    return content[:2] + segment(kind, data) + content[2:]


PLAIN = saved(photo(40, 56))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])  # 4:4:4, 4:2:2, 4:2:0
def test_pixels_are_pillows(subsampling, progressive):
    for height, width, quality in ((16, 16, 75), (61, 97, 90), (97, 61, 40), (200, 133, 96)):
        content = saved(photo(height, width), subsampling=subsampling, progressive=progressive, quality=quality)
        image = fast(content)
        assert np.array_equal(image, by_pillow(content))
        assert image.flags.c_contiguous


@pytest.mark.parametrize("orientation", range(10))
def test_a_turned_photo_is_upright(orientation):
    content = saved(photo(40, 56), exif=turned(orientation))
    assert np.array_equal(fast(content), by_pillow(content))
    big_endian = b"Exif\0\0MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    content = with_segment(PLAIN, 0xE1, big_endian)
    assert np.array_equal(fast(content), by_pillow(content))


def test_what_cameras_and_programs_add_is_no_obstacle():
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta/>"
    photoshop = b"Photoshop 3.0\x008BIM\x04\x04\0\0" + struct.pack(">I", 3) + b"abc\0"
    for content in (
        saved(photo(40, 56), icc_profile=bytes(300), comment=b"hello", optimize=True, restart_marker_rows=1),
        with_segment(PLAIN, 0xE1, xmp),
        with_segment(PLAIN, 0xED, photoshop),
        with_segment(PLAIN, 0xEE, b"Adobe\0\x64\0\0\0\0\x01"),
    ):
        assert np.array_equal(fast(content), by_pillow(content))


UNUSUAL = {
    "gray": saved(photo(40, 56).convert("L")),
    "CMYK": saved(photo(40, 56).convert("CMYK")),
    "RGB as it is": saved(photo(40, 56), keep_rgb=True),
    "without an end": PLAIN[:-2],
    "cut in its pixels": PLAIN[:-200],
    "cut in its header": PLAIN[:100],
    "more after its end": PLAIN + b"motion",
    "orientation in XMP": with_segment(
        PLAIN, 0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    ),
    "EXIF twice": with_segment(saved(photo(40, 56), exif=turned(6)), 0xE1, turned(3).tobytes()),
    "EXIF of text": with_segment(PLAIN, 0xE1, b"Exif\0\0what is this"),
    "EXIF of bytes": with_segment(
        PLAIN, 0xE1, b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 1, 1, 6, 0, 0)
    ),
    "EXIF past its end": with_segment(
        PLAIN, 0xE1, b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 9, 0x0112, 3, 1, 6, 0, 0)
    ),
    "a short JFIF": with_segment(PLAIN, 0xE0, b"JFIF\0"),
    "a short ICC": with_segment(PLAIN, 0xE2, b"ICC_PROFILE\0"),
    "a short Photoshop": with_segment(PLAIN, 0xED, b"Photoshop 3.0\x008BIM\x04\x04"),
    "an arithmetic code": PLAIN.replace(b"\xff\xc0\0\x11", b"\xff\xc9\0\x11"),
    "padding": PLAIN[:2] + b"\xff" + PLAIN[2:],
    "twelve bits": PLAIN.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "4:1:1": PLAIN.replace(b"\x01\x22\0\x02", b"\x01\x41\0\x02"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNUSUAL)
def test_the_unusual_is_left_to_pillow(kind, tmp_path, monkeypatch):
    content = UNUSUAL[kind]
    assert content != PLAIN
    if kind != "EXIF past its end":  # Pillow reads the first entry until version 12
        assert fast(content) is None
    (tmp_path / "a.jpg").write_bytes(content)
    outcomes = []
    for available in (True, False):
        if not available:
            monkeypatch.setattr(jpeg, "_decoder", lambda: None)
        try:
            outcomes.append(read_image(str(tmp_path / "a.jpg")).tobytes())
        except UnreadableImage as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_without_torchvisions_decoder_pillow_decodes(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(PLAIN)
    expected = read_image(str(tmp_path / "a.jpg"))
    used = []
    monkeypatch.setattr(decode, "decode", lambda file, **options: used.append(options) or expected)
    assert read_image(str(tmp_path / "a.jpg")) is not expected
    assert used == []
    for missing in (lambda: None, lambda: refuse):
        monkeypatch.setattr(jpeg, "_decoder", missing)
        assert read_image(str(tmp_path / "a.jpg")) is expected
    monkeypatch.undo()
    assert read_image(str(tmp_path / "a.jpg"), channels=1).shape == (40, 56, 1)


def refuse(files: list[bytearray]) -> None:
    raise RuntimeError("damaged")


def outcome(image: np.ndarray | UnreadableImage) -> bytes | str:
    return str(image) if isinstance(image, UnreadableImage) else image.tobytes()


def test_files_read_together_are_those_read_alone(tmp_path, monkeypatch):
    """Whatever is among them; and no more are decoded together than fit the limit."""
    contents = [saved(photo(40 + number, 56), exif=turned(1 + number % 8)) for number in range(12)]
    contents[3] = UNUSUAL["4:1:1"]
    contents[5] = (
        contents[5][: contents[5].index(b"\xff\xda") + 40] + b"\xff\xd9"
    )  # the header is intact, the rest is not
    contents[6] = b""
    contents[9] = saved(photo(40, 56).convert("L"))
    paths = [str(tmp_path / f"{number}.jpg") for number in range(13)]  # the last one is missing
    for path, content in zip(paths, contents, strict=False):
        Path(path).write_bytes(content)
    alone = []
    for path in paths:
        try:
            alone.append(outcome(read_image(path)))
        except UnreadableImage as error:
            alone.append(str(error))
    assert [isinstance(one, str) for one in alone].count(True) >= 2
    sizes, decoder = [], jpeg._decoder()
    monkeypatch.setattr(jpeg, "_decoder", lambda: lambda files: sizes.append(len(files)) or decoder(files))
    for limit, most in ((1 << 23, 9), (20_000, 3), (1, 1)):
        sizes.clear()
        monkeypatch.setattr(decode, "GROUP", limit)
        assert [outcome(image) for image in read_images(paths)] == alone
        assert max(sizes) == most


def test_one_refused_file_does_not_keep_the_others_from_torchvision(monkeypatch):
    decoder = jpeg._decoder()
    jpegs = [jpeg.recognise(bytearray(saved(photo(24, 32 + number)))) for number in range(3)]

    def picky(files: list[bytearray]) -> list[np.ndarray]:
        return refuse(files) if jpegs[1].content in files else decoder(files)

    monkeypatch.setattr(jpeg, "_decoder", lambda: picky)
    images = jpeg.decode_together(jpegs)
    assert images[1] is None
    assert [image.shape for image in (images[0], images[2])] == [(24, 32, 3), (24, 34, 3)]


def test_an_error_that_is_not_the_files_fault_is_raised(tmp_path, monkeypatch):
    (tmp_path / "a.jpg").write_bytes(PLAIN)
    for error, expected in ((OSError(24, "Too many open files"), DsslError), (MemoryError(), MemoryError)):

        def fail(path: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(decode, "open_regular", fail)
        with pytest.raises(expected) as caught:
            list(read_images([str(tmp_path / "a.jpg")]))
        assert not isinstance(caught.value, UnreadableImage)


def test_a_size_beyond_the_limits_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    place = PLAIN.index(b"\xff\xc0") + 5
    for height, width, reason in ((20_000, 20_000, "20000 x 20000"), (2, 40_000, "40000 x 2")):
        content = PLAIN[:place] + struct.pack(">HH", height, width) + PLAIN[place + 4 :]
        (tmp_path / "large.jpg").write_bytes(content)
        monkeypatch.setattr(jpeg, "_decoder", lambda: pytest.fail)
        with pytest.raises(UnreadableImage, match=reason) as caught:
            read_image(str(tmp_path / "large.jpg"))
        with pytest.raises(ValueError, match=reason) as by_pillow:
            decode.decode(io.BytesIO(content))
        assert caught.value.reason == str(by_pillow.value)


@pytest.mark.parametrize("where", ["header", "pixels", "end"])
def test_damaged_files_give_pillows_pixels_or_are_left_to_it(where, capfd):  # libjpeg itself writes about damage
    originals = [
        saved(photo(40, 56), subsampling=subsampling, progressive=progressive, exif=turned(6))
        for subsampling in (0, 1, 2)
        for progressive in (False, True)
    ]
    if where != "header" and torchvision.__version__.startswith("0.24."):
        pytest.skip("the libjpeg of torchvision 0.24 fills in damaged pixels in another way than Pillow's")
    generator = np.random.default_rng(13)
    same = left = 0
    for number in range(240):
        content = bytearray(originals[number % 6])
        start = content.index(b"\xff\xda")
        begin, end = (2, start) if where == "header" else (start, len(content) - 2)
        if where == "end":
            content[generator.integers(start + 12, end) :] = b"\xff\xd9"
        else:
            for _ in range(generator.integers(1, 4)):
                content[generator.integers(begin, end)] = generator.integers(256)
        try:
            image = fast(content)
        except ValueError as error:
            assert "pixels" in str(error)  # noqa: PT017
            continue
        if image is None:
            left += 1
            continue
        assert np.array_equal(image, decode.decode(io.BytesIO(content)))
        same += 1
    assert same > 50
    assert left > 20 or where == "end"


def test_it_decodes_without_the_lock():
    content, decoder = [bytearray(saved(photo(600, 800)))], jpeg._decoder()
    turns, over = [], threading.Event()

    def other() -> None:
        while not over.is_set():
            turns.append(1)
            time.sleep(0)  # gives the lock back

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        sys.setswitchinterval(1000)  # from here on another thread runs only where this one releases the lock
        before = len(turns)
        sum(range(3_000_000))
        assert len(turns) <= before + 1
        for _ in range(1000):
            decoder(content)
            if len(turns) > before + 1:
                break
        assert len(turns) > before + 1
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
