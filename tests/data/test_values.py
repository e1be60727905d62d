"""Images that are not photographs, written byte by byte here, against the arrays they were written from."""

import io
import logging
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import Quarantine, UnreadableImage, check_sample, measure, open_source
from dssl.data.decode import read_image
from dssl.data.packed import pack, write_shards
from dssl.data.scale import DEFAULT, Range, parse_range, read_values, scaled
from dssl.errors import DsslError
from tests.rejecting import rejects

GENERATOR = np.random.default_rng(3)
TWELVE = Range(((0.0, 4095.0),))


def sensor(
    height: int = 12, width: int = 9, channels: int = 5, *, top: int = 4096, kind: type = np.uint16
) -> np.ndarray:
    return GENERATOR.integers(0, top, (height, width, channels)).astype(kind)


def tiff(values: np.ndarray, *, planar: bool = False, order: str = "<") -> bytes:
    """One page, uncompressed, one strip (or one for each plane), from the specification."""
    height, width, channels = values.shape
    kind = values.dtype.newbyteorder(order)
    body = (values.transpose(2, 0, 1) if planar else values).astype(kind).tobytes()
    strips = channels if planar else 1
    sample = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags: list[tuple[int, str, list[int]]] = [
        (256, "I", [width]), (257, "I", [height]), (258, "H", [8 * values.dtype.itemsize] * channels), (259, "H", [1]),
        (262, "H", [1]), (273, "I", [0] * strips), (277, "H", [channels]), (278, "I", [height]),
        (279, "I", [len(body) // strips] * strips), (284, "H", [2 if planar else 1]),
        *([(338, "H", [0] * (channels - 1))] if channels > 1 else []), (339, "H", [sample] * channels),
    ]  # fmt: skip
    start = 8 + 2 + 12 * len(tags) + 4
    extra = b""
    sizes = {"H": 2, "I": 4}
    first = start + sum(sizes[code] * len(numbers) for _, code, numbers in tags if sizes[code] * len(numbers) > 4)
    entries = b""
    for tag, code, numbers in tags:
        if tag == 273:
            numbers = [first + strip * (len(body) // strips) for strip in range(strips)]
        packed = struct.pack(f"{order}{len(numbers)}{code}", *numbers)
        entries += struct.pack(f"{order}HHI", tag, {"H": 3, "I": 4}[code], len(numbers))
        if len(packed) > 4:
            entries += struct.pack(f"{order}I", start + len(extra))
            extra += packed
        else:
            entries += packed.ljust(4, b"\0")
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8)
    return head + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + extra + body


def png(values: np.ndarray) -> bytes:
    """8 or 16 bits; the rows go through the five filters of the format in turn."""
    height, width, channels = values.shape
    raw = values.astype(">u2" if values.dtype == np.uint16 else "u1").view(np.uint8).reshape(height, -1).astype(int)
    step = channels * values.dtype.itemsize
    rows = b""
    for y in range(height):
        above = raw[y - 1] if y else np.zeros_like(raw[0])
        left, corner = (np.concatenate([np.zeros(step, int), row[:-step]]) for row in (raw[y], above))
        guess = left + above - corner
        distances = np.abs(np.stack([guess - left, guess - above, guess - corner]))
        paeth = np.stack([left, above, corner])[distances.argmin(axis=0), np.arange(raw.shape[1])]
        predicted = [0 * left, left, above, (left + above) // 2, paeth][y % 5]
        rows += bytes([y % 5]) + ((raw[y] - predicted) % 256).astype(np.uint8).tobytes()
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8 * values.dtype.itemsize, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def read(content: bytes, channels: int) -> np.ndarray:
    return read_values(bytearray(content), channels=channels)


@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int16, np.uint32, np.float32, np.float64])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_tiff_gives_the_values_that_were_written(planar, order, kind, channels):
    values = sensor(channels=channels, top=250).astype(kind)
    assert np.array_equal(read(tiff(values, planar=planar, order=order), channels), values)


def test_the_pages_of_a_tiff_are_its_channels():
    pages = [Image.fromarray(plane) for plane in sensor(channels=4).transpose(2, 0, 1)]
    file = io.BytesIO()
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:])
    assert np.array_equal(read(file.getvalue(), 4), np.stack([np.asarray(page) for page in pages], axis=2))


@pytest.mark.parametrize("whole", [True, False])
def test_channels_in_other_files_are_not_read_as_zeros(tmp_path, whole):
    values = sensor(channels=2)
    tifffile = pytest.importorskip("tifffile")
    pixels = (
        '<Pixels DimensionOrder="XYZTC" Type="uint16" SizeX="9" SizeY="12" SizeC="2" SizeZ="1" SizeT="1" ID="Pixels:0">'
        '<Channel ID="Channel:0" SamplesPerPixel="1"/><Channel ID="Channel:1" SamplesPerPixel="1"/>'
        '<TiffData FirstC="0" PlaneCount="1" IFD="0"><UUID FileName="0.ome.tif">urn:uuid:0</UUID></TiffData>'
        '<TiffData FirstC="1" PlaneCount="1" IFD="{place}"><UUID FileName="{file}.ome.tif">urn:uuid:{file}</UUID></TiffData>'
        "</Pixels>"
    ).format(place=int(whole), file=int(not whole))
    schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    about = f'<OME xmlns="{schema}" UUID="urn:uuid:0"><Image ID="Image:0">{pixels}</Image></OME>'
    with tifffile.TiffWriter(tmp_path / "0.ome.tif", ome=False) as file:
        for channel in range(1 + whole):
            file.write(values[:, :, channel], description=about if channel == 0 else None, metadata=None)
    tifffile.imwrite(tmp_path / "1.ome.tif", values[:, :, 1], metadata=None)
    source = open_source(str(tmp_path), channels=2, value_range=TWELVE)
    if whole:
        assert np.array_equal(source.image(0), scaled(values, TWELVE))
    else:
        with pytest.raises(UnreadableImage, match="OME-TIFF"):
            source.image(0)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "top"), [(np.uint8, 256), (np.uint16, 65536)])
def test_png_gives_the_values_that_were_written(channels, kind, top):
    values = sensor(11, 7, channels, top=top, kind=kind)
    assert np.array_equal(read(png(values), channels), values)


def test_npy_is_read_with_its_channels_last_or_first():
    values = sensor()
    for written in (values, values.astype(">u2"), np.asfortranarray(values), values.transpose(2, 0, 1)):
        assert np.array_equal(read(npy(written), 5), values)
    assert np.array_equal(read(npy(values[:, :, 0]), 1), values[:, :, :1])
    square = sensor(5, 5, 5)  # could be either: the last axis counts
    assert np.array_equal(read(npy(square), 5), square)


def by_fractions(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """255 (value - low) / (high - low), half up, in exact arithmetic."""
    shares = [Fraction(255 * (int(value) - low), high - low) + Fraction(1, 2) for value in values.ravel()]
    return np.array([min(255, max(0, share.__floor__())) for share in shares], np.uint8).reshape(values.shape)


@pytest.mark.parametrize(("low", "high"), [(0, 4095), (0, 510), (100, 117), (-300, 900), (0, 65535), (0, 255)])
def test_scaling_is_exact(low, high):
    values = np.arange(-1000, 70_000, 7).reshape(1, -1, 1)
    expected = by_fractions(values, low, high)
    wanted = Range(((float(low), float(high)),))
    for kind in (np.int64, np.float64, np.int16, np.uint16, np.uint8):
        fits = (
            (values >= np.iinfo(kind).min) & (values <= np.iinfo(kind).max) if kind != np.float64 else values == values
        )
        found = scaled(values[fits].astype(kind).reshape(1, -1, 1), wanted)
        assert np.array_equal(found, expected[fits].reshape(1, -1, 1)), kind


def test_every_channel_has_its_own_range():
    values = sensor(channels=2)
    both = scaled(values, Range(((0.0, 4095.0), (1000.0, 2000.0))))
    for channel, (low, high) in enumerate(((0, 4095), (1000, 2000))):
        assert np.array_equal(both[:, :, channel], by_fractions(values[:, :, channel], low, high))


def test_what_is_not_a_number_becomes_black_and_infinity_the_end():
    values = np.array([[[np.nan], [0.25], [np.inf], [-np.inf], [1e300], [0.5]]], np.float64)
    assert scaled(values, Range(((0.0, 0.5),))).ravel().tolist() == [0, 128, 255, 0, 255, 255]


def test_twelve_bits_are_not_black(tmp_path):
    values = sensor(64, 64, 1)
    (tmp_path / "a.png").write_bytes(png(values))
    assert read_image(str(tmp_path / "a.png"), channels=1).max() < 16  # a photograph: the high byte
    image = read_image(str(tmp_path / "a.png"), channels=1, value_range=TWELVE)
    assert np.array_equal(image, by_fractions(values, 0, 4095))
    assert image.mean() > 100


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tiff(sensor())[:-30], "1080|truncated|corrupt"),
        (tiff(sensor())[:30], "corrupt|IFD|tag"),
        (png(sensor(channels=4))[:90], "truncated"),
        (npy(sensor())[:-7], "1,080 .*1,073 "),
        (npy(sensor())[:20], "EOF|header"),
        (npy(sensor(channels=4)), "4 .* 5.*--channels"),
        (tiff(sensor(channels=3)), "3 .* 5.*--channels"),
        (npy(np.full((4, 4, 5), np.nan)), "finite"),
        (npy(np.ones((4, 4, 5), complex)), "complex128"),
        (npy(np.ones((4, 4, 5), bool)), "bool"),
        (npy(np.ones((2, 4, 4, 5))), r"\(2, 4, 4, 5\)"),
        (npy(np.ones((0, 4, 5))), r"\(0, 4, 5\)"),
        (b"\xff\xd8\xff\xe0 a photo", "TIFF.*--channels and --range"),
        (b"", "empty"),
    ],
)
def test_damaged_and_foreign_files_are_named(tmp_path, content, reason, caplog):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UnreadableImage, match=reason) as caught:
        read_image(str(tmp_path / "a.npy"), channels=5, value_range=TWELVE)
    assert caught.value.path == str(tmp_path / "a.npy")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    file = io.BytesIO()
    np.save(file, np.array([Bomb()], object), allow_pickle=True)
    (tmp_path / "a.npy").write_bytes(file.getvalue())
    with pytest.raises(UnreadableImage, match="object"):
        read_image(str(tmp_path / "a.npy"), channels=1, value_range=TWELVE)
    assert not (tmp_path / "exploded").exists()


def test_a_claim_beyond_the_limits_is_refused_before_it_is_read(tmp_path):
    for shape, reason in (((20_000, 20_000, 5), "20000 x 20000 x 5"), ((2, 40_000, 5), "40000 x 2")):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": shape})
        content = header.getvalue() + (bytes(800_000) if shape[0] == 2 else b"")
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(UnreadableImage, match=reason):
            read_image(str(tmp_path / "a.npy"), channels=5, value_range=TWELVE)


def test_tiff_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tifffile", None)
    (tmp_path / "a.tif").write_bytes(tiff(sensor()))
    with pytest.raises(DsslError, match=r"tifffile.*'dssl\[science\]'") as caught:
        read_image(str(tmp_path / "a.tif"), channels=5, value_range=TWELVE)
    assert not isinstance(caught.value, UnreadableImage)  # the file is not at fault


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("0", ["'0'", "0,4095"]),
        ("a,b", ["'a,b'", "0,4095"]),
        ("5,5", ["5,5", "smaller"]),
        ("1%,99", ["'1%,99'", "1%,99%"]),
        ("1%,101%", ["1%,101%", 0, 100]),
        ("0,1;0,2", ["0,1;0,2", "2 pairs", "5 channels"]),
        ("0,inf", ["0,inf", "finite"]),
    ],
)
def test_a_wrong_range_is_refused(text, facts):
    with rejects("range", *facts):
        parse_range(text, channels=5)


def test_ranges_and_their_texts():
    for text in ("0,4095", "1%,99.5%", "0,1;-2.5,3;0,0.1"):
        found = parse_range(text, channels=3)
        assert found.text() == text
    assert parse_range(None, channels=3) is parse_range(None, channels=1) is None
    assert parse_range(None, channels=2) == DEFAULT


def write(folder: Path, *, count: int = 12, channels: int = 5) -> dict[str, np.ndarray]:
    """A labelled set of all three formats, with a test split and a photo that does not belong to it."""
    written = {}
    for split, number in (("train", count), ("val", 4)):
        for index in range(number):
            values = sensor(20 + index, 18, channels, top=4096 if split == "train" else 60_000)
            ending, content = (("tif", tiff(values)), ("npy", npy(values)))[index % 2]
            name = f"{split}/{'ab'[index % 4 // 2]}/{index:02d}.{ending}"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            written[name] = values
    (folder / "train" / "a" / "preview.jpg").write_bytes(b"a photo beside the data")
    return written


def test_a_folder_holds_tiff_and_npy_with_labels(tmp_path):
    written = write(tmp_path)
    source = open_source(str(tmp_path), channels=5, value_range="0,4095")
    assert len(source) == 12
    assert source.classes == ("a", "b")
    for index in range(12):
        values = written[f"train/{source.label_of(index)}"]
        assert np.array_equal(source.image(index), by_fractions(values, 0, 4095))
    assert [one.dtype for one in source.read([1, 2])] == [np.uint8] * 2
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.jpg")
    with rejects(tmp_path / "photos", "1 files", ".npy, .png, .tif, .tiff"):
        open_source(str(tmp_path / "photos"), channels=5)
    assert len(open_source(str(tmp_path / "train"))) == 7  # as photographs: .npy is not one


def test_percentiles_are_measured_once_on_the_training_images(tmp_path):
    written = write(tmp_path)
    source = open_source(str(tmp_path), channels=5, value_range="2%,98%")
    found = source.value_range
    assert found == open_source(str(tmp_path), channels=5, value_range="2%,98%").value_range
    values = np.concatenate([one.reshape(-1, 5) for name, one in written.items() if name.startswith("train")])
    for channel, bounds in enumerate(found.bounds):
        assert np.allclose(bounds, np.percentile(values[:, channel], (2, 98)), atol=80)  # of 4,096: a sample
    test = open_source(str(tmp_path), split="test", channels=5, value_range="2%,98%")
    assert test.value_range == found
    assert (
        open_source(str(tmp_path), channels=5).value_range
        == open_source(str(tmp_path), channels=5, value_range="1%,99%").value_range
    )


def test_percentiles_leave_out_what_is_not_finite_and_stretch_a_constant(tmp_path):
    values = np.stack([np.linspace(0, 1, 400).reshape(20, 20), np.full((20, 20), 7.0)], axis=2)
    values[3, :, 0] = np.nan
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "c.npy").write_bytes(b"damaged")
    source = open_source(str(tmp_path), channels=2, value_range="0%,100%")
    (low, high), constant = source.value_range.bounds
    assert 0 <= low < 0.05
    assert 0.95 < high <= 1
    assert constant == (7.0, 8.0)
    assert source.image(0)[:, :, 1].max() == 0


def test_too_many_files_with_other_channels_stop_a_run_with_a_line(tmp_path):
    write(tmp_path)
    (tmp_path / "train" / "a" / "odd.npy").write_bytes(npy(sensor(channels=4)))
    source = open_source(str(tmp_path), channels=5, value_range="0,4095")
    quarantine = Quarantine(source, max_share=0.05)
    with rejects("1 of 13", "5.0%", tmp_path / "train" / "a" / "odd.npy", "4 channels", "--channels"):
        check_sample(source, seed=0, quarantine=quarantine)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_shards_hold_the_same_images(tmp_path, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    write(tmp_path / "folder")
    folder = open_source(str(tmp_path / "folder"), channels=5, value_range="0,4095")
    write_shards(folder, tmp_path / "out", split="train", form=form, shard=5, quarantine=Quarantine(folder))
    shards = open_source(str(tmp_path / "out"), channels=5, value_range="0,4095")
    assert len(shards) == 12
    expected = sorted((folder.image(index).tobytes(), int(folder.labels[index])) for index in range(12))
    assert sorted((shards.image(index).tobytes(), int(shards.labels[index])) for index in range(12)) == expected
    assert open_source(str(tmp_path / "out"), channels=5).value_range.bounds[0][1] > 3000


def test_a_packed_copy_keeps_pixels_and_range(tmp_path):
    write(tmp_path / "folder")
    folder = open_source(str(tmp_path / "folder"), channels=5)
    pack(folder, tmp_path / "out" / "train.npy", side=16, quarantine=Quarantine(folder))
    packed = open_source(f"packed:{tmp_path / 'out'}", channels=5)
    assert packed.value_range == folder.value_range
    image = folder.image(0)
    planes = [Image.fromarray(np.ascontiguousarray(image[:, :, c])).resize((16, 18), 3) for c in range(5)]
    assert np.array_equal(packed.image(0), np.stack([np.asarray(plane) for plane in planes], axis=2))
    assert open_source(f"packed:{tmp_path / 'out'}", channels=5, value_range=folder.value_range).channels == 5
    with pytest.raises(DsslError, match=r"not 0,4095.*--range"):
        open_source(f"packed:{tmp_path / 'out'}", channels=5, value_range="0,4095")
    written = write_shards(packed, tmp_path / "tar", split="train", form="tar", shard=50, quarantine=Quarantine(packed))
    assert written[0] == 1
    again = open_source(str(tmp_path / "tar"), channels=5, value_range="0,255")
    assert sorted(again.image(i).tobytes() for i in range(12)) == sorted(packed.image(i).tobytes() for i in range(12))


def test_mean_and_deviation_are_measured_for_each_channel(tmp_path):
    write(tmp_path)
    source = open_source(str(tmp_path), channels=5, value_range="0,4095")
    found, count = measure(source)
    images = [source.image(index) / 255 for index in range(12)]
    assert count == 12
    assert np.allclose(found.mean, np.mean([image.mean(axis=(0, 1)) for image in images], axis=0))


def test_sets_of_photographs_refuse_a_range():
    for text in ("shapes:20", "cifar10:nowhere"):
        with pytest.raises(DsslError, match=r"8 bits.*--range"):
            open_source(text, value_range="0,255")
    with pytest.raises(DsslError, match=r"channels 0.*1024"):
        open_source("shapes:20", channels=0)
