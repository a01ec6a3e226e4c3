"""Returns with KL in the reward and their normalisation, against loops over tokens in Python floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import advantages
from objectives.token_advantages import normalized, returns_with_kl

Token = tuple[bool, float, float]
token = st.tuples(st.booleans(), st.floats(-5, -0.01), st.floats(-5, -0.01))
answer = st.tuples(st.floats(-2, 2), st.lists(token, min_size=1, max_size=6))


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@given(st.lists(answer, min_size=1, max_size=4), st.floats(0, 1))
def test_the_return_of_a_token_is_the_reward_less_the_kl_from_it_on(
    answers: list[tuple[float, list[Token]]], coef: float
) -> None:
    rewards = torch.tensor([reward for reward, _ in answers])
    mask, new, ref = (jagged([[row[part] for row in rows] for _, rows in answers]) for part in range(3))
    got = returns_with_kl(rewards, mask, new, ref, coef)
    assert got.dtype == torch.float32
    for (reward, rows), row in zip(answers, got.unbind(), strict=True):
        for place, (trained, *_) in enumerate(rows):
            rest = sum(p - q for keep, p, q in rows[place:] if keep)
            assert float(row[place]) == pytest.approx(reward - coef * rest if trained else 0.0, abs=1e-4)


@given(st.lists(answer, min_size=1, max_size=4))
def test_normalized_values_have_mean_0_and_spread_1_over_the_trained_tokens(
    answers: list[tuple[float, list[Token]]],
) -> None:
    mask, values = (jagged([[row[part] for row in rows] for _, rows in answers]) for part in range(2))
    got = torch.cat(list(normalized(values, mask).unbind())).tolist()
    flat = [(keep, value) for _, rows in answers for keep, value, _ in rows]
    trained = [value for keep, value in flat if keep]
    if len(set(torch.tensor(trained).tolist())) < 2:
        assert got == [0.0] * len(flat)
        return
    mean, spread = statistics.fmean(trained), statistics.stdev(trained)
    want = [(value - mean) / (spread + 1e-6) if keep else 0.0 for keep, value in flat]
    assert got == pytest.approx(want, abs=1e-3)


def test_without_kl_they_are_reinforce_plus_plus() -> None:
    mask = jagged([[False, True, True], [False, True], [True, True, True, False]]).bool()
    rewards, zero = torch.tensor([1.0, 0.0, 0.5]), torch.zeros_like(mask, dtype=torch.float32)
    got = normalized(returns_with_kl(rewards, mask, zero, zero, 0.3), mask)
    want = advantages.per_token(advantages.reinforce_plus_plus(rewards, torch.tensor([2, 1, 3])), mask)
    for one, other in zip(got.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_negative_weight_is_refused() -> None:
    mask = jagged([[True]]).bool()
    with pytest.raises(ValueError, match="kl_coef must be a number at least 0"):
        returns_with_kl(torch.ones(1), mask, mask.float(), mask.float(), -math.pi)


def test_reinforce_plus_plus_counts_tokens() -> None:
    rewards, groups, lengths = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1]), torch.tensor([1, 3, 2])
    tokens = rewards.repeat_interleave(lengths).double()
    want = ((tokens - tokens.mean()) / (tokens.std() + 1e-6))[torch.tensor([0, 1, 4])]
    torch.testing.assert_close(advantages.reinforce_plus_plus(rewards, lengths), want.float())
    got = advantages.reinforce_plus_plus_baseline(rewards, groups, lengths)
    torch.testing.assert_close(got, advantages.reinforce_plus_plus(torch.tensor([0.5, -0.5, 0.0]), lengths))
