"""The index: order, links, odd names and kinds of files, the cache and what makes it stale, and two builders at once."""

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dssl.data import index as module
from dssl.data.index import open_index, scan
from dssl.files import cache_folder


def fill(root: Path, names: list[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (len(name) + 1))


def age(root: Path) -> None:
    """Make all folders an hour old, so that their time stamps prove something."""
    for folder, _, _ in os.walk(root):
        status = Path(folder).stat()
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns - 3600 * 10**9))


def paths(index: module.Index) -> list[bytes]:
    return [index.relative(position) for position in range(len(index))]


def _owner(array: np.ndarray) -> object:
    """What holds the memory of an array."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array


@pytest.fixture
def scans(monkeypatch) -> list[bytes]:
    """The roots that were really scanned."""
    done: list[bytes] = []

    def counted(root: bytes, *, photos: bool) -> module.Index:
        done.append(root)
        return scan(root, photos=photos)

    monkeypatch.setattr(module, "scan", counted)
    return done


def test_images_in_a_fixed_order_with_sizes(tmp_path):
    fill(
        tmp_path,
        [
            "b/2.JPG",
            "b/10.jpg",
            "a/z.png",
            "a/deep/er/x.WebP",
            "notes.txt",
            "jpg",
            ".hidden.jpg",
            ".git/x.jpg",
            "c.tiff",
        ],
    )
    index = open_index(tmp_path)
    assert paths(index) == [b"c.tiff", b"a/z.png", b"a/deep/er/x.WebP", b"b/10.jpg", b"b/2.JPG"]
    assert index.records["size"].tolist() == [len(path) + 1 for path in paths(index)]
    assert index.classes == [b"a", b"b"]
    assert index.records["label"].tolist() == [-1, 0, 0, 1, 1]
    # as computed by a7351d8: runs check it when they resume
    assert index.fingerprint == "fb6a6b0dca62c05bdbac7c4880887a5b"
    assert index.path(0) == os.fsencode(tmp_path / "c.tiff")
    assert index.ignored == 2


def test_odd_names(tmp_path):
    raw = os.fsencode(tmp_path)
    odd = [
        b"line\nbreak.jpg",
        b"invalid\xff\xfe.jpg",
        "größe 图.jpg".encode(),
        b"<b>&.jpg",
        b"=cmd.jpg",
        b" .jpg",
        b"tab\t.jpg",
    ]
    for name in odd:
        Path(os.fsdecode(raw + b"/" + name)).write_bytes(b"x")
    age(tmp_path)
    assert sorted(paths(open_index(tmp_path))) == sorted(odd)
    assert sorted(paths(open_index(tmp_path))) == sorted(odd)  # from the cache


def test_links_are_followed_but_loops_and_repeats_are_not(tmp_path):
    fill(tmp_path / "root", ["a/1.jpg", "b/2.jpg"])
    fill(tmp_path / "outside", ["3.jpg"])
    root = tmp_path / "root"
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "file.jpg").symlink_to(tmp_path / "outside" / "3.jpg")
    (root / "a" / "up").symlink_to(root)
    for number in range(8):
        (root / f"a/again{number}").symlink_to(root / "b")
        (root / f"b/again{number}").symlink_to(root / "a")
    (root / "self.jpg").symlink_to("self.jpg")
    (root / "broken.jpg").symlink_to("nowhere")
    (root / "notes.txt").symlink_to(tmp_path / "outside" / "3.jpg")
    index = open_index(root)
    assert paths(index) == [b"file.jpg", b"a/1.jpg", b"b/2.jpg", b"linked/3.jpg"]
    assert [path for path, _ in index.skipped] == [b"broken.jpg", b"self.jpg"]


def test_a_link_to_a_folder_that_is_away_is_listed_until_it_is_back(tmp_path):
    fill(tmp_path / "root", ["a/1.jpg"])
    (tmp_path / "root" / "b").symlink_to(tmp_path / "disk")
    (tmp_path / "root" / "loop").symlink_to("loop")
    age(tmp_path)
    index = open_index(tmp_path / "root")
    assert paths(index) == [b"a/1.jpg"]
    assert [path for path, _ in index.skipped] == [b"b", b"loop"]
    fill(tmp_path / "disk", ["2.jpg"])
    index = open_index(tmp_path / "root")
    assert paths(index) == [b"a/1.jpg", b"b/2.jpg"]
    assert [path for path, _ in index.skipped] == [b"loop"]


UNPRIVILEGED = """
import os, sys, tempfile
from pathlib import Path
from dssl.data import open_source
from dssl.errors import DsslError

def open_closed(closed):
    with tempfile.TemporaryDirectory() as place:
        for name in "abc":
            (Path(place) / "photos" / name).mkdir(parents=True)
            (Path(place) / "photos" / name / "1.png").write_bytes(b"x")
        path = Path(place, closed)
        path.chmod(0)
        try:
            print(path)
            print(open_source(f"{place}/photos").name)
        except DsslError as error:
            print(error)
        finally:
            path.chmod(0o700)

os.environ["XDG_CACHE_HOME"] = "/nowhere"
if os.getuid() == 0:  # whom no mode binds
    open_closed("photos/a")  # imports what is needed while the interpreter can be read
    os.setgid(65534)
    os.setuid(65534)
open_closed(sys.argv[1])
"""


@pytest.mark.parametrize("closed", ["photos/c", "photos"])
def test_a_folder_that_cannot_be_read_is_an_error(closed):
    words = [sys.executable, "-c", UNPRIVILEGED, closed]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    path, error = lines[-2:]
    assert error.startswith(f"{path}: ")
    assert "Permission denied" in error


def test_what_is_no_file_is_named(tmp_path, monkeypatch):
    fill(tmp_path, ["ok.jpg"])
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.jpg")
    (tmp_path / "folder.jpg").mkdir()
    fill(tmp_path / "folder.jpg", ["inside.jpg"])
    index = open_index(tmp_path)
    assert paths(index) == [b"ok.jpg", b"folder.jpg/inside.jpg"]
    reasons = dict(index.skipped)
    assert "FIFO" in reasons[b"pipe.png"]
    assert "device" in reasons[b"zero.jpg"]
    assert "socket" in reasons[b"s.jpg"]


def test_the_second_time_nothing_is_scanned(tmp_path, scans, cache):
    root = tmp_path / "data"
    fill(root, [f"c{number % 7}/{number}.jpg" for number in range(300)])
    os.mkfifo(root / "pipe.png")
    age(root)
    first, second = open_index(root), open_index(root)
    assert len(scans) == 1
    assert paths(first) == paths(second)
    assert first.skipped == second.skipped != []
    assert first.fingerprint == second.fingerprint
    for name in ("root", "containers", "times", "classes", "ignored", "reusable"):
        assert getattr(first, name) == getattr(second, name)
    for name in ("records", "names"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    # mapped and not read into memory; and a table that NumPy opens by itself
    assert isinstance(_owner(second.records), mmap.mmap)
    assert isinstance(_owner(second.names), mmap.mmap)
    (file,) = (cache / "dssl" / "index").iterdir()
    assert np.array_equal(np.load(file, mmap_mode="r"), first.records)


@pytest.mark.parametrize("change", ["add", "remove", "rename", "deep"])
def test_a_change_is_noticed(tmp_path, scans, change):
    fill(tmp_path, ["a/1.jpg", "a/deep/2.jpg", "b/3.jpg"])
    age(tmp_path)
    before = open_index(tmp_path)
    if change == "add":
        fill(tmp_path, ["b/4.jpg"])
    elif change == "remove":
        (tmp_path / "a/1.jpg").unlink()
    elif change == "rename":
        (tmp_path / "b/3.jpg").rename(tmp_path / "b/5.jpg")
    else:
        fill(tmp_path, ["a/deep/6.jpg"])
    after = open_index(tmp_path)
    assert len(scans) == 2
    assert paths(before) != paths(after)
    assert before.fingerprint != after.fingerprint


def test_a_folder_that_has_just_changed_is_not_trusted(tmp_path, scans):
    fill(tmp_path, ["1.jpg"])
    open_index(tmp_path)
    open_index(tmp_path)
    assert len(scans) == 2


def test_the_fingerprint_depends_on_names_and_sizes_only(tmp_path):
    for root in ("one", "two"):
        fill(tmp_path / root, ["a/1.jpg", "b/2.jpg"])
    os.utime(tmp_path / "two/a/1.jpg", (1, 1))
    prints = [open_index(tmp_path / root).fingerprint for root in ("one", "two")]
    assert prints[0] == prints[1]
    (tmp_path / "two/a/1.jpg").write_bytes(b"")
    assert open_index(tmp_path / "two").fingerprint != prints[0]


def test_a_folder_without_images_does_not_change_the_fingerprint(tmp_path):
    fill(tmp_path, ["a/x/1.jpg", "b/2.jpg"])
    before = open_index(tmp_path)
    fill(tmp_path, ["a/notes/1.txt", "b/deep/er/1.txt", "aa/1.txt"])
    after = open_index(tmp_path)
    assert paths(after) == paths(before)
    assert after.fingerprint == before.fingerprint == before.earlier_fingerprint()
    # as computed by a7351d8, which counted such folders
    assert after.earlier_fingerprint() == "a889cf036d80438ae911d011d27823ae"
    fill(tmp_path, ["aa/3.jpg"])
    assert open_index(tmp_path).fingerprint != after.fingerprint


def test_a_damaged_cache_is_built_anew(tmp_path, scans, cache):
    root = tmp_path / "data"
    fill(root, [f"{number}.jpg" for number in range(20)])
    age(root)
    expected = paths(open_index(root))
    (file,) = (cache / "dssl" / "index").iterdir()
    whole = file.read_bytes()
    generator = np.random.default_rng(5)
    trials = 0
    for position in generator.integers(0, len(whole), 60).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        assert paths(open_index(root)) == expected
        trials += 1
    for length in (0, 7, 15, 30, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert paths(open_index(root)) == expected
        trials += 1
    assert len(scans) == 1 + trials  # no damage was taken for an index


def test_places_for_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == (
        tmp_path / "Library/Caches/dssl" if sys.platform == "darwin" else tmp_path / ".cache/dssl"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x/dssl"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    fill(tmp_path, ["1.jpg"])
    assert len(open_index(tmp_path)) == 1


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fill(tmp_path / "data", ["1.jpg"])
    age(tmp_path / "data")
    assert len(open_index(tmp_path / "data")) == 1


def test_many_processes_build_one_index(tmp_path, cache):
    root = tmp_path / "data"
    fill(root, [f"c{number % 5}/{number}.jpg" for number in range(500)])
    age(root)
    code = (
        "import sys; from dssl.data.index import open_index\n"
        "print(*{open_index(sys.argv[1]).fingerprint for _ in range(20)})"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {run.communicate()[0] for run in runs}
    assert answers == {open_index(root).fingerprint + "\n"}
    assert len(list((cache / "dssl" / "index").iterdir())) == 1


def test_a_file_that_was_overwritten_in_place_is_noticed(tmp_path, scans):
    fill(tmp_path, ["a/1.jpg", "a/2.jpg"])
    age(tmp_path)
    before = open_index(tmp_path).fingerprint
    with (tmp_path / "a" / "2.jpg").open("r+b") as file:  # the folder keeps its time stamp
        file.write(b"a longer content than before")
    assert open_index(tmp_path).fingerprint != before
