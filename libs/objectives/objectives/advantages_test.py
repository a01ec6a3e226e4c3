"""Advantages against the papers' formulas in float64, and their properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import advantages

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, 3.0, 3.0, -2.0])
GROUPS = torch.tensor([7, 7, 2, 7, 2, 9, 2])


def oracle(rewards, groups, how):
    """One sample at a time, in plain Python floats."""
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        same = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        n, mean = len(same), sum(same) / len(same)
        std = math.sqrt(sum((r - mean) ** 2 for r in same) / max(n - 1, 1))
        if how == "grpo":
            out.append((reward - mean) / (std + 1e-6))
        elif how == "dr_grpo":
            out.append(reward - mean)
        else:
            out.append(reward - (sum(same) - reward) / (n - 1) if n > 1 else 0.0)
    return torch.tensor(out, dtype=torch.float32)


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "leave_one_out"])
def test_equals_the_formula(how):
    got = getattr(advantages, how)(REWARDS, GROUPS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, oracle(REWARDS.tolist(), GROUPS.tolist(), how), atol=2e-6, rtol=2e-6)


def test_population_standard_deviation():
    got = advantages.grpo(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), eps=0.0, correction=0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0]))


samples = st.lists(st.tuples(st.floats(-4, 4).map(lambda x: round(x, 3)), st.integers(0, 3)), min_size=1, max_size=24)


@given(samples, st.integers(-50, 50))
def test_shift_invariant_and_centred(rows, shift):
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    for how in (advantages.grpo, advantages.dr_grpo, advantages.leave_one_out):
        got = how(rewards, groups)
        torch.testing.assert_close(how(rewards + shift, groups), got, atol=1e-4, rtol=1e-4)
        for group in groups.unique():
            assert abs(float(got[groups == group].sum())) < 1e-3


@given(samples)
def test_scale_and_order(rows):
    rewards = torch.tensor([r for r, _ in rows], dtype=torch.float64)
    groups = torch.tensor([g for _, g in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for how in (advantages.grpo, advantages.dr_grpo, advantages.leave_one_out):
        torch.testing.assert_close(how(rewards[order], groups[order]), how(rewards, groups)[order])
    torch.testing.assert_close(
        advantages.grpo(rewards * 4, groups, eps=0), advantages.grpo(rewards, groups, eps=0), atol=1e-5, rtol=1e-5
    )


@given(st.floats(-100, 100), st.integers(1, 9))
def test_equal_rewards_give_exact_zeros(reward, n):
    rewards, groups = torch.full((n,), reward, dtype=torch.float32), torch.zeros(n, dtype=torch.int64)
    for how in (advantages.grpo, advantages.dr_grpo, advantages.leave_one_out):
        assert how(rewards, groups).eq(0).all()


def test_per_token_spreads_over_the_mask():
    from seqpack.batches.batch import jagged

    mask = jagged([torch.tensor([False, True, True]), torch.tensor([False, True])])
    got = advantages.per_token(torch.tensor([2.0, -1.0]), mask).unbind()
    assert got[0].tolist() == [0.0, 2.0, 2.0]
    assert got[1].tolist() == [0.0, -1.0]


def test_refusals_name_the_fault():
    with pytest.raises(ValueError, match="row 1 is nan"):
        advantages.grpo(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="of one length"):
        advantages.grpo(torch.tensor([0.0, 1.0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="correction"):
        advantages.grpo(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), correction=2)
