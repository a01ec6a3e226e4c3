"""Places for requests: never more inside than there are, nobody waits without need, nobody is forgotten."""

import asyncio
import random

import pytest

from rollout.openai.gate import Gate


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_who_waits_enters_in_order() -> None:
    async def run() -> None:
        gate, entered = Gate(1), []

        async def visit(name: str) -> None:
            await gate.enter()
            entered.append(name)
            await turns()
            gate.leave()

        await asyncio.gather(*[visit(name) for name in "abcd"])
        assert entered == list("abcd")
        assert (gate.inside, gate.waiting) == (0, 0)

    asyncio.run(run())


def test_a_held_gate_lets_nobody_in_and_is_quiet_once_all_have_left() -> None:
    async def run() -> None:
        gate = Gate(2)
        await gate.enter()
        holding = asyncio.create_task(gate.hold())
        coming = asyncio.create_task(gate.enter())
        await turns()
        assert not holding.done()
        gate.leave()
        await asyncio.wait_for(holding, 5)
        await turns()
        assert (coming.done(), gate.waiting) == (False, 1)
        gate.release()
        await asyncio.wait_for(coming, 5)
        assert gate.inside == 1

    asyncio.run(run())


def test_who_gives_up_holding_holds_nothing() -> None:
    async def run() -> None:
        gate = Gate(1)
        await gate.enter()
        holding = asyncio.create_task(gate.hold())
        await turns()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        gate.leave()
        await asyncio.wait_for(gate.enter(), 5)

    asyncio.run(run())


def test_a_place_that_comes_as_its_waiter_gives_up_goes_to_the_next() -> None:
    async def run() -> None:
        gate = Gate(1)
        await gate.enter()
        first, second = (asyncio.create_task(gate.enter()) for _ in range(2))
        await turns()
        gate.leave()  # the place is the first one's, which does not know it yet
        first.cancel()
        await asyncio.wait_for(second, 5)
        assert first.cancelled()
        assert gate.inside == 1

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_any_coming_and_going_leaves_the_gate_empty(seed: int) -> None:
    """Visitors come, stay, and are cancelled at random moments, while somebody holds and releases the gate."""

    async def run() -> None:
        draw = random.Random(seed)
        places, most, held = draw.randint(1, 3), 0, False
        gate = Gate(places)

        async def visit() -> None:
            nonlocal most
            await gate.enter()
            try:
                assert not held
                most = max(most, gate.inside)
                await turns(draw.randint(0, 6))
            finally:
                gate.leave()

        tasks = []
        for _ in range(60):
            tasks.append(asyncio.create_task(visit()))
            if draw.random() < 0.3:
                draw.choice(tasks).cancel()
            if draw.random() < 0.1:
                await gate.hold()
                held = True
                await turns(draw.randint(0, 4))
                held = False
                gate.release()
            await turns(draw.randint(0, 2))
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(x is None or isinstance(x, asyncio.CancelledError) for x in found)
        assert 0 < most <= places
        assert (gate.inside, gate.waiting) == (0, 0)

    asyncio.run(run())
