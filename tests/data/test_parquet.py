"""Parquet: columns and labels of many makers, the cache of row groups and what it reads twice, and damage."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dssl.data import Subset, UnreadableImage, open_source
from dssl.data import parquet as module
from dssl.data.loader import Batches
from dssl.data.order import Order, ShardOrder, order_of
from tests.data.first_pixel import Maker
from tests.rejecting import rejects

pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, columns: dict, *, rows: int = 4) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pyarrow.table(columns),
        path,
        row_group_size=rows,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )
    os.utime(path, ns=(10**18, 10**18))
    return str(path)


def images(values) -> list[dict]:
    return [{"bytes": png(value), "path": f"{value}.png"} for value in values]


def values(source) -> list[int]:
    return [int(source.image(n)[0, 0, 0]) for n in range(len(source))]


def test_columns(tmp_path):
    nested = open_source(write(tmp_path / "a.parquet", {"image": images(range(6)), "label": [3, 1, 1, 3, 1, 3]}))
    assert values(nested) == [0, 1, 2, 3, 4, 5]
    assert (nested.classes, nested.labels.tolist()) == (("1", "3"), [1, 0, 0, 1, 0, 1])
    assert nested.label_of(2) == "a.parquet/2.png"
    assert nested.shards.tolist() == [0, 4, 6]
    plain = write(
        tmp_path / "b.parquet", {"id": [1, 2], "jpg": [png(7), png(8)], "mask": [b"", b""], "kind": ["x", "y"]}
    )
    assert (values(open_source(plain)), open_source(plain).labels) == ([7, 8], None)
    named = open_source(f"{plain}#image=jpg,label=kind")
    assert (named.classes, named.labels.tolist()) == (("x", "y"), [0, 1])
    assert named.label_of(1) == "b.parquet/row 1"
    (tmp_path / "list.txt").write_text("b.parquet\n")
    assert open_source(f"{tmp_path}/list.txt#image=jpg,label=kind").fingerprint == named.fingerprint
    for text, facts in (
        (f"{plain}#image=id", [plain, "'id'", "id, jpg, mask, kind", "FILES#image=COLUMN"]),
        (f"{plain}#label=mask", [plain, "'mask'", "id, jpg, mask, kind"]),
        (f"{plain}#nonsense", ["'nonsense'", "#image=img,label=fine_label"]),
        (write(tmp_path / "c.parquet", {"x": [1]}), ["c.parquet", "FILES#image=COLUMN"]),
        (write(tmp_path / "d.parquet", {"image": pyarrow.array([], pyarrow.binary())}), ["d.parquet", "no rows"]),
    ):
        with rejects(*facts):
            open_source(text)


@pytest.mark.parametrize(
    ("column", "classes", "numbers"),
    [
        (pyarrow.array(["dog", "cat", "dog"]).dictionary_encode(), ("cat", "dog"), [1, 0, 1]),
        (pyarrow.array([10, 9, 10]).dictionary_encode(), ("9", "10"), [1, 0, 1]),
        (pyarrow.array([True, False, True]), ("False", "True"), [1, 0, 1]),
        (pyarrow.array(["dog", "cat", None]).dictionary_encode(), None, None),
    ],
)
def test_labels_in_dictionary_and_boolean_columns(tmp_path, column, classes, numbers):
    path = write(tmp_path / "a.parquet", {"image": images(range(3)), "label": column})
    for text in (path, f"{path}#label=label"):
        source = open_source(text)
        assert source.classes == classes
        assert (None if source.labels is None else source.labels.tolist()) == numbers


def test_a_class_name_with_half_a_surrogate(tmp_path):
    about = {"info": {"features": {"label": {"names": ["\ud83d", "b"], "_type": "ClassLabel"}}}}
    table = pyarrow.table({"image": images(range(2)), "label": [0, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "a.parquet")
    assert open_source(str(tmp_path / "a.parquet")).labels.tolist() == [0, 1]


def test_a_folder_with_splits_and_missing_labels(tmp_path):
    write(tmp_path / "data/train-0.parquet", {"image": images([1, 2]), "label": ["cat", "dog"]})
    write(tmp_path / "data/train-1.parquet", {"image": images([3]), "label": ["cat"]})
    write(tmp_path / "data/test-0.parquet", {"image": images([4]), "label": ["dog"]})
    train, held = open_source(str(tmp_path / "data")), open_source(str(tmp_path / "data"), split="test")
    assert (values(train), train.labels.tolist()) == ([1, 2, 3], [0, 1, 0])
    assert (values(held), held.labels.tolist()) == ([4], [1])
    write(tmp_path / "u.parquet", {"image": images([1, 2]), "label": [-1, -1]})
    assert open_source(str(tmp_path / "u.parquet")).labels is None
    (tmp_path / "data" / "train-9.tar").write_bytes(b"")
    with rejects(tmp_path / "data", "tar", "Parquet"):
        open_source(str(tmp_path / "data"))


def seen(source, **options) -> list[list[int]]:
    with Batches(source, Maker(), **{"batch_size": 6, "seed": 1, "steps": 80, "threads": 2, **options}) as batches:
        return [batch.views["a"][:, 0, 0, 0].int().tolist() for batch in batches]


def test_the_default_order_reads_each_row_group_about_once(tmp_path):
    """The stated read amplification: 1 and a little for batches that cross from one window into the next."""
    for file in range(4):
        write(tmp_path / f"{file}.parquet", {"image": images(range(file * 60, file * 60 + 60))}, rows=5)
    text = f"{tmp_path}/*.parquet"
    source = open_source(text)
    assert len(source.shards) - 1 == 48
    assert source.window == 16
    whole = seen(source, steps=40)
    assert sorted(value for batch in whole for value in batch) == list(range(240))
    # those of the epoch, and what was read ahead for the first window of the next
    assert 48 <= source._groups.loads <= 48 + 16 + module._SPARE
    assert source._groups.keep <= 3 * 16 + module._SPARE
    uninterrupted = seen(source)
    for start in (3, 40, 41, 67):
        assert seen(open_source(text), start_step=start) == uninterrupted[start:]
    halves = [seen(open_source(text), rank=rank, world_size=2) for rank in range(2)]
    assert [a + b for a, b in zip(*halves, strict=True)] == uninterrupted


def test_which_order_is_the_default(tmp_path):
    source = open_source(write(tmp_path / "a.parquet", {"image": images(range(12))}))
    assert isinstance(order_of(source, batch_size=2, seed=0), ShardOrder)
    assert isinstance(order_of(Subset(source, np.array([1, 5, 9])), batch_size=2, seed=0), ShardOrder)
    for one in (Subset(source, np.array([5, 1, 9])), open_source("shapes:20")):
        assert type(order_of(one, batch_size=2, seed=0)) is Order
    assert type(order_of(source, batch_size=2, seed=0, shuffle="images")) is Order


def test_large_row_groups_have_a_small_window(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"image": images(range(40))}, rows=2)
    size = Path(path).stat().st_size / 20  # of a row group
    monkeypatch.setattr(module, "_CACHE", int(size * 6.5))
    assert open_source(path).window == 3
    monkeypatch.setattr(module, "_CACHE", 1)
    assert open_source(path).window == 1


@pytest.mark.parametrize("change", ["nothing", "touched", "same time", "added", "another column"])
def test_an_index_older_than_its_files_is_rebuilt(tmp_path, monkeypatch, change):
    scans, scan = [], module._scan
    monkeypatch.setattr(module, "_scan", lambda path, columns: (scans.append(path), scan(path, columns=columns))[1])
    columns = {"image": images(range(4)), "label": [0, 1, 0, 1], "other": [1, 1, 0, 0]}
    for number in range(2):
        write(tmp_path / f"{number}.parquet", columns)
    text = f"{tmp_path}/*.parquet"
    before = open_source(text)
    if change == "touched":
        os.utime(tmp_path / "0.parquet", ns=(10**18, 10**18 + 1))
    elif change == "same time":
        write(tmp_path / "0.parquet", {"image": images([9]), "label": [0], "other": [1]})
    elif change == "added":
        write(tmp_path / "2.parquet", columns)
    elif change == "another column":
        text += "#label=other"
    after = open_source(text)
    assert len(scans) == 2 + {"nothing": 0, "added": 3}.get(change, 2)
    assert (before.fingerprint == after.fingerprint) == (change not in ("same time", "added"))
    expected = {"same time": [9, 0, 1, 2, 3], "added": [0, 1, 2, 3] * 3}
    assert values(after) == expected.get(change, [0, 1, 2, 3] * 2)
    if change == "another column":
        assert after.labels.tolist() == [1, 1, 0, 0] * 2


def test_two_processes_build_one_index(tmp_path, cache):
    for number in range(6):
        write(tmp_path / "data" / f"{number}.parquet", {"image": images(range(4)), "label": [0, 1, 0, 1]})
    code = (
        "import sys; from dssl.data import open_source\nfor _ in range(20): print(open_source(sys.argv[1]).fingerprint)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "data")]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(2)
    ]
    said = [process.communicate() for process in processes]
    assert [error for _, error in said] == ["", ""]
    assert len(set(said[0][0].split()) | set(said[1][0].split())) == 1
    assert len(list((cache / "dssl" / "index").iterdir())) == 1


def test_damage(tmp_path, cache):
    path = Path(write(tmp_path / "a.parquet", {"image": images(range(12))}))
    whole = path.read_bytes()
    source = open_source(str(path))
    place = whole.index(png(5)[-30:])
    damaged = bytearray(whole)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(10**18, 10**18))
    assert int(source.image(0)[0, 0, 0]) == 0
    with rejects("a.parquet/5.png", "CRC", error=UnreadableImage):
        source.image(5)
    path.write_bytes(whole + b"x")
    with rejects("a.parquet/9.png", "changed", error=UnreadableImage):
        source.image(9)
    path.unlink()
    with rejects("a.parquet/9.png", os.strerror(errno.ENOENT), error=UnreadableImage):
        source.image(9)
    for content in (b"", b"PAR1", whole[:-9], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with rejects("a.parquet", "Parquet"):
            open_source(str(path))
    write(path, {"image": [*images([1]), {"bytes": None, "path": "gone.png"}]})
    with rejects("a.parquet/gone.png", "no image", error=UnreadableImage):
        open_source(str(path)).image(1)
