"""Folders, ImageNet's layout, lists, and one clear line for whatever is wrong."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import NoSplitError, Subset, UnreadableImage, open_source, require_labels
from dssl.data.folder import holds
from dssl.data.index import open_index
from dssl.errors import DsslError
from tests.rejecting import rejects


def picture(path: Path, value: int = 7, size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path, "PNG")


def refused(text: object, *facts: object, **options) -> None:
    with rejects(*facts):
        open_source(str(text), **options)


def test_class_folders(tmp_path):
    for value, name in enumerate(["cat/1.png", "cat/sub/2.png", "ant/3.png"]):
        picture(tmp_path / name, value)
    (tmp_path / "empty").mkdir()
    source = open_source(str(tmp_path))
    assert source.classes == ("ant", "cat")
    names = [source.label_of(index) for index in range(len(source))]
    assert dict(zip(names, source.labels.tolist(), strict=True)) == {"ant/3.png": 0, "cat/1.png": 1, "cat/sub/2.png": 1}
    values = {source.label_of(index): int(source.image(index)[0, 0, 0]) for index in range(3)}
    assert values == {"cat/1.png": 0, "cat/sub/2.png": 1, "ant/3.png": 2}
    assert source.image(0).shape == (4, 5, 3)
    assert open_source(str(tmp_path), channels=1).image(0).shape == (4, 5, 1)


def test_a_folder_without_classes(tmp_path):
    for name in ("1.png", "cat/2.png"):
        picture(tmp_path / name)
    source = open_source(str(tmp_path))
    assert source.classes is None
    assert source.labels is None
    with rejects(tmp_path, "no labels", ".cls or .json"):
        require_labels(source)


def test_one_class_is_enough_to_train_and_too_few_to_judge(tmp_path):
    picture(tmp_path / "only/1.png")
    source = open_source(str(tmp_path))
    assert source.labels.tolist() == [0]
    with pytest.raises(DsslError, match="'only'"):
        require_labels(source)


@pytest.mark.parametrize("below", ["", "ILSVRC/Data/CLS-LOC"])
@pytest.mark.parametrize("test", ["val", "test"])
def test_imagenet_layout(tmp_path, below, test):
    for number, wordnet in enumerate(["n03", "n01", "n02"]):
        picture(tmp_path / below / "train" / wordnet / f"{wordnet}_1.JPEG", number)
    (tmp_path / below / "train" / "n00").mkdir()  # without images it is no class, in either split
    picture(tmp_path / below / test / "n02" / "v.JPEG", 99)
    train, held = open_source(str(tmp_path)), open_source(str(tmp_path), split="test")
    assert train.classes == held.classes == ("n01", "n02", "n03")
    assert train.labels.tolist() == [0, 1, 2]
    assert held.labels.tolist() == [1]  # as in training, although it is the only class there
    picture(tmp_path / below / test / "n09" / "v.JPEG")
    refused(tmp_path, "'n09'", split="test")


def test_train_is_a_class_among_others(tmp_path):
    for name in ("bus", "car", "train"):
        for number in range(5):
            picture(tmp_path / name / f"{number}.png")
    source = open_source(str(tmp_path))
    assert source.classes == ("bus", "car", "train")
    assert np.bincount(source.labels).tolist() == [5, 5, 5]
    with pytest.raises(NoSplitError):
        open_source(str(tmp_path), split="test")
    assert source.earlier_fingerprints() == ()


@pytest.mark.parametrize(
    ("names", "classes", "count"),
    [
        (["train/a/1.png", "train/b/2.png"], ("a", "b"), 2),  # all there is: a split without its test images
        (["train/a/1.png", "train/b/2.png", ".cache/3.png"], ("a", "b"), 2),
        (["train/a/1.png", "run/config.json", "run/checkpoints/x", "run/views.png"], ("a",), 1),
        (["train/a/1.png", "runs/r/config.json", "runs/r/checkpoints/x", "runs/r/views.png"], ("a",), 1),
        (["train/a/1.png", "runs/r/3.png"], ("runs", "train"), 2),
        (["train/a/1.png", "train/2.png"], ("train",), 2),
        (["train/a/1.png", "2.png"], None, 2),
        (["train/a/1.png", "cat/2.png"], ("cat", "train"), 2),
    ],
)
def test_train_without_a_test_split_beside_it(tmp_path, names, classes, count):
    for name in names:
        picture(tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    source = open_source(str(tmp_path))
    assert source.classes == classes
    assert len(source) == count


def test_folders_without_images_beside_a_lone_train_change_nothing(tmp_path):
    picture(tmp_path / "train" / "a" / "1.png")
    picture(tmp_path / "train" / "b" / "2.png")
    alone = open_source(str(tmp_path))
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "1.xml").write_text("<a/>")
    (tmp_path / "train" / "a" / "notes").mkdir()
    source = open_source(str(tmp_path))
    assert source.classes == ("a", "b")
    assert source.fingerprint == alone.fingerprint
    # as a7351d8 computed them: of the folder train, and of the folder around it, in which train was then a class
    before = {open_index(tmp_path / "train").earlier_fingerprint(), open_index(tmp_path).earlier_fingerprint()}
    assert set(source.earlier_fingerprints()) == before
    half = Subset(source, np.array([1]))
    choice = half.fingerprint.removeprefix(source.fingerprint)
    assert set(half.earlier_fingerprints()) == {fingerprint + choice for fingerprint in before}


def test_an_empty_test_folder_is_no_test_split(tmp_path):
    picture(tmp_path / "train" / "a" / "1.png")
    (tmp_path / "val").mkdir()
    with rejects(tmp_path / "val", "empty", error=NoSplitError):
        open_source(str(tmp_path), split="test")
    (tmp_path / "val" / "1.png").symlink_to("nowhere")
    with rejects(tmp_path / "val", "1.png") as caught:
        open_source(str(tmp_path), split="test")
    assert not isinstance(caught.value, NoSplitError)


def test_two_subsets_are_told_apart_by_more_than_their_number(tmp_path):
    for number in range(4):
        picture(tmp_path / f"{number}.png", number)
    source = open_source(str(tmp_path))
    chosen = [np.array(indices, np.int64) for indices in ([0, 1], [0, 2], [1, 0], [0, 1, 2])]
    prints = [Subset(source, indices).fingerprint for indices in chosen]
    assert len(set(prints)) == 4
    assert Subset(source, chosen[0].copy()).fingerprint == prints[0]
    assert Subset(source, chosen[1]).image(1)[0, 0, 0] == 2
    inside = [Subset(Subset(source, chosen[number]), np.array([0])).fingerprint for number in (0, 1)]
    assert inside[0] != inside[1]


def test_the_home_folder_is_found_in_every_kind_of_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    picture(tmp_path / "photos" / "1.png")
    (tmp_path / "list.txt").write_text("photos/1.png\n")
    for text in ("~/photos", "~/list.txt"):
        assert open_source(text).image(0).shape == (4, 5, 3)
    refused("cifar10:~/cifar", tmp_path / "cifar", "dssl data cifar10 FOLDER")
    refused("packed:~/packed", tmp_path / "packed", "dssl data pack SOURCE --out FOLDER")
    refused("~nobody-of-this-name/photos", "'~nobody-of-this-name/photos'")


def test_where_a_picture_would_become_part_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("flat/1.png", "split/train/a/1.png", "split/val/a/2.png"):
        picture(tmp_path / name)
    (tmp_path / "link").symlink_to("flat")
    flat, split = str(tmp_path / "flat"), str(tmp_path / "split")
    assert holds(flat, tmp_path / "flat")
    assert holds("~/flat", tmp_path / "link" / "runs" / "new")
    assert holds(split, tmp_path / "split" / "train" / "run")
    assert holds(split, tmp_path / "split" / "val" / "run")
    assert not holds(split, tmp_path / "split" / "run")
    assert not holds(flat, tmp_path / "flatter")
    assert not holds("shapes", Path("shapes/run"))


def test_no_test_split_can_be_told_from_other_mistakes(tmp_path):
    picture(tmp_path / "1.png")
    with pytest.raises(NoSplitError):
        open_source(str(tmp_path), split="test")


def test_lists(tmp_path):
    for number, name in enumerate(["a b.png", "sub/größe.png", "c.png"]):
        picture(tmp_path / name, number)
    listing = tmp_path / "lists" / "train.txt"
    listing.parent.mkdir()
    listing.write_bytes(f"../a b.png\tx\r\n\n../sub/größe.png\ty\n{tmp_path}/c.png\tx".encode())
    source = open_source(str(listing))
    assert [int(source.image(index)[0, 0, 0]) for index in range(3)] == [0, 1, 2]
    assert source.classes == ("x", "y")
    assert source.labels.tolist() == [0, 1, 0]
    listing.write_text("../a b.png\nmissing.png\n")
    other = open_source(str(listing))
    assert other.labels is None
    assert other.fingerprint != source.fingerprint
    with rejects(tmp_path / "lists" / "missing.png", os.strerror(errno.ENOENT), error=UnreadableImage):
        other.image(1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"\n\r\n", "empty"),
        (b"a.png\tx\nb.png\n", "line 2"),
        (b"a.png\nb.png\ty\n", "line 2"),
        (b"\x89PNG\0", "text list"),
    ],
)
def test_lists_with_mistakes(tmp_path, content, expected):
    (tmp_path / "list.txt").write_bytes(content)
    refused(tmp_path / "list.txt", tmp_path / "list.txt", expected)


def test_folders_with_mistakes(tmp_path):
    refused(tmp_path, tmp_path, "empty")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, tmp_path, "1 files", ".jpg, .png")
    os.mkfifo(tmp_path / "pipe.jpg")
    refused(tmp_path, "pipe.jpg", "FIFO")
    refused(tmp_path / "pipe.jpg", tmp_path / "pipe.jpg", "FIFO")
    refused(tmp_path / "nowhere", tmp_path / "nowhere", os.strerror(errno.ENOENT))
    for text in ("a\0b", "", "new\nline"):
        refused(text, repr(text.replace("\0", r"\x00").replace("\n", r"\n")))
    refused("shapes", "3 channels", 1, channels=1)
    refused(tmp_path, "channels 0", 1024, channels=0)
    refused(tmp_path, tmp_path, "2 files", ".npy, .png", channels=4)
    refused("shapes", "'val'", "train or test", split="val")


def test_names_that_are_no_text_are_printable(tmp_path):
    raw = os.fsencode(tmp_path) + b"/x\xff\n\x1b[31m.png"
    picture(tmp_path / "ok.png")
    Path(os.fsdecode(raw)).write_bytes((tmp_path / "ok.png").read_bytes())
    source = open_source(str(tmp_path))
    names = [source.label_of(index) for index in range(2)]
    assert names == ["ok.png", "x\\udcff\\n\\x1b[31m.png"]
    assert np.array_equal(source.image(0), source.image(1))


def test_several_images_at_once_are_those_read_alone(tmp_path):
    for value in range(6):
        picture(tmp_path / "data" / f"{value}.png", value)
    (tmp_path / "data" / "2.png").write_bytes(b"nothing")
    (tmp_path / "list.txt").write_text("".join(f"data/{value}.png\n" for value in range(6)))
    folder = open_source(str(tmp_path / "data"))
    subset = Subset(folder, np.array([5, 2, 0]))
    for source, values in ((folder, [1, None, 4]), (open_source(str(tmp_path / "list.txt")), [1, None, 4])):
        found = list(source.read([1, 2, 4]))
        assert [None if isinstance(one, UnreadableImage) else one[0, 0, 0] for one in found] == values
        assert found[1].path == str(tmp_path / "data" / "2.png")
    assert [isinstance(one, UnreadableImage) or int(one[0, 0, 0]) for one in subset.read([2, 1, 0])] == [
        0,
        True,
        5,
    ]
    assert list(subset.read([])) == []
    assert [image[0, 0].tolist() for image in open_source("shapes:4").read([3, 1])] == [
        open_source("shapes:4").image(index)[0, 0].tolist() for index in (3, 1)
    ]


@pytest.mark.parametrize("place", ["data", "list.txt"])
def test_a_stamp_looks_at_each_file_once(tmp_path, monkeypatch, place):
    """And at none that the scan of a folder has looked at."""
    for value in range(6):
        picture(tmp_path / "data" / f"{value}.png", value)
    (tmp_path / "list.txt").write_text("".join(f"data/{value}.png\n" for value in range(6)))
    source = open_source(str(tmp_path / place))
    half = Subset(Subset(source, np.array([5, 2, 0])), np.array([1, 2]))
    looked: list[str] = []
    look = os.stat

    def counted(path, *arguments, **options):
        looked.append(os.fsdecode(path))
        return look(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", counted)
        stamps = {half.stamp(), source.stamp([2, 0]), Subset(source, np.array([2, 0])).stamp()}
        assert len(stamps) == 1
        again = (0, 2) if place == "list.txt" else ()
        assert sorted(looked) == sorted(str(tmp_path / "data" / f"{value}.png") for value in again)
        whole = source.stamp()
        assert source.stamp() == whole not in stamps
        assert len(looked) == len(set(looked)) == (6 if place == "list.txt" else 0)
    (tmp_path / "data" / "2.png").unlink()
    assert source.stamp() == whole
    assert open_source(str(tmp_path / place)).stamp() != whole
    assert open_source("shapes:4").stamp() == ""
