"""Folders, ImageNet's layout, lists, and one clear line for whatever is wrong."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import NoSplitError, UnreadableImage, open_source, require_labels
from dssl.errors import DsslError


def picture(path: Path, value: int = 7, size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 0)).save(path, "PNG")


def one_line(text: str, **options) -> str:
    with pytest.raises(DsslError) as caught:
        open_source(text, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    with pytest.raises(DsslError, match="no labels"):
        require_labels(source)


def test_one_class_is_enough_to_train_and_too_few_to_judge(tmp_path):
    picture(tmp_path / "only/1.png")
    source = open_source(str(tmp_path))
    assert source.labels.tolist() == [0]
    with pytest.raises(DsslError, match="only one class, 'only'"):
        require_labels(source)


@pytest.mark.parametrize("below", ["", "ILSVRC/Data/CLS-LOC"])
@pytest.mark.parametrize("test", ["val", "test"])
def test_imagenet_layout(tmp_path, below, test):
    for number, wordnet in enumerate(["n03", "n01", "n02"]):
        picture(tmp_path / below / "train" / wordnet / f"{wordnet}_1.JPEG", number)
    picture(tmp_path / below / test / "n02" / "v.JPEG", 99)
    train, held = open_source(str(tmp_path)), open_source(str(tmp_path), split="test")
    assert train.classes == held.classes == ("n01", "n02", "n03")
    assert train.labels.tolist() == [0, 1, 2]
    assert held.labels.tolist() == [1]  # as in training, although it is the only class there
    picture(tmp_path / below / test / "n09" / "v.JPEG")
    assert "n09" in one_line(str(tmp_path), split="test")


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
    with pytest.raises(UnreadableImage, match=r"missing\.png: No such file"):
        other.image(1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"\n\r\n", "empty"),
        (b"a.png\tx\nb.png\n", "line 2"),
        (b"a.png\nb.png\ty\n", "line 2"),
        (b"\x89PNG\0", "list"),
    ],
)
def test_lists_with_mistakes(tmp_path, content, expected):
    (tmp_path / "list.txt").write_bytes(content)
    assert expected in one_line(str(tmp_path / "list.txt"))


def test_folders_with_mistakes(tmp_path):
    assert "empty" in one_line(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    assert "none of its 1 files is an image" in one_line(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.jpg")
    assert "FIFO" in one_line(str(tmp_path))
    assert "FIFO" in one_line(str(tmp_path / "pipe.jpg"))
    assert "No such file" in one_line(str(tmp_path / "nowhere"))
    one_line("a\0b")
    one_line("")
    one_line("new\nline")
    assert "channels" in one_line("shapes", channels=1)
    assert "channels" in one_line(str(tmp_path), channels=4)
    assert "split" in one_line("shapes", split="val")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read(tmp_path):
    (tmp_path / "secret").mkdir(mode=0)
    assert "secret" in one_line(str(tmp_path))


def test_names_that_are_no_text_are_printable(tmp_path):
    raw = os.fsencode(tmp_path) + b"/x\xff\n\x1b[31m.png"
    picture(tmp_path / "ok.png")
    Path(os.fsdecode(raw)).write_bytes((tmp_path / "ok.png").read_bytes())
    source = open_source(str(tmp_path))
    names = [source.label_of(index) for index in range(2)]
    assert names == ["ok.png", "x\\udcff\\n\\x1b[31m.png"]
    assert np.array_equal(source.image(0), source.image(1))
