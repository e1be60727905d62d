"""lightly's losses on two processes."""

import pytest

from dssl.testing import compare_on

lightly = pytest.importorskip("lightly.loss", reason="make test-integrations installs lightly")


def test_a_loss_that_gathers_is_told_from_one_that_does_not() -> None:
    losses = {str(gather): lightly.NTXentLoss(gather_distributed=gather) for gather in (True, False)}
    found = compare_on(losses, timeout=300)
    assert found["True"].problem == ""
    assert found["True"].gradient_reaches_other_rows
    assert found["False"].problem
    assert not found["False"].sees_other_rows
