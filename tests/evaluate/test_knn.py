"""kNN against scikit-learn with the same weights, and its edges."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from dssl.evaluation.knn import knn_accuracy, knn_predict, largest, neighbours
from tests.counting import Counted
from tests.rejecting import rejects


def sklearn_predictions(real: Any, k: int, temperature: float) -> torch.Tensor:
    train, test = (F.normalize(part.double(), dim=1).numpy() for part in (real.train, real.test))
    # |a - b|² = 2 - 2 cos for vectors of length 1
    model = KNeighborsClassifier(
        n_neighbors=k, algorithm="brute", metric="euclidean", weights=lambda d: np.exp((1 - d**2 / 2) / temperature)
    )
    return torch.from_numpy(model.fit(train, real.train_labels.numpy()).predict(test))


@pytest.mark.parametrize("k", [1, 20, 200])
@pytest.mark.parametrize("temperature", [0.1, 0.02])
def test_every_prediction_equals_scikit_learn(k: int, temperature: float, real: Any) -> None:
    expected = sklearn_predictions(real, k, temperature)
    settings = {"k": [k], "temperature": temperature, "classes": 6}
    (precise,) = knn_predict(real.train.double(), real.train_labels, real.test.double(), **settings)
    assert torch.equal(precise, expected)
    (single,) = knn_predict(real.train, real.train_labels, real.test, **settings)
    assert (single == expected).double().mean() >= 0.999
    assert 0.2 < (expected == real.test_labels).double().mean() < 1  # of six classes: they say something, and not all


@pytest.mark.parametrize(("block", "train_block"), [(1, 7), (512, 64), (3, 100_000), (10_000, 199)])
def test_blocks_change_nothing(block: int, train_block: int, real: Any) -> None:
    train, test = real.train.double(), real.test[:50].double()
    whole, where = neighbours(train, test, k=30, block=10_000, train_block=10_000)
    value, index = neighbours(train, test, k=30, block=block, train_block=train_block)
    torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)
    assert torch.equal(index, where)


def test_memory_is_bounded_by_the_blocks(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, places = set(), set()
    original = torch.mm

    def watched(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.add(out.numel())
        places.add(out.data_ptr())
        return original(one, other, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    with Counted("cpu") as counted:
        counted.count(real.train)
        counted.count(real.test)
        neighbours(real.train, real.test, k=5, block=16, train_block=128)
    assert max(sizes) == 16 * 128
    assert len(places) == 1
    rows, width = len(real.test), real.train.shape[1]
    held = (
        4 * (16 * 128 + 3 * (128 + 16) * width) + (4 + 8) * 5 * rows
    )  # similarities, a few copies of the rows, results
    assert counted.peak - real.train.nbytes - real.test.nbytes < 1.2 * held + 4096


@given(st.data())
def test_the_largest_are_those_of_a_full_sort(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, width))
    levels = data.draw(st.sampled_from([3, 10**6]))  # few levels: ties, among which any choice is right
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    values = torch.randint(0, levels, (rows, width), generator=generator).double()
    found, places = largest(values, k)
    assert torch.equal(found, values.sort(dim=1, descending=True).values[:, :k])
    assert torch.equal(values.gather(1, places), found)
    assert all(len(set(row)) == k for row in places.tolist())


def test_several_k_share_a_search(real: Any) -> None:
    both = knn_predict(real.train, real.train_labels, real.test, k=[20, 200], temperature=0.1, classes=6)
    for k, found in zip((20, 200), both, strict=True):
        (alone,) = knn_predict(real.train, real.train_labels, real.test, k=[k], temperature=0.1, classes=6)
        assert torch.equal(found, alone)


def test_accuracy_counts_every_test_row() -> None:
    train = torch.eye(4)
    labels = torch.arange(4)
    test = torch.eye(4)[[0, 1, 2, 3, 0, 1, 2]]
    wrong = torch.tensor([0, 1, 2, 3, 0, 1, 0])  # only the last is wrong: it must count
    assert knn_accuracy(train, labels, test, wrong, k=1, temperature=0.1, classes=4) == 6 / 7


def test_fewer_training_rows_than_k_let_all_vote_and_small_temperatures_do_not_overflow() -> None:
    train, labels = torch.eye(3), torch.tensor([0, 1, 1])
    assert knn_accuracy(train, labels, torch.eye(3)[:1], torch.tensor([0]), k=200, temperature=1e-4, classes=2) == 1.0
    assert knn_accuracy(train, labels, torch.eye(3)[:1], torch.tensor([1]), k=200, temperature=100, classes=2) == 1.0


def test_nonsense_is_one_line() -> None:
    good, labels = torch.eye(3), torch.arange(3)
    call = {"k": [1], "temperature": 0.1, "classes": 3}
    for train, test, extra, facts in [
        (good * float("nan"), good, {}, ["training features", "NaN"]),
        (good, good[:0], {}, ["kNN", "3 and 0"]),
        (good, torch.eye(4), {}, ["(3, 3)", "(4, 4)"]),
        (good, good, {"k": [0]}, ["k", 0, 1]),
        (good, good, {"temperature": 0.0}, ["temperature", 0.0, 0.1]),
    ]:
        with rejects(*facts):
            knn_predict(train, labels, test, **{**call, **extra})
    with rejects("3 training", "2 labels"):
        knn_predict(good, labels[:2], good, **call)
    with rejects("3 test", "2 labels"):
        knn_accuracy(good, labels, good, labels[:2], k=1, temperature=0.1, classes=3)
