"""A budget is never overdrawn, and nobody waits for tokens that nobody has."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.token_budget import TokenBudget


@given(
    st.integers(1, 40) | st.none(),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 3)), max_size=12),
)
def test_whoever_takes_when_no_more_than_the_total_is_ever_spent_or_promised(
    total: int | None, requests: list[tuple[int, int, int]]
) -> None:
    budget = TokenBudget(total)
    taken = 0

    async def request(wanted: int, used: int, turns: int) -> tuple[int, int]:
        nonlocal taken
        granted = await budget.take(wanted)
        taken += granted
        assert 0 <= granted <= wanted
        assert total is None or budget.spent + taken <= total
        assert granted or budget.is_spent  # nothing is refused that could have been had
        for _ in range(turns):
            await asyncio.sleep(0)
        taken -= granted
        budget.settle(granted, min(used, granted))
        return granted, min(used, granted)

    async def run() -> list[tuple[int, int]]:
        return await asyncio.wait_for(asyncio.gather(*(request(*r) for r in requests)), 60)

    results = asyncio.run(run())
    assert budget.spent == sum(used for _, used in results)
    if total is None:
        assert [granted for granted, _ in results] == [wanted for wanted, _, _ in requests]


def test_who_is_cancelled_while_it_waits_takes_nothing() -> None:
    async def run() -> None:
        budget = TokenBudget(4)
        assert await budget.take(9) == 4
        waits = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        budget.settle(4, 1)
        assert (budget.up_to(9), budget.spent, budget.is_spent) == (3, 1, False)

    asyncio.run(run())
    with pytest.raises(ValueError, match="at least 1 token"):
        TokenBudget(0)
