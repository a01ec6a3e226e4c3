"""Losses and their sums against the papers' formulas, token by token in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import losses

log_prob = st.floats(-6, -0.01)
token = st.tuples(log_prob, log_prob, st.floats(-3, 3))


def ppo_oracle(new, old, advantage, low, high, dual):
    """PPO's equation 7, with the dual clip's equation 5, for one token."""
    rho = math.exp(new - old)
    bounded = min(max(rho, 1 - low), 1 + high)
    objective = min(rho * advantage, bounded * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@given(
    st.lists(token, min_size=1, max_size=12), st.sampled_from([(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 3.0)])
)
def test_ppo_clip_equals_the_formula(rows, bounds):
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    got = losses.ppo_clip(new, old, advantage, *bounds).loss
    want = [ppo_oracle(*row, *bounds) for row in rows]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_ppo_gradient_is_zero_exactly_where_clipped():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5, 0.5, 1.5, 9.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    new = ratio.log().requires_grad_()
    got = losses.ppo_clip(new, torch.zeros_like(ratio), advantage, 0.2, 0.2, dual_clip=3.0)
    got.loss.sum().backward()
    # With A > 0 only a ratio above the range is cut; with A < 0 only one below it, and the dual bound cuts the far one.
    want = torch.where(torch.tensor([0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool), 0.0, -ratio * advantage)
    torch.testing.assert_close(new.grad, want)
    assert got.clipped_high.tolist() == [False, False, False, False, True, False, False, False]
    assert got.clipped_low.tolist() == [False, False, False, False, False, True, False, False]
    assert got.clipped_dual.tolist() == [False] * 7 + [True]


def test_on_policy_ppo_has_the_policy_gradient():
    new = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantage = torch.linspace(-1, 1, 9, dtype=torch.float64)
    (ppo,) = torch.autograd.grad(losses.ppo_clip(new, new.detach(), advantage).loss.sum(), new)
    (reinforce,) = torch.autograd.grad(losses.policy_gradient(new, advantage).sum(), new)
    (soft,) = torch.autograd.grad(losses.cispo(new, new.detach(), advantage).loss.sum(), new)
    torch.testing.assert_close(ppo, reinforce)
    torch.testing.assert_close(soft, reinforce)
    torch.testing.assert_close(reinforce, -advantage)


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    new = torch.tensor([2.0, -2.0, 0.1], dtype=torch.float64).requires_grad_()
    got = losses.cispo(new, torch.zeros_like(new), torch.tensor([1.0, -1.0, 2.0]), clip_low=0.5, clip_high=0.3)
    got.loss.sum().backward()
    weight = torch.tensor([1.3, 0.5, math.exp(0.1)], dtype=torch.float64)
    torch.testing.assert_close(new.grad, -weight * torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64))


LENGTHS = (3, 1, 4)
CU = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
VALUES = torch.tensor([math.nan, 1.0, 2.0, math.inf, 50.0, 4.0, 60.0, 8.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("token", (1 + 2 + 4 + 8) / 4),
        ("sequence", ((1 + 2) / 2 + (4 + 8) / 2) / 2),
        ("constant", (1 + 2 + 4 + 8) / (2 * 10)),
    ],
)
def test_aggregations_by_hand(how, want):
    limit = 10 if how == "constant" else None
    got = losses.aggregate(VALUES, MASK, CU, how, tokens=4, sequences=2, max_tokens=limit)
    assert float(got) == pytest.approx(want, abs=1e-12)


def test_nothing_trained_is_zero_not_nan():
    for how in ("token", "sequence", "constant"):
        assert float(losses.aggregate(VALUES, torch.zeros_like(MASK), CU, how, 0, 0, max_tokens=5)) == 0.0


def test_refusals():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="dual_clip"):
        losses.ppo_clip(one, one, one, dual_clip=1.0)
    with pytest.raises(ValueError, match="clip_low"):
        losses.ppo_clip(one, one, one, clip_low=-0.1)
    with pytest.raises(ValueError, match="max_tokens"):
        losses.aggregate(VALUES, MASK, CU, "constant", 1, 1)
    with pytest.raises(ValueError, match="unknown aggregation"):
        losses.aggregate(VALUES, MASK, CU, "mean", 1, 1)
