"""Tar shards: against Python's own tarfile, patterns against bash, and every kind of damage: nothing lost, one line each."""

import codecs
import errno
import gzip
import io
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import NoSplitError, Quarantine, UnreadableImage, open_source, require_labels
from dssl.data import tar as module
from dssl.data.quarantine import Reader
from dssl.data.shards import _braces
from tests.rejecting import rejects


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (value % 256, value // 256, 9)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, members: Iterable[tuple[str, bytes]], *, kind: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    os.utime(path, ns=(10**18, 10**18))  # old enough for its time stamp to prove something


def shards(root: Path, count: int = 3, images: int = 5) -> Path:
    for shard in range(count):
        write(
            root / f"{shard:06d}.tar",
            [
                (f"{shard}-{n}.{kind}", content)
                for n in range(images)
                for kind, content in (("png", png(shard * images + n)), ("cls", b"%d" % (n % 4)))
            ],
        )
    return root


def values(source) -> list[int]:
    return [int(source.image(n)[0, 0, 0]) for n in range(len(source))]


def refused(text: object, *facts: object, **options) -> None:
    with rejects(*facts):
        open_source(str(text), **options)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(tmp_path, kind):
    names = [
        "a.png",
        "./b.PNG",
        "folder/c.png",
        "f" * 60 + "/" + "d" * 90 + ".png",
        "notes.txt",
        "._a.png",
        "größe.png",
    ]
    if kind != tarfile.USTAR_FORMAT:
        names += ["very/" + "long" * 60 + "/" + "e" * 120 + ".png"]
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=kind) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, name in enumerate(names):
            about = tarfile.TarInfo(name)
            content = png(number) + b"x" * (number * 300)  # of every length modulo 512
            about.size = len(content)
            if kind == tarfile.PAX_FORMAT:
                about.pax_headers = {"comment": "y" * 700}
            archive.addfile(about, io.BytesIO(content))
    source = open_source(str(path))
    with tarfile.open(path) as archive:
        expected = [
            (member.name.removeprefix("./"), member.offset_data, member.size)
            for member in archive
            if member.name.lower().endswith(".png") and "._" not in member.name
        ]
    records = source.index.records
    found = [
        (source.index.relative(n).decode().removeprefix("x.tar/"), int(records[n]["offset"]), int(records[n]["size"]))
        for n in range(len(source))
    ]
    assert found == expected
    assert len(found) == len(names) - 2
    assert source.index.ignored == 1
    assert [int(source.image(n)[0, 0, 0]) for n in range(3)] == [0, 1, 2]


def test_a_size_in_binary_and_in_an_attribute(tmp_path):
    """As for members of 8 GiB and more, at a size that a test can afford."""
    plain = tmp_path / "plain.tar"
    write(plain, [("a.png", png(1)), ("b.png", png(2))], kind=tarfile.GNU_FORMAT)
    content = bytearray(plain.read_bytes())
    size = len(png(1))
    content[124:136] = b"\x80" + size.to_bytes(11, "big")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    binary = tmp_path / "binary.tar"
    binary.write_bytes(content)
    assert values(open_source(str(binary))) == [1, 2]
    told = tmp_path / "told.tar"
    with tarfile.open(told, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, value in (("a.png", 1), ("b.png", 2)):
            about = tarfile.TarInfo(name)
            about.size = len(png(value))
            about.pax_headers = {"size": str(about.size)}
            archive.addfile(about, io.BytesIO(png(value)))
    assert values(open_source(str(told))) == [1, 2]


def test_a_tar_of_the_system_s_own_tar(tmp_path):
    for name in ("cat/1.png", "cat/2.png", "dog/3.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(png(len(name)))
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", tmp_path, "photos"], check=True)
    source = open_source(str(tmp_path / "x.tar"))
    names = {source.label_of(n).removeprefix("x.tar/photos/") for n in range(len(source))}
    assert names == {"cat/1.png", "cat/2.png", "dog/3.png"}
    assert source.labels is None


def test_the_places_of_shards_are_equal(tmp_path, monkeypatch):
    root = shards(tmp_path / "shards")
    (tmp_path / "list.txt").write_text("".join(f"shards/{n:06d}.tar\n" for n in range(3)))
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + (tmp_path / "list.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    texts = [
        str(root),
        f"{root}/{{000000..000002}}.tar",
        f"{root}/*.tar",
        "list.txt",
        "marked.txt",
        "shards/{000000,000001,000002}.tar",
    ]
    sources = [open_source(text) for text in texts]
    assert len({source.fingerprint for source in sources}) == 1
    for source in sources:
        assert values(source) == list(range(15))
        assert source.labels.tolist() == [0, 1, 2, 3, 0] * 3
        assert source.classes == ("0", "1", "2", "3")
        assert source.label_of(6) == "000001.tar/1-1.png"
        assert source.shards.tolist() == [0, 5, 10, 15]
    assert values(open_source(str(root / "000001.tar"))) == [5, 6, 7, 8, 9]
    assert open_source(str(root), channels=1).image(0).shape == (4, 6, 1)
    with pytest.raises(NoSplitError):
        open_source(texts[1], split="test")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    "text", ["{000..011}.tar", "{8..11}x{a,b}", "{3..1}", "{01..3}", "a{b,c}{1..2}", "plain", "{098..101}"]
)
def test_braces_are_those_of_bash(text):
    said = subprocess.run(["bash", "-c", f"echo {text}"], capture_output=True, check=True, text=True).stdout
    assert _braces(text) == said.split()


def test_splits(tmp_path):
    for style in ("folders", "names"):
        root = tmp_path / style
        between = "/" if style == "folders" else "-"
        write(
            root / f"train{between}0.tar", [("0.png", png(0)), ("0.cls", b"cat"), ("1.png", png(1)), ("1.cls", b"dog")]
        )
        write(root / f"val{between}0.tar", [("2.png", png(2)), ("2.json", b'{"label": "dog"}')])
        train, held = open_source(str(root)), open_source(str(root), split="test")
        assert (values(train), values(held)) == ([0, 1], [2])
        assert train.classes == held.classes == ("cat", "dog")
        assert held.labels.tolist() == [1]  # as in training
        write(root / f"val{between}1.tar", [("3.png", png(2)), ("3.cls", b"cow")])
        refused(root, root, "'cow'", split="test")
    with rejects(tmp_path / "one", "train-", "test-", error=NoSplitError):
        open_source(str(shards(tmp_path / "one")), split="test")


@pytest.mark.parametrize(
    ("labels", "classes", "numbers"),
    [
        ([("cls", b"10\n"), ("cls", b"9"), ("cls", b"9")], ("9", "10"), [1, 0, 0]),
        ([("json", b'{"label": 3}'), ("json", b'{"cls": 1}'), ("cls", b"3")], ("1", "3"), [1, 0, 1]),
        ([("json", b'{"label": 0, "class": "ox"}')] * 2 + [("json", b'{"class": "ape"}')], ("ape", "ox"), [1, 1, 0]),
        ([("json", json.dumps({"text": "x" * 900, "label": "a"}).encode())] * 3, ("a",), [0, 0, 0]),
        ([("cls", b"1"), ("cls", b"1"), ("txt", b"1")], None, None),
        ([("cls", b"1"), ("json", b"{"), ("json", b"[]")], None, None),
    ],
)
def test_labels(tmp_path, labels, classes, numbers):
    members = []
    for number, (ending, content) in enumerate(labels):
        pair = [(f"s/{number}.{ending}", content), (f"s/{number}.png", png(number))]
        members += pair if number % 2 else pair[::-1]  # whichever comes first
    write(tmp_path / "x.tar", members)
    source = open_source(str(tmp_path / "x.tar"))
    assert source.classes == classes
    assert (None if source.labels is None else source.labels.tolist()) == numbers
    if classes is None:
        with rejects(tmp_path / "x.tar", ".cls or .json"):
            require_labels(source)


@pytest.mark.parametrize(
    ("members", "labels"),
    [
        (
            {"scan.2024.000.png": 1, "scan.2024.000.cls": b"cat", "scan.2024.001.png": 2, "scan.2024.001.cls": b"dog"},
            "cat dog",
        ),
        ({"scan.0.json": b'{"label": "cat"}', "scan.0.png": 1, "scan.1.png": 2, "scan.1.cls": b"dog"}, "cat dog"),
        ({"a.left.png": 1, "a.right.png": 2, "a.cls": b"cat", "b.png": 3, "b.cls": b"dog"}, "cat cat dog"),
        ({"a.png": 1, "a.label.cls": b"cat", "b.png": 2, "b.cls": b"dog", "b.x.json": b'{"text": 1}'}, "cat dog"),
        ({"v1.0/a.png": 1, "v1.0/a.cls": b"cat", "v1.0/b.png": 2, "v1.0/b.cls": b"dog"}, "cat dog"),
        ({"scan.0.png": 1, "scan.1.png": 2, "scan.1.cls": b"dog"}, None),
    ],
)
def test_names_with_dots_have_labels_of_their_own(tmp_path, members, labels):
    write(tmp_path / "x.tar", [(name, png(v) if isinstance(v, int) else v) for name, v in members.items()])
    source = open_source(str(tmp_path / "x.tar"))
    assert values(source) == [value for value in members.values() if isinstance(value, int)]
    if labels is None:
        assert source.labels is None
    else:
        assert [source.classes[number] for number in source.labels] == labels.split()


@pytest.mark.parametrize(
    "members",
    [
        [("a.png", png(1)), ("a.cls", b"cat"), ("a.png", png(2)), ("a.cls", b"dog")],
        [("a.png", png(1)), ("a.first.cls", b"cat"), ("a.second.cls", b"dog")],
    ],
)
def test_two_labels_for_one_image_are_an_error(tmp_path, members):
    write(tmp_path / "x.tar", members)
    refused(tmp_path / "x.tar", tmp_path / "x.tar", "labels")


def test_half_a_surrogate_in_a_label(tmp_path):
    write(
        tmp_path / "x.tar", [("a.png", png(1)), ("a.json", b'{"label": "\\ud83d"}'), ("b.png", png(2)), ("b.cls", b"x")]
    )
    source = open_source(str(tmp_path / "x.tar"))
    assert len(set(source.labels.tolist())) == 2
    assert "".join(source.classes).isprintable()


def test_images_beside_a_tar_are_still_a_folder(tmp_path):
    shards(tmp_path, 1)
    (tmp_path / "1.png").write_bytes(png(77))
    assert values(open_source(str(tmp_path))) == [77]


def test_refusals(tmp_path):
    root = shards(tmp_path / "shards")
    packed = tmp_path / "packed" / "x.tar.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress((root / "000000.tar").read_bytes()))
    for text in (packed, packed.parent):
        refused(text, packed, "compressed")
    shutil.copy(packed, tmp_path / "hidden.tar")
    refused(tmp_path / "hidden.tar", tmp_path / "hidden.tar", "not compressed")
    (tmp_path / "text.tar").write_bytes(b"hello" * 1000)
    refused(tmp_path / "text.tar", tmp_path / "text.tar", "not a tar")
    (tmp_path / "nothing.tar").write_bytes(b"")
    refused(tmp_path / "nothing.tar", tmp_path / "nothing.tar", "empty")
    refused(f"{root}/{{000000..000003}}.tar", root / "000003.tar", os.strerror(errno.ENOENT))
    refused(f"{root}/9*.tar", root / "9*.tar")
    refused(f"{root}/{{a,b}}.zip", root / "a.zip", ".tar", ".parquet")
    refused(f"{root}/{{000000,000000}}.tar", "000000.tar", "twice")
    write(tmp_path / "empty.tar", [])
    refused(tmp_path / "empty.tar", tmp_path / "empty.tar", "empty", "000017.jpg")
    write(tmp_path / "text" / "text.tar", [("a.txt", b"x")])
    refused(tmp_path / "text", tmp_path / "text", "1 files", "000017.jpg")
    refused(f"{root}#label=x", f"{root}#label=x", "Parquet")
    os.mkfifo(tmp_path / "pipe.tar")
    refused(tmp_path / "pipe.tar", tmp_path / "pipe.tar", "FIFO")


def test_a_missing_shard_is_noticed_where_names_count(tmp_path):
    for number in (0, 1, 3):
        write(tmp_path / f"train-{number:05d}-of-00004.tar", [(f"{number}.png", png(number))])
    refused(tmp_path, "1 of 4", "number 2", f"'{tmp_path}/*.tar'")
    assert values(open_source(f"{tmp_path}/*.tar")) == [0, 1, 3]


def test_a_tar_cut_anywhere_keeps_every_whole_image(tmp_path):
    path = tmp_path / "x.tar"
    sizes = [0, 1, 500, 512, 513, 1200]
    write(path, [(f"{number}.png", b"p" * size) for number, size in enumerate(sizes)])
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [member.offset_data + member.size for member in archive]
    assert len(open_source(str(path)).skipped) == 0
    for length in range(512, ends[-1] + 512, 61):
        path.write_bytes(whole[:length])
        source = open_source(str(path))
        assert len(source) == sum(end <= length for end in ends)
        assert len(source.skipped) == 1
        name, reason = source.skipped[0]
        assert name.startswith(f"{path}/")
        assert re.search("truncated|end mark|lost", reason)


def test_a_size_of_5000_digits_in_an_attribute(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for number, attributes in enumerate([{}, {"size": "9" * 5000}]):
            place = archive.offset
            about = tarfile.TarInfo(f"{number}.png")
            about.size, about.pax_headers = len(png(number)), attributes
            archive.addfile(about, io.BytesIO(png(number)))
    source = open_source(str(path))
    assert values(source) == [0, 1]  # by the size in its own header
    assert [name for name, _ in source.skipped] == [f"{path}/byte {place}"]


def test_a_member_of_negative_size(tmp_path):
    """GNU's binary numbers may be negative; a reader that believes them reads the same header for ever."""
    path = tmp_path / "x.tar"
    write(path, [("0.png", png(0)), ("1.png", b"")], kind=tarfile.GNU_FORMAT)
    with tarfile.open(path) as archive:
        place = archive.getmember("1.png").offset
    content = bytearray(path.read_bytes())
    header = content[place : place + 512]
    header[124:136] = (-512 + (1 << 96)).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(content[:place] + header + content[place + 512 :])
    source = open_source(str(path))
    assert values(source) == [0]
    assert [name for name, _ in source.skipped] == [f"{path}/byte {place}"]


@pytest.mark.parametrize("left", [0, 100, 504, 511])
def test_a_map_of_holes_that_is_cut(tmp_path, left):
    path = tmp_path / "x.tar"
    write(path, [("0.png", png(0)), ("1.png", png(1))], kind=tarfile.GNU_FORMAT)
    with tarfile.open(path) as archive:
        place = archive.getmember("1.png").offset
    content = bytearray(path.read_bytes()[: place + 512])
    header = content[place:]
    header[156:157], header[482] = b"S", 1  # a sparse file whose map goes on
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(content[:place] + header + bytes(left))
    source = open_source(str(path))
    assert values(source) == [0]
    assert source.skipped[0][0] in (f"{path}/1.png", f"{path}/byte {place}")


def test_damage_in_the_middle(tmp_path):
    path = tmp_path / "x.tar"
    write(path, [(f"{number}.png", png(number)) for number in range(6)])
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        headers = [member.offset for member in archive]
    for damage, left in (
        ((headers[2] + 3, 1), [0, 1, 3, 4, 5]),  # a flipped bit in a header
        ((headers[2], 512), [0, 1, 3, 4, 5]),  # a header of zeros
        ((0, 512), [1, 2, 3, 4, 5]),  # the first one
        ((headers[1], headers[4] - headers[1]), [0, 4, 5]),  # a hole
    ):
        content = bytearray(whole)
        content[damage[0] : damage[0] + damage[1]] = (
            bytes(damage[1]) if damage[1] > 1 else bytes([content[damage[0]] ^ 4])
        )
        path.write_bytes(content)
        assert values(open_source(str(path))) == left
    content = bytearray(whole)
    content[headers[2] + 3] ^= 4
    path.write_bytes(content)
    ((name, reason),) = open_source(str(path)).skipped
    assert (name, reason) == (
        f"{path}/byte {headers[2]}",
        f"damaged header: {headers[3] - headers[2]:,} bytes are lost",
    )
    path.write_bytes(whole + whole)  # cat a.tar b.tar
    assert values(open_source(str(path))) == [0, 1, 2, 3, 4, 5] * 2


def test_a_damaged_image_is_replaced_and_named(tmp_path):
    root = shards(tmp_path / "shards")
    path = root / "000001.tar"
    with tarfile.open(path) as archive:
        at = archive.getmember("1-2.png").offset_data
    content = bytearray(path.read_bytes())
    content[at + 45] ^= 1  # in the compressed pixels: PNG has checksums
    path.write_bytes(content)
    source = open_source(str(root))
    quarantine = Quarantine(source, path=tmp_path / "quarantine.txt", max_share=0.1)
    reader = Reader(source, seed=3, quarantine=quarantine)
    first, replaced, last = (int(image[0, 0, 0]) for image in reader.images([6, 7, 8]))
    assert (first, last) == (6, 8)
    assert replaced != 7
    line = (tmp_path / "quarantine.txt").read_text()
    assert line.startswith(f"{path}/1-2.png\t")


def test_names_that_climb_and_links_are_not_images(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("ok.png", "../up.png", "/etc/root.png", "a/../../b.png", "..png"):
            about = tarfile.TarInfo(name)
            about.size = len(png(5))
            archive.addfile(about, io.BytesIO(png(5)))
        for name, kind in (("s.png", tarfile.SYMTYPE), ("h.png", tarfile.LNKTYPE), ("f.png", tarfile.FIFOTYPE)):
            about = tarfile.TarInfo(name)
            about.type, about.linkname = kind, "/etc/passwd"
            archive.addfile(about)
        about = tarfile.TarInfo("last.png")
        about.size = len(png(6))
        archive.addfile(about, io.BytesIO(png(6)))
    source = open_source(str(path))
    assert values(source) == [5, 6]
    reasons = {name.removeprefix(f"{path}/"): reason for name, reason in source.skipped}
    assert {name for name, reason in reasons.items() if "leads out" in reason} == {
        "../up.png",
        "/etc/root.png",
        "a/../../b.png",
    }
    assert "symbolic link" in reasons["s.png"]
    assert "hard link" in reasons["h.png"]
    assert "FIFO" in reasons["f.png"]


@pytest.fixture
def scans(monkeypatch) -> list[bytes]:
    done: list[bytes] = []
    scan = module._scan

    def counted(path: bytes, *, endings: frozenset[bytes]):
        done.append(path)
        return scan(path, endings=endings)

    monkeypatch.setattr(module, "_scan", counted)
    return done


def test_the_index_is_kept_and_mapped(tmp_path, scans):
    root = shards(tmp_path / "shards")
    first, second = open_source(str(root)), open_source(str(root))
    assert len(scans) == 3
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.index.records, second.index.records)
    owner = second.index.records
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, mmap.mmap)
    # the same shards elsewhere are the same data
    shutil.copytree(root, tmp_path / "elsewhere")
    assert open_source(str(tmp_path / "elsewhere")).fingerprint == first.fingerprint


@pytest.mark.parametrize("change", ["touched", "same time", "added", "removed"])
def test_an_index_older_than_its_shards_is_rebuilt(tmp_path, scans, change):
    root = shards(tmp_path / "shards")
    before = open_source(str(root))
    if change == "touched":
        os.utime(root / "000000.tar", ns=(10**18, 10**18 + 1))
    elif change == "same time":
        write(root / "000000.tar", [("new.png", png(200))])
    elif change == "added":
        write(root / "000003.tar", [("new.png", png(200))])
    else:
        (root / "000002.tar").unlink()
    after = open_source(str(root))
    assert len(scans) == 3 + {"touched": 3, "same time": 3, "added": 4, "removed": 2}[change]
    assert (before.fingerprint == after.fingerprint) == (change == "touched")
    assert (
        values(after)
        == {
            "touched": [*range(15)],
            "same time": [200, *range(5, 15)],
            "added": [*range(15), 200],
            "removed": [*range(10)],
        }[change]
    )


def test_a_shard_that_changes_or_vanishes_in_a_run(tmp_path):
    root = shards(tmp_path / "shards")
    source, unread = open_source(str(root)), open_source(str(root))
    assert int(source.image(0)[0, 0, 0]) == 0
    with (root / "000000.tar").open("ab") as file:  # in place, under the open descriptor
        file.write(bytes(512))
    with rejects(root / "000000.tar" / "0-0.png", "changed", error=UnreadableImage):
        source.image(0)
    write(tmp_path / "new.tar", [("x.png", png(9))])
    (tmp_path / "new.tar").replace(root / "000001.tar")  # a new file under the name, never opened before
    with rejects(root / "000001.tar" / "1-0.png", "changed", error=UnreadableImage):
        source.image(5)
    assert int(source.image(10)[0, 0, 0]) == 10
    (root / "000002.tar").unlink()
    assert int(source.image(11)[0, 0, 0]) == 11, "an open shard is still there"
    with rejects(root / "000002.tar" / "2-2.png", os.strerror(errno.ENOENT), error=UnreadableImage):
        unread.image(12)


def test_more_shards_than_may_be_open(tmp_path):
    root = shards(tmp_path / "shards", 140, 1)
    source = open_source(str(root))
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert values(source) + values(source) == [*range(140)] * 2
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 128


def test_a_hundred_thousand_members_in_one_shard(tmp_path, cache):
    """And what an index costs: 32 bytes for each image and the bytes of its name, mapped and shared by all processes."""
    path, count = tmp_path / "large.tar", 100_000
    template = bytearray(tarfile.TarInfo("00000000.png").tobuf(tarfile.USTAR_FORMAT))
    template[148:156] = b" " * 8
    base = sum(template) - 8 * ord("0")
    with path.open("wb") as file:
        for number in range(count):
            name = b"%08d" % number
            template[:8], template[148:156] = name, b"%06o\0 " % (base + sum(name))
            file.write(template)
        file.write(bytes(1024))
    os.utime(path, ns=(10**18, 10**18))
    source = open_source(str(path))
    assert len(source) == count
    assert source.label_of(count - 1) == "large.tar/00099999.png"
    (kept,) = (cache / "dssl" / "index").iterdir()
    assert kept.stat().st_size < count * (32 + len("00000000.png")) + 1000
    assert open_source(str(path)).label_of(12_345) == "large.tar/00012345.png"


def test_two_processes_build_one_index(tmp_path, cache):
    root = shards(tmp_path / "shards", 20)
    code = (
        "import sys; from dssl.data import open_source\nfor _ in range(20): print(open_source(sys.argv[1]).fingerprint)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in processes]
    assert [error for _, error in said] == ["", ""]
    assert len(set(said[0][0].split()) | set(said[1][0].split())) == 1
    assert len(list((cache / "dssl" / "index").iterdir())) == 1
