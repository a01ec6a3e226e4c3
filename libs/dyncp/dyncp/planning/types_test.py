"""Plans are data: they refuse what is not a plan, and survive JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dyncp.planning.types import DynamicPlan, Group, Step, seed_plan

PLAN = DynamicPlan(
    (5, 9, 2), 3, 5, (Step((Group((0, 1), (1,)), Group((2,), (0,)))), Step((Group((0,), (2,)), Group((1, 2), ()))))
)


def test_json_gives_the_same_plan_back() -> None:
    again = DynamicPlan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.hash == PLAN.hash
    assert again.process_groups() == ((0, 1), (1, 2))
    assert again.sample_order() == (1, 0, 2)
    assert again.trained_tokens == 16


def test_a_changed_file_is_noticed() -> None:
    data = json.loads(PLAN.to_json())
    data["max_tokens_per_rank"] = 6
    with pytest.raises(ValueError, match="changed after it was written"):
        DynamicPlan.from_json(json.dumps(data))
    with pytest.raises(ValueError, match="steps missing"):
        DynamicPlan.from_json('{"lengths": [], "world_size": 1, "max_tokens_per_rank": 1}')


def test_the_hash_sees_who_computes_what_and_not_the_forecast() -> None:
    other = DynamicPlan(PLAN.lengths, 3, 5, PLAN.steps, name="other", seconds=(1.0, 2.0))
    assert other.hash == PLAN.hash
    assert DynamicPlan(PLAN.lengths, 3, 5, PLAN.steps[::-1]).hash != PLAN.hash
    assert DynamicPlan(PLAN.lengths, 3, 5, PLAN.steps, trained_tokens=3).hash != PLAN.hash


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Step((Group((0,), (0,)), Group((1,), (1,)))),), "ranks 0..2"),
        ((Step((Group((1, 2), (0,)), Group((0,), (2,)))),), "ranks 0..2"),
        ((Step((Group((0, 1, 2), (0, 1)),)),), "exactly once"),
        ((Step((Group((0, 1, 2), (0, 1, 2, 2)),)),), "exactly once"),
        ((Step((Group((0,), (1,)), Group((1, 2), (0, 2)))),), "would hold 9 tokens each, the cap is 5"),
    ],
)
def test_what_is_no_plan_is_refused(steps: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicPlan(PLAN.lengths, 3, 5, steps)


@pytest.mark.parametrize("samples", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_seeds_plan_takes_any_number_of_samples(samples: int, cp_size: int) -> None:
    plan = seed_plan(tuple(range(1, samples + 1)), 4, 9, cp_size)
    assert sorted(plan.sample_order()) == list(range(samples))
    assert all(len(step.groups) == 4 // cp_size for step in plan.steps)


def test_group_of_refuses_a_rank_outside() -> None:
    assert PLAN.steps[1].group_of(2) == Group((1, 2), ())
    with pytest.raises(ValueError, match="planned for 3 ranks"):
        PLAN.steps[0].group_of(3)


def test_the_gap_and_the_fill_of_a_plan() -> None:
    assert PLAN.fill == 16 / (2 * 3 * 5)
    assert PLAN.gap == 0.0
    timed = replace(PLAN, seconds=(1.0, 2.0))
    assert timed.gap == float("inf")  # nothing is proven
    assert replace(timed, lower_bound=2.0).gap == 0.5
    assert replace(timed, lower_bound=4.0).gap == 0.0
    assert [index for index, _ in PLAN.groups()] == [0, 0, 1, 1]
    assert [PLAN.tokens_per_rank(group) for _, group in PLAN.groups()] == [5, 5, 2, 0]


@pytest.mark.parametrize(
    "changes",
    [{"align": 5}, {"layout": "zigzag"}, {"method": "ulysses"}, {"max_tokens_per_rank": 7}, {"lengths": (5, 8, 2)}],
)
def test_the_hash_sees_everything_that_ranks_agree_on(changes: dict[str, Any]) -> None:
    other = replace(PLAN, **{"max_tokens_per_rank": 6, **changes})
    assert other.hash != replace(PLAN, max_tokens_per_rank=6).hash
    assert DynamicPlan.from_json(other.to_json()) == other


def test_choices_are_checked_where_a_plan_is_made() -> None:
    with pytest.raises(ValueError, match="align must be positive, got 0"):
        replace(PLAN, align=0)
    with pytest.raises(ValueError, match="choose one of contiguous, zigzag"):
        replace(PLAN, layout="striped")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 ranks cannot be cut into groups of 3"):
        seed_plan((1, 2), 4, 9, 3)


def test_the_seeds_plan_deals_consecutive_slices() -> None:
    plan = seed_plan((1, 2, 3, 4, 5), 4, 9, 2)
    assert [[group.sample_ids for group in step.groups] for step in plan.steps] == [
        [(0,), (3,)],
        [(1,), (4,)],
        [(2,), ()],
    ]
    assert {group.ranks for _, group in plan.groups()} == {(0, 1), (2, 3)}
    assert plan.name == "seed-2"
