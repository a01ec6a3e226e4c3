"""Answers across threads: each future once, each loop woken once, closed loops and cancelled futures left alone."""

import asyncio
import threading
from typing import Any

import pytest

from rollout.native.scheduler.result_delivery import ResultDelivery


def test_futures_of_a_loop_are_told_together() -> None:
    async def play() -> tuple[list[Any], list[int]]:
        loop, answers, woken = asyncio.get_running_loop(), ResultDelivery(), list[int]()
        call = loop.call_soon_threadsafe
        futures = [loop.create_future() for _ in range(5)]
        futures[3].cancel()

        def noted(*job: Any) -> asyncio.Handle:
            woken.append(1)
            return call(*job)

        def tell() -> None:
            for i, future in enumerate(futures):
                answers.put(future, ValueError("wrong") if i == 1 else i)
            loop.call_soon_threadsafe = noted  # type: ignore[method-assign, assignment]
            answers.send()
            answers.send()

        threading.Thread(target=tell).start()
        return await asyncio.gather(*futures, return_exceptions=True), woken

    told, woken = asyncio.run(play())
    assert woken == [1]
    assert [type(t) if isinstance(t, BaseException) else t for t in told] == [
        0,
        ValueError,
        2,
        asyncio.CancelledError,
        4,
    ]


def test_a_closed_loop_is_passed_over() -> None:
    answers, told = ResultDelivery(), list[str]()

    async def later() -> str:
        future = asyncio.get_running_loop().create_future()
        answers.put(future, "here")
        answers.send()
        found: str = await future
        return found

    closed = asyncio.new_event_loop()
    answers.put(closed.create_future(), "nobody")
    closed.close()
    told.append(asyncio.run(later()))
    assert told == ["here"]


def test_an_answer_that_was_not_sent_is_not_told() -> None:
    async def play() -> None:
        future = asyncio.get_running_loop().create_future()
        ResultDelivery().put(future, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(play())
