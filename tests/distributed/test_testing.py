"""``dssl.testing.assert_same_on`` finds the usual mistakes of a loss on several processes, and names them."""

import pytest
import torch
from torch import nn

from dssl.errors import DsslError
from dssl.methods.losses import nt_xent
from dssl.testing import Comparison, assert_same_on, compare_on
from tests.distributed import losses


def ours(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nt_xent(z, y, temperature=0.2)


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    functions = [
        losses.right, losses.own_rows_only, losses.gather_without_gradient, losses.reduce_right, losses.failing,
        losses.reduce_without_gradient, losses.divided_once_too_often, ours,
    ]  # fmt: skip
    return compare_on({one.__name__: one for one in functions} | {"prototypes": losses.WithPrototypes()})


@pytest.mark.parametrize("name", ["right", "reduce_right", "prototypes", "ours"])
def test_a_right_loss_passes(found: dict[str, Comparison], name: str) -> None:
    assert found[name].problem == ""
    assert found[name].factor == pytest.approx(1, abs=1e-4)
    assert found[name].deviation < 1e-4


def test_a_factor_is_told_from_a_missing_gradient(found: dict[str, Comparison]) -> None:
    divided = found["divided_once_too_often"]
    assert divided.factor == pytest.approx(0.5, abs=1e-5)
    assert divided.value_ratio == pytest.approx(0.5, abs=1e-5)
    assert divided.gradient_reaches_other_rows
    assert "0.5 times" in divided.problem

    reduced = found["reduce_without_gradient"]
    assert reduced.factor == pytest.approx(0.5, abs=1e-5)
    assert reduced.value_ratio == pytest.approx(1, abs=1e-5)
    assert (reduced.sees_other_rows, reduced.gradient_reaches_other_rows) == (True, False)
    assert "0.5 times" in reduced.problem

    gathered = found["gather_without_gradient"]
    assert gathered.value_ratio == pytest.approx(1, abs=1e-5)
    assert gathered.deviation > 0.01
    assert (gathered.sees_other_rows, gathered.gradient_reaches_other_rows) == (True, False)
    assert gathered.problem


def test_a_loss_of_each_processs_own_rows_is_named(found: dict[str, Comparison]) -> None:
    assert not found["own_rows_only"].sees_other_rows
    assert found["own_rows_only"].problem


def test_an_error_is_reported_with_its_process_and_takes_no_other_loss_with_it(found: dict[str, Comparison]) -> None:
    assert "process 1: FloatingPointError: seven" in found["failing"].problem
    assert found["ours"].problem == ""


def test_a_loss_that_waits_for_ever_ends() -> None:
    with pytest.raises(AssertionError, match="process 0"):
        assert_same_on(losses.stuck, timeout=10)


def test_what_cannot_be_sent_or_run_is_an_error() -> None:
    with pytest.raises(DsslError, match="lambda"):
        assert_same_on(lambda z, y: (z * y).mean())
    with pytest.raises(DsslError, match="processes is 1"):
        assert_same_on(nn.MSELoss(), processes=1)
