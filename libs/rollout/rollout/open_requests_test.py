"""Names and deadlines of requests, with an engine that the test plays."""

import asyncio
import time

import pytest

from rollout.engine import StopReason
from rollout.open_requests import OpenRequests, check_pause, settle


def opened() -> tuple[OpenRequests[str], list[tuple[str, StopReason]]]:
    ended: list[tuple[str, StopReason]] = []
    return OpenRequests(lambda request, reason: ended.append((request, reason))), ended


def test_a_name_is_good_while_its_request_is_open_and_for_one_alone() -> None:
    async def run() -> None:
        table, ended = opened()
        with table.opened("first", "a", None), table.opened("other", None, None):
            assert len(table) == 1
            with pytest.raises(ValueError, match="'a' is in use"), table.opened("second", "a", None):
                raise AssertionError("it was opened")
            assert table.cancel("a")
            assert not table.cancel("b")
        assert not table.cancel("a")
        with table.opened("third", "a", None):
            assert table.cancel("a")
        assert ended == [("first", "abort"), ("third", "abort")]

    asyncio.run(run())


def test_a_deadline_ends_a_request_that_is_open_and_no_other() -> None:
    async def run() -> None:
        table, ended = opened()
        with table.opened("early", None, time.monotonic() + 0.01):
            pass
        with table.opened("late", None, time.monotonic() - 1):
            await asyncio.sleep(0.05)
        with table.opened("never", None, time.monotonic() + 60):
            await asyncio.sleep(0)
        assert ended == [("late", "deadline")]

    asyncio.run(run())


def test_a_request_that_breaks_leaves_its_name() -> None:
    async def run() -> None:
        table, ended = opened()
        with pytest.raises(LookupError), table.opened("it", "a", time.monotonic() + 0.01):
            raise LookupError
        await asyncio.sleep(0.03)
        assert len(table) == 0
        assert ended == []

    asyncio.run(run())


def test_who_settles_lets_the_others_ask_first() -> None:
    async def run() -> None:
        seen = []

        async def asking() -> None:
            await asyncio.sleep(0)
            seen.append("asked")

        tasks = [asyncio.create_task(asking()) for _ in range(3)]
        await settle()
        seen.append("settled")
        await asyncio.gather(*tasks)
        assert seen == ["asked"] * 3 + ["settled"]

    asyncio.run(run())


def test_an_unknown_way_to_pause_is_refused() -> None:
    check_pause("finish")
    with pytest.raises(ValueError, match='"finish" or "abort", got \'stop\''):
        check_pause("stop")  # type: ignore[arg-type]
