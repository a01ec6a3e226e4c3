"""When a run ends, and what is not exported."""

import math

import pytest
import torch

from engines.config import EngineConfig
from engines.nonfinite import FiniteGuard, NonFiniteError, finite_tensors

BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (math.nan, math.nan)]


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_stop_ends_at_the_first(loss: float, norm: float) -> None:
    guard = FiniteGuard(EngineConfig())
    guard.check(1, 0.5, 2.0)
    assert (guard.skipped, guard.in_a_row) == (0, 0)
    guard.check_export()
    what = f"the loss is {loss};" if not math.isfinite(loss) else rf"the gradient norm is {norm} \(loss 1\);"
    with pytest.raises(NonFiniteError, match=f"^step 2: {what} no update was made. lower lr, .*on_nonfinite='skip'"):
        guard.check(2, loss, norm)
    assert (guard.skipped, guard.in_a_row) == (1, 1)


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_skip_ends_at_the_tenth_in_a_row(loss: float, norm: float) -> None:
    guard = FiniteGuard(EngineConfig(on_nonfinite="skip"), skipped=3)
    for step in range(1, 10):
        guard.check(step, loss, norm)
        assert (guard.skipped, guard.in_a_row) == (3 + step, step)
        guard.check_export()  # of the weights that were there before these steps
    guard.check(10, 1.0, 1.0)
    assert (guard.skipped, guard.in_a_row) == (12, 0)
    guard.check_export()
    for step in range(1, 10):
        guard.check(step, loss, norm)
    with pytest.raises(NonFiniteError, match=r"^step 20: the .*, and 10 steps in a row made no update: lower lr"):
        guard.check(20, loss, norm)
    assert guard.skipped == 22
    with pytest.raises(NonFiniteError, match=r"^the last 10 steps made no update"):
        guard.check_export()


def test_tensors_are_handed_on_until_one_is_not_finite() -> None:
    tensors = [
        ("a", torch.ones(2)),
        ("b", torch.tensor([1, 2])),
        ("c", torch.tensor([1.0, math.inf])),
        ("d", torch.ones(1)),
    ]
    checked = finite_tensors(tensors)
    assert next(checked) == tensors[0]
    assert next(checked) == tensors[1]
    with pytest.raises(NonFiniteError, match=r"^c has values that are not finite"):
        next(checked)
    with pytest.raises(NonFiniteError, match=r"^n has"):
        list(finite_tensors([("n", torch.tensor([math.nan, 0.0]).bfloat16())]))
    assert len(list(finite_tensors(tensors[:2]))) == 2
