"""The probe against scikit-learn's LogisticRegression on real features."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dssl.errors import DsslError
from dssl.evaluation import probe
from dssl.evaluation.probe import DEFAULT_STRENGTH, Problem, choose_strength, scaling_of, share_of_classes, split
from tests.counting import Counted


@pytest.mark.parametrize(("strength", "count"), [(1e-2, 2000), (1e-4, 2000), (1e-6, 2000), (1e-4, 60)])
def test_objective_and_accuracy_equal_scikit_learn(strength: float, count: int, real: Any) -> None:
    """With 60 images of 256 numbers, too: fewer labels than dimensions."""
    train = real.train[:count]
    found = Problem(train, real.train_labels[:count], classes=6).solve(strength)
    scaled = ((train.double() - train.double().mean(0)) / found.scaling.scale).numpy()
    labels = real.train_labels[:count].numpy()
    model = LogisticRegression(C=1 / (strength * len(labels)), tol=1e-8, max_iter=20_000, solver="newton-cg")
    model.fit(scaled, labels)

    def objective(weight: np.ndarray, bias: np.ndarray) -> float:
        logits = scaled @ weight.T + bias
        logits -= logits.max(axis=1, keepdims=True)
        loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
        return float(loss.mean() + 0.5 * strength * (weight**2).sum())

    theirs = objective(model.coef_, model.intercept_)
    ours = objective(found.weight.double().numpy(), found.bias.double().numpy())
    assert ours <= theirs * 1.001
    assert abs(ours - theirs) <= 0.001 * theirs
    assert ours == pytest.approx(found.objective, rel=1e-4)
    test = ((real.test.double() - train.double().mean(0)) / found.scaling.scale).numpy()
    right = [
        (guess == real.test_labels.numpy()).mean() for guess in (model.predict(test), found.predict(real.test).numpy())
    ]
    assert abs(right[0] - right[1]) <= 0.002
    assert right[1] > (0.2 if count == 2000 else 0.1)  # chance is 0.17


def test_the_optimum_does_not_depend_on_start_or_rotation_or_scale(real: Any) -> None:
    problem = Problem(real.train, real.train_labels, classes=6, dtype=torch.float64)
    cold = problem.solve(1e-4, tolerance=1e-9)
    warm = problem.solve(1e-4, start=problem.solve(1e-2), tolerance=1e-9)
    assert warm.objective == pytest.approx(cold.objective, rel=1e-8)
    assert cold.gradient < 1e-7
    torch.manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(256, 256, dtype=torch.float64))
    turned = Problem(7 * real.train.double() @ turn, real.train_labels, classes=6, dtype=torch.float64).solve(1e-4)
    assert turned.objective == pytest.approx(cold.objective, rel=1e-5)


def test_strength_is_chosen_on_a_part_of_the_training_set_alone(real: Any) -> None:
    choice = choose_strength(real.train, real.train_labels, classes=6, seed=0)
    assert choice.held_out == pytest.approx(200, abs=6)
    best = max(accuracy for _, accuracy in choice.accuracies)
    assert dict(choice.accuracies)[choice.strength] == best
    # labels without any meaning want the strongest regularisation that says as much as the best
    shuffled = real.train_labels[torch.from_numpy(np.random.default_rng(0).permutation(2000))]
    assert len(choose_strength(real.train, shuffled, classes=6, seed=0).accuracies) == 7


def test_split_takes_its_share_of_every_class_and_depends_on_the_seed() -> None:
    labels = np.repeat([0, 1, 2, 3], [100, 50, 2, 1])
    fit, judge = split(labels, seed=0)
    assert sorted([*fit, *judge]) == list(range(153))
    assert np.bincount(labels[judge], minlength=4).tolist() == [10, 5, 1, 0]
    assert judge.tolist() != split(labels, seed=1)[1].tolist()
    assert judge.tolist() == split(labels, seed=0)[1].tolist()


def test_a_share_of_the_labels_is_balanced_and_nested() -> None:
    labels = np.repeat(np.arange(3), [1000, 500, 20])
    one, ten = (share_of_classes(labels, share, stream=0) for share in (0.01, 0.1))
    assert np.bincount(labels[one]).tolist() == [10, 5, 1]
    assert np.bincount(labels[ten]).tolist() == [100, 50, 2]
    assert set(one) <= set(ten)
    assert set(one) != set(share_of_classes(labels, 0.01, stream=1))


def test_too_few_images_take_the_default() -> None:
    choice = choose_strength(torch.eye(4), torch.tensor([0, 1, 0, 1]), classes=2, seed=0)
    assert (choice.strength, choice.held_out) == (DEFAULT_STRENGTH, 0)


def test_constant_features_and_broken_ones() -> None:
    flat = Problem(torch.ones(20, 3), torch.tensor([0, 1, 1, 1] * 5), classes=2).solve(1e-4)
    assert flat.predict(torch.ones(2, 3)).tolist() == [1, 1]  # the larger class, by the bias alone
    with pytest.raises(DsslError, match="NaN"):
        scaling_of(torch.full((2, 2), float("nan")))


def test_features_of_low_rank_are_solved_with_the_weakest_regularisation() -> None:
    """One direction outweighs the others a thousand times, and most dimensions repeat: the rounded covariance is not positive."""
    torch.manual_seed(0)
    useful = torch.randn(600, 8)
    labels = (useful[:, 1] > 0).long()
    useful[:, 0] *= 1000
    features = useful @ torch.randn(8, 256)
    single = Problem(features, labels, classes=2).solve(1e-8)
    double = Problem(features.double(), labels, classes=2, dtype=torch.float64).solve(1e-8)
    assert single.objective == pytest.approx(double.objective, abs=0.01)
    assert (single.predict(features) == labels).double().mean() > 0.97


def test_blocks_bound_memory_and_change_nothing(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 of 2,000 rows: beside the features and their scaled copy, far less than either is ever alive."""
    train = real.train.double()
    whole = Problem(train, real.train_labels, classes=6, dtype=torch.float64).solve(1e-4, tolerance=1e-9)
    expected = whole.predict(real.test)
    monkeypatch.setattr(probe, "_BLOCK", 64 * train.shape[1])
    with Counted("cpu") as counted:
        counted.count(train)
        problem = Problem(train, real.train_labels, classes=6, dtype=torch.float64)
        solved = problem.solve(1e-4, tolerance=1e-9)
        predicted = solved.predict(real.test)
    square = 8 * train.shape[1] ** 2  # of the covariance and its factor
    assert counted.peak - 2 * train.nbytes < train.nbytes / 4 + 4 * square
    assert len(problem._rows) == -(-len(train) // 64)
    assert solved.objective == pytest.approx(whole.objective, rel=1e-9)
    torch.testing.assert_close(solved.weight, whole.weight, rtol=0, atol=1e-4 * float(whole.weight.abs().max()))
    assert torch.equal(predicted, expected)


def test_features_that_a_device_cannot_hold_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be seen without a GPU: what decides is the free memory of the device."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    gpu = torch.device("cuda", 0)
    assert [probe._holds(gpu, 500), probe._holds(gpu, 501), probe._holds(torch.device("cpu"), 10**15)] == [
        True,
        False,
        True,
    ]
