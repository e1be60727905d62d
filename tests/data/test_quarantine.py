"""Unreadable files: named once, replaced in a way that depends on seed and index, and too many of them stop the run."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import Quarantine, Source, UnreadableImage, check_sample, open_source
from dssl.data.quarantine import Reader
from tests.rejecting import rejects


class Numbers(Source):
    """Images that show their own index; some cannot be read."""

    name, fingerprint = "numbers", "n"

    def __init__(self, count: int, bad: set[int] = frozenset()) -> None:
        self.count, self.bad, self.reads = count, bad, []

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> np.ndarray:
        self.reads.append(index)
        if index in self.bad:
            raise UnreadableImage(f"/data/{index}.jpg", "it is bad")
        return np.full((4, 4, 3), index % 256, np.uint8)

    def label_of(self, index: int) -> str:
        return f"{index}.jpg"


def values(source: Numbers, seed: int, indices: list[int]) -> list[int]:
    reader = Reader(source, seed=seed, quarantine=Quarantine(source, max_share=1))
    return [int(image[0, 0, 0]) for image in reader.images(list(indices))]


def test_replacements_depend_on_seed_and_index_alone():
    bad = {3, 50, 51, 99}
    forward = values(Numbers(100, bad), 1, list(range(100)))
    backward = values(Numbers(100, bad), 1, list(range(99, -1, -1)))[::-1]
    assert forward == backward
    for index in range(100):
        assert (forward[index] == index) == (index not in bad)
        assert forward[index] not in bad
    assert [forward[index] for index in sorted(bad)] == [
        values(Numbers(100, bad), 1, [index])[0] for index in sorted(bad)
    ]
    assert [values(Numbers(100, bad), 2, [index])[0] for index in sorted(bad)] != [
        forward[index] for index in sorted(bad)
    ]


def test_a_replacement_has_the_label_of_the_image():
    bad = {3, 50, 51, 99}
    source = Numbers(100, bad)
    labels = np.arange(100) % 10
    reader = Reader(source, seed=1, quarantine=Quarantine(source, max_share=1), labels=labels)
    shown = [int(image[0, 0, 0]) for image in reader.images(list(range(100)))]
    assert [labels[index] for index in shown] == labels.tolist()
    assert all((shown[index] == index) == (index not in bad) for index in range(100))
    alone = Numbers(3, {1})
    lonely = Reader(alone, seed=1, quarantine=Quarantine(alone, max_share=1), labels=np.arange(3))
    with rejects("1.jpg", "64 others"):
        next(lonely.images([1]))


def test_each_file_is_listed_once_also_after_a_restart(tmp_path):
    path = tmp_path / "quarantine.txt"
    for _ in range(2):
        source = Numbers(100, {3, 5})
        reader = Reader(source, seed=0, quarantine=Quarantine(source, path=path))
        for index in (3, 5, 3, 5, 3):
            next(reader.images([index]))
        assert source.reads.count(3) == 1  # a known bad file is not tried again
    assert path.read_text() == "/data/3.jpg\tit is bad\n/data/5.jpg\tit is bad\n"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the system's count of bytes read")
def test_the_list_is_not_read_again_for_every_file(tmp_path):
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path = tmp_path / "quarantine.txt"
    first, second = (Quarantine(Numbers(2000), path=path, max_share=1) for _ in range(2))
    before = bytes_read()
    for index in range(2000):
        for quarantine in (first, second):
            quarantine.record(index, UnreadableImage(f"/data/{index}.jpg", "it is bad"))
    assert len(path.read_text().splitlines()) == 2000
    assert bytes_read() - before < 20 * path.stat().st_size


def test_two_quarantines_share_a_file(tmp_path):
    path = tmp_path / "quarantine.txt"
    first, second = (Quarantine(Numbers(100), path=path) for _ in range(2))
    first.record(3, UnreadableImage("a", "x"))
    second.record(3, UnreadableImage("a", "x"))
    second.record(4, UnreadableImage("b\n=cmd\x1b", "y\tz"))
    assert path.read_text() == "a\tx\nb\\n=cmd\\x1b\ty\\tz\n"


def test_more_than_the_share_is_an_error():
    source = Numbers(100, set(range(50)))
    reader = Reader(source, seed=0, quarantine=Quarantine(source, max_share=0.03))
    with rejects("4 of 100", "3.0%", "/data/0.jpg", "it is bad"):
        list(reader.images(list(range(100))))
    one = Numbers(10, {4})
    with rejects("1 of 10", "0.0%", "/data/4.jpg"):
        next(Reader(one, seed=0, quarantine=Quarantine(one, max_share=0)).images([4]))


def test_what_the_scan_skipped_counts(tmp_path):
    source = Numbers(18)
    source.skipped = [("pipe.jpg", "a FIFO"), ("socket.jpg", "a socket")]
    quarantine = Quarantine(source, path=tmp_path / "q.txt", max_share=0.1)
    assert (tmp_path / "q.txt").read_text() == "pipe.jpg\ta FIFO\nsocket.jpg\ta socket\n"
    with rejects("3 of 20", "10.0%", "pipe.jpg", tmp_path / "q.txt"):
        quarantine.record(0, UnreadableImage("0.jpg", "bad"))


def test_every_unreadable_file_is_counted_once_and_named_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "photos" / "good.png")
    (tmp_path / "photos" / "cut.png").write_bytes(b"x")
    (tmp_path / "photos" / "gone.png").symlink_to("nowhere")
    (tmp_path / "list.txt").write_text("photos/good.png\nphotos/cut.png\nphotos/gone.png\nphotos/cut.png\n")
    monkeypatch.chdir(tmp_path)
    bad = {str(tmp_path / "photos" / name) for name in ("cut.png", "gone.png")}
    for text, total in (("photos", 3), ("list.txt", 4)):
        source = open_source(text)
        quarantine = Quarantine(source, max_share=1)
        assert len(check_sample(source, seed=0, quarantine=quarantine)) == 1
        assert set(quarantine.reasons) == bad
        assert (len(quarantine), quarantine.total) == (total - 1, total)


def test_a_sample_finds_a_bad_set_before_the_run_and_lets_a_good_one_pass():
    bad = Numbers(10_000, set(range(0, 10_000, 3)))
    with rejects("20 of 64", "5.0%"):
        check_sample(bad, seed=0, quarantine=Quarantine(bad))
    fine = Numbers(10_000, set(range(0, 10_000, 50)))  # 2 % of them, with 5 % allowed
    for seed in range(30):
        assert len(check_sample(fine, seed=seed, quarantine=Quarantine(fine))) >= 50
    all_bad = Numbers(5, set(range(5)))
    with rejects("1 of 5", "5.0%", "/data/0.jpg"):
        check_sample(all_bad, seed=0, quarantine=Quarantine(all_bad))
    strict = Numbers(200, {7})
    with rejects("1 of 200", "0.0%", "/data/7.jpg"):
        check_sample(strict, seed=0, quarantine=Quarantine(strict, max_share=0), count=200)


def test_when_nothing_can_be_read_the_search_ends():
    source = Numbers(5, set(range(5)))
    with rejects("0.jpg", "64 others"):
        next(Reader(source, seed=0, quarantine=Quarantine(source, max_share=1)).images([0]))


def test_a_list_that_cannot_be_written_is_one_line(tmp_path):
    quarantine = Quarantine(Numbers(100), path=Path(tmp_path / "missing" / "quarantine.txt"))
    with rejects(tmp_path / "missing" / "quarantine.txt", os.strerror(errno.ENOENT)):
        quarantine.record(1, UnreadableImage("a", "x"))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_out_of_range(share):
    with rejects("share", share, "0 to 1"):
        Quarantine(Numbers(3), max_share=share)


def test_processes_that_share_a_file_share_the_limit(tmp_path):
    path = tmp_path / "quarantine.txt"
    path.write_text("/data/of an earlier session.jpg\tit was bad\n")
    source = Numbers(100, set(range(20)))
    readers = [Reader(source, seed=0, quarantine=Quarantine(source, path=path, max_share=0.05)) for _ in range(4)]

    def read() -> None:
        for index in range(20):
            next(readers[index % 4].images([index]))

    with rejects("6 of 100", "5.0%", path):
        read()
    assert len(path.read_text().splitlines()) == 1 + 6
