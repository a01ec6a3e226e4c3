"""R2: tools, rewards and generation share no executor; what hangs in one delays neither of the others.

Held by order of events: everything that shall be done is done while everything that hangs still hangs.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.task import score_of
from rollout.native.engine import NativeEngine
from rollout.testing.model import tiny_model
from rollout.tools.tool import Tool, ToolCall, call_tools
from rollout.tools.workers import REWARDS, TOOLS

GUARD = 120.0  # seconds after which a test that hangs fails; nothing is measured by it
SCHEMA = {"type": "object", "properties": {}}
REPLY = Reply("x", "x")


def blocking(release: threading.Event) -> Callable[..., float]:
    def run(*_: object) -> float:
        release.wait()
        return 1.0

    return run


def blocking_async(release: threading.Event) -> Callable[..., Awaitable[float]]:
    async def run(*_: object) -> float:
        release.wait()  # no await in it: on anybody's event loop, all would stand still
        return 1.0

    return run


async def one_token(engine: NativeEngine) -> int:
    completion = await engine.generate([1, 2, 3], Sampling(max_new_tokens=1, seed=0))
    return len(completion.ids)


@pytest.mark.parametrize("hang", [blocking, blocking_async])
@pytest.mark.parametrize("where", ["tools", "rewards", "the default executor"])
def test_what_hangs_delays_nobody(where: str, hang: Callable[[threading.Event], Callable[..., Any]]) -> None:
    release = threading.Event()
    run = hang(release)
    engine = NativeEngine(tiny_model(50), pad_token_id=0, max_length=64)
    asked: list[asyncio.Task[Any]] = []

    async def play() -> list[object]:
        stuck: list[asyncio.Task[Any]]
        if where == "tools":
            calls = [ToolCall("hangs", "{}")] * 40
            stuck = [asyncio.create_task(call_tools([Tool("hangs", "", SCHEMA, run, timeout=GUARD)], calls))]
        elif where == "rewards":
            asked.extend(asyncio.create_task(score_of(lambda *a: run(), REPLY, (), timeout=GUARD)) for _ in range(40))
            stuck = asked
        else:
            stuck = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            events: list[object] = [await one_token(engine)]
            events += [
                r.content
                for r in await call_tools([Tool("quick", "", SCHEMA, lambda: "tool")], [ToolCall("quick", "{}")])
            ]
            events += [(await score_of(lambda *a: 0.5, REPLY, ())).reward, await one_token(engine)]
            assert not any(task.done() for task in stuck)
        finally:
            release.set()
        await asyncio.gather(*stuck)
        return events

    async def guarded() -> list[object]:
        async with asyncio.timeout(GUARD):
            return await play()

    assert asyncio.run(guarded()) == [1, "tool", 0.5, 1]


def test_a_long_answer_delays_no_tool_and_no_reward() -> None:
    engine = NativeEngine(tiny_model(50), pad_token_id=0, max_length=4096)

    async def play() -> bool:
        long = asyncio.create_task(engine.generate([1, 2, 3], Sampling(max_new_tokens=4000, seed=0)))
        await one_token(engine)
        for _ in range(5):
            await call_tools([Tool("quick", "", SCHEMA, lambda: "tool")], [ToolCall("quick", "{}")])
            await score_of(lambda *a: 0.5, REPLY, ())
        was_done = long.done()
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
        return was_done

    assert asyncio.run(play()) is False


def test_tools_and_rewards_have_threads_of_their_own() -> None:
    async def names() -> tuple[str, str]:
        tool = Tool("name", "", SCHEMA, lambda: threading.current_thread().name)
        seen = []

        def reward(*_: object) -> float:
            seen.append(threading.current_thread().name)
            return 0.0

        (result,) = await call_tools([tool], [ToolCall("name", "{}")])
        await score_of(reward, REPLY, ())
        return result.content, seen[0]

    assert asyncio.run(names()) == (f"rollout-{TOOLS.name}", f"rollout-{REWARDS.name}")
    assert TOOLS is not REWARDS
