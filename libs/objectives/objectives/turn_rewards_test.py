"""Rewards of turns: their places, and GRPO with process supervision against a loop in Python floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import GRPO, Totals, advantages
from objectives.advantages import turn_grpo
from objectives.token_advantages import at_turn_ends
from seqpack import make_batch, pack_sequences

number = st.integers(-4, 4).map(lambda n: n / 2)
turn = st.tuples(st.integers(1, 3), st.integers(1, 2), number)
answer = st.tuples(st.integers(0, 1), st.lists(turn, min_size=1, max_size=3))
Answer = tuple[int, list[tuple[int, int, float]]]


def jagged(rows: list[list[bool]]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def masks(answers: list[Answer]) -> list[list[bool]]:
    """Of each answer: tokens that are not the model's before each turn, and the turn's own."""
    return [[on for own, others, _ in turns for on in [False] * others + [True] * own] for _, turns in answers]


@given(st.lists(answer, min_size=1, max_size=5))
def test_a_token_gets_the_normalised_rewards_of_its_turn_and_of_later_ones(answers: list[Answer]) -> None:
    mask, groups = jagged(masks(answers)), torch.tensor([group for group, _ in answers])
    placed = at_turn_ends([[reward for *_, reward in turns] for _, turns in answers], mask)
    got = turn_grpo(placed, mask, groups)
    assert got.dtype == torch.float32
    for (group, turns), row in zip(answers, got.unbind(), strict=True):
        rewards = [reward for number, other in answers if number == group for *_, reward in other]
        equal = len(set(rewards)) == 1
        mean, spread = statistics.fmean(rewards), 1.0 if len(rewards) < 2 else statistics.stdev(rewards)
        scores = [0.0 if equal else (reward - mean) / (spread + 1e-6) for *_, reward in turns]
        want = []
        for place, (own, others, _) in enumerate(turns):
            want += [0.0] * others + [sum(scores[place:])] * own
        assert row.tolist() == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_rewards_stand_at_the_last_tokens_and_turns_without_one_get_0() -> None:
    mask = jagged([[False, True, True, False, True], [True, False], [False, False]])
    rows = [row.tolist() for row in at_turn_ends([[2.0], [-1.0], []], mask).unbind()]
    assert [[None if math.isnan(x) else x for x in row] for row in rows] == [
        [None, None, 2.0, None, 0.0],
        [-1.0, None],
        [None, None],
    ]
    with pytest.raises(ValueError, match="row 1 has 1 turns and 2 turn rewards: give one a turn"):
        at_turn_ends([[], [1.0, 2.0], []], mask)


def test_one_turn_each_is_grpo() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 0, 1])
    mask = jagged([[False, True, True], [False, True], [True, False], [True, True]])
    got = turn_grpo(at_turn_ends([[float(x)] for x in rewards], mask), mask, groups)
    want = advantages.per_token(advantages.grpo(rewards, groups), mask)
    for one, other in zip(got.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(one, other)


def test_by_its_name_it_trains_the_turns_of_an_answer_apart() -> None:
    """The last turns are pushed apart; the first are not, as what follows them counts too and evens out."""
    mask = torch.tensor([False, True, False, True])
    row = {"input_ids": torch.tensor([5, 6, 7, 8]), "loss_mask": mask, "group": 0}
    batch = make_batch([row, row])
    batch["token_rewards"] = at_turn_ends([[1.0, 0.0], [0.0, 1.0]], batch["loss_mask"])
    batch["advantages"] = advantages.estimate(batch, "turn_grpo")
    log_probs = torch.full((8,), -1.0, requires_grad=True)
    loss, _ = GRPO()(log_probs, None, pack_sequences(batch), Totals.of(batch))
    (slope,) = torch.autograd.grad(loss, log_probs)
    assert slope[3] > 0 > slope[7]
    assert slope[[1, 5]].abs().max() < 1e-6 < slope[7].abs()
