"""`shapes`: the same bytes everywhere, classes that pixels do not give away, and splits that share nothing."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

import dssl
from dssl.data import open_source, shapes
from dssl.data.shapes import Shapes, draw
from dssl.errors import DsslError


@pytest.fixture(scope="module")
def train() -> Shapes:
    return Shapes(4000)


@pytest.fixture(scope="module")
def test() -> Shapes:
    return Shapes(1000, split="test")


def pixels(source: Shapes) -> np.ndarray:
    return np.stack([source.image(index) for index in range(len(source))])


def test_an_image_depends_on_its_index_alone():
    some = np.array([7, 2000, 3, 999], np.int64)
    alone = np.concatenate([draw(some[k : k + 1]) for k in range(4)])
    assert np.array_equal(draw(some), alone)
    many = draw(np.arange(1001, dtype=np.int64))
    assert np.array_equal(many[[7, 3, 999]], alone[[0, 2, 3]])


def test_the_bytes_are_those_of_version_2():
    digest = hashlib.sha256(draw(np.arange(200, dtype=np.int64)).tobytes()).hexdigest()
    assert digest == "61b1f7825c7053c3fd422f75b04e3a467e39aefa9013a62c7b402ed432d6f963", (
        "the drawing has changed: raise the version of shapes in shapes.py"
    )


def test_the_bytes_of_figures_are_those_of_version_1():
    digest = hashlib.sha256(draw(np.arange(200, dtype=np.int64), "figures").tobytes()).hexdigest()
    assert digest == "99e0bc71f0e4eba1311b1484120704eb074c3c1487a95b9fcc348414f82ae573", (
        "the drawing has changed: raise the version of figures in shapes.py"
    )


def test_splits_are_disjoint_and_balanced(train, test):
    known = {image.tobytes() for image in pixels(train)}
    assert len(known) == len(train)
    assert not any(image.tobytes() in known for image in pixels(test))
    assert np.bincount(train.labels).tolist() == [400] * 10
    assert np.bincount(test.labels).tolist() == [100] * 10
    assert train.fingerprint != test.fingerprint != Shapes(4001).fingerprint


def test_a_longer_set_begins_with_the_shorter_one(train):
    assert np.array_equal(pixels(Shapes(50)), pixels(train)[:50])


@pytest.mark.parametrize("neighbours", [1, 20])
def test_raw_pixels_say_little(train, test, neighbours):
    flat = [pixels(source).reshape(len(source), -1) for source in (train, test)]
    score = KNeighborsClassifier(neighbours).fit(flat[0], train.labels).score(flat[1], test.labels)
    assert 0.10 < score < 0.30


def test_colours_and_places_say_nothing(train, test):
    """A classifier on each image's histogram of colours, or on where it is bright, is close to guessing."""

    def colours(source):
        found = pixels(source).reshape(len(source), -1, 3) // 32
        return np.stack([[np.bincount(image[:, c], minlength=8) for c in range(3)] for image in found]).reshape(
            len(source), -1
        )

    score = KNeighborsClassifier(20).fit(colours(train), train.labels).score(colours(test), test.labels)
    assert score < 0.25
    means = [pixels(train)[train.labels == label].mean((0, 3)) for label in range(10)]
    assert max(np.abs(a - b).mean() for a in means for b in means) < 8


def test_without_a_place_for_compiled_code(monkeypatch):
    asked = []

    def njit(*, nogil, cache=False):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(shapes.numba, "njit", njit)
    assert shapes.compiled(len)([1, 2]) == 2
    assert asked == [True, False]


def test_the_words_of_the_source():
    source = open_source("shapes:20")
    assert len(source) == 20
    assert len(source.classes) == 10
    assert source.image(3).shape == (32, 32, 3)
    assert source.image(3).flags.c_contiguous
    assert source.label_of(3) == "shapes train 3"
    assert len(open_source("shapes:20", split="test")) == 2000


@pytest.mark.parametrize(
    "text", ["shapes:", "shapes:0", "shapes:-3", "shapes:x", "shapes:1e3", "shapes:99999999999", "shapes:²"]
)
def test_wrong_counts_are_one_line(text):
    with pytest.raises(DsslError) as caught:
        open_source(text)
    assert "\n" not in str(caught.value)


def test_damaged_machine_code_is_rebuilt(tmp_path):
    """A full disk or a power cut leaves half a file; it is a pickle of numba's, which fails in its own ways."""
    expected = hashlib.sha256(draw(np.arange(20)).tobytes()).hexdigest()
    # a copy of the package with the machine code that this process has just used, so that only the rebuilding compiles
    shutil.copytree(Path(dssl.__file__).parent, tmp_path / "dssl", ignore=shutil.ignore_patterns("__pycache__"))
    place = tmp_path / "dssl" / "data" / "__pycache__"
    shutil.copytree(shapes.load_painter().stats.cache_path, place, ignore=shutil.ignore_patterns("*.pyc"))
    code = (
        "import hashlib, numpy as np; from dssl.data.shapes import draw;"
        "print(hashlib.sha256(draw(np.arange(20)).tobytes()).hexdigest())"
    )

    def digest():
        environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
        environment |= {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)

    kept = sorted(place.glob("shapes.*.nbc"))
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    again = digest()
    assert again.stdout.strip() == expected
    assert "damaged and will be rebuilt" in again.stderr
    assert digest().stderr == ""
