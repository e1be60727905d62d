"""Decoding against Pillow: every format and mode, EXIF, and a thousand damaged files."""

import io
import os
import resource
import socket
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image, ImageOps

from dssl.data.decode import UnreadableImage, read_image
from dssl.data.jpeg import MAX_SIDE
from dssl.data.scale import Range
from dssl.files import printable

GENERATOR = np.random.default_rng(3)
COLOUR = GENERATOR.integers(0, 256, (20, 30, 3), np.uint8)


def read(tmp_path, content: bytes, name="a.jpg", **options):
    path = tmp_path / name
    path.write_bytes(content)
    return read_image(str(path), **options)


def saved(picture: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


LOSSLESS = {"PNG": {}, "BMP": {}, "TIFF": {}, "WEBP": {"lossless": True}}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_give_their_pixels_under_any_name(tmp_path, kind):
    image = read(tmp_path, saved(Image.fromarray(COLOUR), kind, **LOSSLESS[kind]), name="wrong.gif")
    assert np.array_equal(image, COLOUR)
    assert image.flags.writeable
    assert image.flags.c_contiguous


def test_jpeg_is_what_pillow_decodes(tmp_path):
    content = saved(Image.fromarray(COLOUR), "JPEG")
    assert np.array_equal(read(tmp_path, content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(tmp_path, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(Image.fromarray(COLOUR), kind, exif=exif, **options)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    assert np.array_equal(read(tmp_path, content), np.asarray(expected))


def test_gray_and_one_channel(tmp_path):
    content = saved(Image.fromarray(COLOUR[:, :, 0]), "PNG")
    assert np.array_equal(read(tmp_path, content), np.repeat(COLOUR[:, :, :1], 3, axis=2))
    assert np.array_equal(read(tmp_path, content, channels=1), COLOUR[:, :, :1])
    one_bit = saved(Image.fromarray(COLOUR[:, :, 0] > 99), "PNG")
    assert np.array_equal(read(tmp_path, one_bit)[:, :, 1], (COLOUR[:, :, 0] > 99) * np.uint8(255))
    colour = read(tmp_path, saved(Image.fromarray(COLOUR), "PNG"), channels=1)
    assert np.array_equal(colour[:, :, 0], np.asarray(Image.fromarray(COLOUR).convert("L")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_keep_the_high_byte(tmp_path, kind):
    values = GENERATOR.integers(0, 65536, (9, 11)).astype(np.uint16)
    values[0, :2] = 0, 65535
    image = read(tmp_path, saved(Image.fromarray(values), kind))
    assert np.array_equal(image, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_white_is_zero_where_a_tiff_says_so(tmp_path, kind):
    tifffile = pytest.importorskip("tifffile")
    values = GENERATOR.integers(0, np.iinfo(kind).max + 1, (9, 11)).astype(kind)
    high = (values >> 8 * (np.dtype(kind).itemsize - 1)).astype(np.uint8)[:, :, None]
    for photometric, expected in (("minisblack", high), ("miniswhite", 255 - high)):
        tifffile.imwrite(tmp_path / "x.tif", values, photometric=photometric)
        assert np.array_equal(read_image(str(tmp_path / "x.tif"), channels=1), expected)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_without_a_range_are_refused(tmp_path, kind):
    with pytest.raises(UnreadableImage, match="--range 0,1"):
        read(tmp_path, saved(Image.fromarray(np.ones((4, 4), kind)), "TIFF"))


def test_alpha_is_laid_over_white(tmp_path):
    alpha = GENERATOR.integers(0, 256, (20, 30, 1), np.uint8)
    alpha[0], alpha[1] = 0, 255
    image = read(tmp_path, saved(Image.fromarray(np.concatenate([COLOUR, alpha], 2)), "PNG")).astype(float)
    share = alpha / 255
    assert np.abs(image - (COLOUR * share + 255 * (1 - share))).max() <= 1
    assert (image[0] == 255).all()
    assert np.array_equal(image[1], COLOUR[1])


def test_palettes_with_and_without_transparency(tmp_path):
    picture = Image.fromarray(COLOUR).quantize(16)
    assert np.array_equal(read(tmp_path, saved(picture, "PNG")), np.asarray(picture.convert("RGB")))
    clear = read(tmp_path, saved(picture, "PNG", transparency=3))
    index = np.asarray(picture)
    assert (clear[index == 3] == 255).all()
    assert np.array_equal(clear[index != 3], np.asarray(picture.convert("RGB"))[index != 3])


def test_cmyk(tmp_path):
    content = saved(Image.fromarray(COLOUR).convert("CMYK"), "JPEG")
    assert np.array_equal(read(tmp_path, content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [3, 5])
def test_a_tiff_is_read_right_or_refused_with_the_option_that_reads_it(tmp_path, planes, kind, channels):
    """Pillow misreads colour of 16 bits in planes, and says "string index out of range" of many channels."""
    tifffile = pytest.importorskip("tifffile")
    pixels = np.random.default_rng(0).integers(0, np.iinfo(kind).max, (12, 9, channels), kind, endpoint=True)
    order = (2, 0, 1) if planes == "separate" else (0, 1, 2)
    colour = "rgb" if channels == 3 else "minisblack"
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, pixels.transpose(order), photometric=colour, planarconfig=planes)
    if channels != 3:
        with pytest.raises(UnreadableImage, match="--channels N"):
            read_image(str(path))
    elif planes == "separate" and kind == np.uint16:
        with pytest.raises(UnreadableImage, match="--range 0,65535"):
            read_image(str(path))
    else:
        assert np.array_equal(read_image(str(path)), pixels if kind == np.uint8 else pixels >> 8)
    top = int(np.iinfo(kind).max)
    found = read_image(str(path), channels=channels, value_range=Range(((0, top),)))
    assert np.array_equal(found, np.floor(pixels * (255 / top) + 0.5))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation(tmp_path, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (read(tmp_path, content) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"<html>", "not a JPEG"),
        (saved(Image.fromarray(COLOUR), "JPEG")[:300], "truncated|broken|tile|file"),
        (saved(Image.fromarray(COLOUR), "PNG")[:200], "truncated|broken|file"),
    ],
)
def test_bad_files_are_named_with_a_reason(tmp_path, content, reason):
    with pytest.raises(UnreadableImage, match=reason) as caught:
        read(tmp_path, content, name="bad.jpg")
    assert caught.value.path == str(tmp_path / "bad.jpg")


def test_extreme_sizes(tmp_path):
    assert read(tmp_path, saved(Image.new("RGB", (1, 1)), "PNG")).shape == (1, 1, 3)
    assert read(tmp_path, saved(Image.new("RGB", (1, 30000)), "PNG")).shape == (30000, 1, 3)
    with pytest.raises(UnreadableImage, match=f"{MAX_SIDE + 1} x 1"):
        read(tmp_path, saved(Image.new("L", (MAX_SIDE + 1, 1)), "PNG"))


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # the name of a socket must be short
        listener.bind("socket.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "folder.jpg").mkdir()
    expected = {
        "pipe.jpg": "FIFO", "socket.jpg": "socket", "loop.jpg": "symbolic links", "zero.jpg": "device", "folder.jpg": "folder",
        "none.jpg": "No such file",
    }  # fmt: skip
    for name, reason in expected.items():
        with pytest.raises(UnreadableImage) as caught:
            read_image(str(tmp_path / name))
        assert reason in caught.value.reason


def test_a_decompression_bomb_is_refused_without_its_memory(tmp_path):
    bomb = tmp_path / "bomb.png"
    Image.new("1", (30000, 30000)).save(bomb, compress_level=1)
    wide = tmp_path / "wide.webp"
    animated = bytearray(
        saved(Image.new("RGB", (8, 8)), "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), 9)])
    )
    assert animated[12:16] == b"VP8X"
    animated[24:30] = (16382).to_bytes(3, "little") * 2  # the canvas, less one
    wide.write_bytes(animated)
    code = (
        "import resource, sys; from dssl.data.decode import read_image, UnreadableImage\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    try: read_image(path)\n"
        "    except UnreadableImage as error: print(error.reason)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, bomb, wide], capture_output=True, text=True, check=True
    )
    *reasons, kilobytes = done.stdout.splitlines()
    assert len(reasons) == 2
    assert all("limit" in reason for reason in reasons)
    assert int(kilobytes) < 100_000
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_thousand_damaged_files_give_an_image_or_a_name(tmp_path):
    picture = Image.fromarray(COLOUR)
    originals = [
        saved(picture, "JPEG"), saved(picture, "PNG"), saved(picture, "WEBP"), saved(picture, "BMP"), saved(picture, "TIFF"),
        saved(picture, "TIFF", compression="tiff_lzw"), saved(picture.quantize(8), "GIF"), saved(picture.convert("CMYK"), "JPEG"),
    ]  # fmt: skip
    generator = np.random.default_rng(11)
    path = tmp_path / "fuzz.jpg"
    decoded = refused = 0
    for number in range(1200):
        content = bytearray(originals[number % len(originals)])
        for _ in range(generator.integers(1, 8)):
            content[generator.integers(len(content))] = generator.integers(256)
        if number % 5 == 0:
            del content[generator.integers(len(content)) :]
        path.write_bytes(content)
        try:
            image = read_image(str(path))
            assert image.dtype == np.uint8
            assert image.ndim == 3
            assert image.shape[2] == 3
            decoded += 1
        except UnreadableImage as error:
            assert "\n" not in str(error)  # noqa: PT017
            refused += error.path == str(path) and error.reason != ""
    assert decoded + refused == 1200
    assert min(decoded, refused) > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4_000_000  # kilobytes


def test_printable_names():
    assert printable(b"a\nb\x1b[31m\xff.jpg") == "a\\nb\\x1b[31m\\udcff.jpg"
    assert printable("größe 图.jpg") == "größe 图.jpg"


SMOOTH = np.stack(np.broadcast_arrays(np.arange(0, 240, 8)[None], np.arange(0, 200, 10)[:, None], np.uint8(90)), 2)
SMOOTH = SMOOTH.astype(np.uint8)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_avif(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.fromarray(SMOOTH), "AVIF", quality=100, subsampling="4:4:4", exif=exif)
    image = read(tmp_path, content, name="a.avif")
    turned = {1: SMOOTH, 3: SMOOTH[::-1, ::-1], 6: np.rot90(SMOOTH, -1), 8: np.rot90(SMOOTH)}[orientation]
    assert image.shape == turned.shape
    assert np.abs(image.astype(int) - turned).max() <= 3
    assert read(tmp_path, content, channels=1).shape == (*turned.shape[:2], 1)


def test_heic(tmp_path):
    heif = pytest.importorskip("pillow_heif")
    heif.from_pillow(Image.fromarray(SMOOTH)).save(tmp_path / "a.heic", quality=100, chroma="444")
    image = read_image(str(tmp_path / "a.heic"))
    assert image.shape == SMOOTH.shape
    assert np.abs(image.astype(int) - SMOOTH).max() <= 4
    assert image.flags.writeable
    content = (tmp_path / "a.heic").read_bytes()
    with pytest.raises(UnreadableImage):
        read(tmp_path, content[: len(content) // 2], name="cut.heic")


def test_a_photograph_whose_reader_is_missing_says_what_to_install(tmp_path):
    """In another process, in which pillow-heif cannot be imported whether it is installed or not."""
    (tmp_path / "a.HEIC").write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heic")
    program = (
        "import sys\nsys.modules['pillow_heif'] = None\nfrom dssl.data import open_source\nopen_source('.').image(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert "a.HEIC: " in done.stderr
    assert "pip install 'dssl[heif]'" in done.stderr
