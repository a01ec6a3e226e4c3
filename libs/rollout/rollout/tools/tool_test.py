"""Tools: what the model can act upon becomes text for it, the run's own trouble fails the episode."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Never

import pytest

from rollout.errors import EpisodeFailed
from rollout.tools.arithmetic import calculator
from rollout.tools.tool import Tool, ToolCall, ToolResult, call_id, call_tool, call_tools
from rollout.tools.workers import TOOLS

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(run: Callable[..., Any], **changes: Any) -> Tool:
    return Tool(**{"name": "f", "description": "d", "parameters": SCHEMA, "run": run, **changes})


def call(tools: Sequence[Tool], name: str = "f", arguments: str = '{"n": 2}') -> ToolResult:
    return asyncio.run(call_tool(tools, name, arguments))


def test_a_result_is_text_or_json() -> None:
    assert call([tool(lambda n: f"got {n}")]) == call([tool(lambda n: f"got {n}")])
    assert call([tool(lambda n: f"got {n}")]).content == "got 2"
    assert json.loads(call([tool(lambda n: {"a": [n]})]).content) == {"a": [2]}


def test_an_answer_keeps_the_calls_id() -> None:
    result = asyncio.run(call_tool([tool(lambda n: n)], "f", '{"n": 2}', call_id(7)))
    assert result.to_message() == {"role": "tool", "name": "f", "content": "2", "tool_call_id": "call00007"}
    assert asyncio.run(call_tool([], "f", "{}", "x")).call_id == "x"
    assert "tool_call_id" not in call([tool(str)]).to_message()


def test_arguments_may_have_any_names() -> None:
    names = ["key", "timeout", "function", "args", "self", "run", "arguments"]
    schema = {"type": "object", "properties": {name: {} for name in names}}
    echo = tool(lambda **given: given, parameters=schema)
    given = dict.fromkeys(names, 1)
    assert json.loads(call([echo], arguments=json.dumps(given)).content) == given


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raise_it(error: BaseException) -> Callable[[int], Never]:
    def run(n: int) -> Never:
        raise error

    return run


@pytest.mark.parametrize(
    ("tools", "name", "arguments", "message"),
    [
        ([], "f", "{}", "no tool 'f'; available: none"),
        ([calculator()], "f", "{}", "available: calculator"),
        ([tool(str)], "f", "{n: 2}", "not valid JSON"),
        ([tool(str)], "f", "[" * 100_000, "not valid JSON"),
        ([tool(str)], "f", "[1]", "must be a JSON object"),
        ([tool(str)], "f", "{}", "missing argument 'n'"),
        ([tool(str)], "f", '{"n": 1, "m": 2}', "unknown argument 'm'; known: n"),
        ([tool(str)], "f", '{"n": "2"}', "must be of type integer"),
        ([tool(str)], "f", '{"n": true}', "must be of type integer"),
        ([tool(raise_it(RuntimeError("boom")))], "f", '{"n": 2}', "RuntimeError: boom"),
        ([tool(raise_it(SystemExit(3)))], "f", '{"n": 2}', "SystemExit: 3"),
        ([tool(raise_it(KeyboardInterrupt()))], "f", '{"n": 2}', "KeyboardInterrupt"),
        ([tool(raise_it(asyncio.CancelledError()))], "f", '{"n": 2}', "CancelledError"),
        ([tool(raise_it(MuteError()))], "f", '{"n": 2}', "MuteError: (its text can't be had: RuntimeError)"),
        ([tool(raise_it(TimeoutError("mine")))], "f", '{"n": 2}', "TimeoutError: mine"),
        ([tool(lambda n: object())], "f", '{"n": 2}', "TypeError"),
    ],
)
def test_whatever_goes_wrong_is_said(tools: Sequence[Tool], name: str, arguments: str, message: str) -> None:
    result = call(tools, name, arguments)
    assert not result.ok
    assert result.content.startswith("Error: ")
    assert message in result.content


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_hangs_is_not_awaited_and_in_the_end_refused(is_async: bool) -> None:
    release = threading.Event()

    async def blocks(n: int) -> None:
        release.wait()

    hangs = tool(blocks if is_async else lambda n: release.wait(), timeout=0.3, name=f"hangs{is_async}")

    async def play() -> tuple[list[ToolResult], bool]:
        results = [await call_tool([hangs], hangs.name, '{"n": 1}') for _ in range(TOOLS.max_abandoned)]
        with pytest.raises(EpisodeFailed, match=f"{hangs.name} is refused: 8 earlier calls") as failed:
            await call_tool([hangs], hangs.name, '{"n": 1}')
        release.set()
        return results, failed.value.retryable

    results, retryable = asyncio.run(play())
    assert all(f"{hangs.name} gave no answer within 0.3 s" in r.content and not r.ok for r in results)
    assert retryable


class Unavailable(EpisodeFailed):
    """A backend's own."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "retryable", "reason"),
    [
        (EpisodeFailed("the search engine is down", retryable=True), True, "engine is down"),
        (Unavailable("the index is broken", retryable=False), False, "index is broken"),
        (MemoryError(), True, "f ran out of memory"),
    ],
)
def test_the_runs_own_trouble_fails_the_episode_and_is_no_news_for_the_model(
    error: BaseException, retryable: bool, reason: str, is_async: bool
) -> None:
    async def fails(n: int) -> Never:
        raise error

    with pytest.raises(EpisodeFailed, match=reason) as failed:
        call([tool(fails if is_async else raise_it(error))])
    assert failed.value.retryable is retryable


def test_calls_of_a_turn_run_side_by_side_and_answer_in_order() -> None:
    """Each waits for all the others; the last to be called is the first to end."""
    barrier, turns = threading.Barrier(6), [threading.Event() for _ in range(7)]
    turns[6].set()

    def run(n: int) -> int:
        barrier.wait()
        turns[n + 1].wait()
        turns[n].set()
        return n

    calls = [ToolCall("f", json.dumps({"n": n}), call_id(n)) for n in range(6)]
    calls.insert(3, ToolCall("f", "{", call_id(9)))
    results = asyncio.run(call_tools([tool(run)], calls))
    assert [r.content for r in results if r.ok] == list("012345")
    assert [r.call_id for r in results] == [c.id for c in calls]
    assert "not valid JSON" in results[3].content


def test_where_one_call_fails_the_episode_the_others_are_cancelled() -> None:
    events, started = [], threading.Event()

    async def run(n: int) -> None:
        if n == 0:
            await asyncio.to_thread(started.wait)
            raise EpisodeFailed("down", retryable=True)
        try:
            started.set()
            await asyncio.sleep(10_000)
        finally:
            events.append("cancelled")

    async def play() -> None:
        calls = [ToolCall("f", json.dumps({"n": n})) for n in range(2)]
        with pytest.raises(EpisodeFailed, match="down"):
            async with asyncio.timeout(60):
                await call_tools([tool(run, timeout=math.inf)], calls)
        while not events:
            await asyncio.sleep(0.001)

    asyncio.run(play())
    assert events == ["cancelled"]


def test_text_that_no_tokenizer_takes_is_escaped() -> None:
    assert call([tool(lambda n: "a\ud800b")]).content == "a\\ud800b"


@pytest.mark.parametrize("change", [{"timeout": 0}, {"timeout": float("nan")}, {"max_characters": 0}])
def test_limits_that_cannot_work_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"tool f: {next(iter(change))} must be"):
        tool(str, **change)


def test_a_long_answer_is_cut() -> None:
    result = call([tool(lambda n: "x" * 100, max_characters=10)])
    assert result.content == "xxxxx [90 characters cut] xxxxx"


def test_the_calculator_as_a_tool() -> None:
    assert call([calculator()], "calculator", '{"expression": "37+58"}').content == "95"
    assert "division by zero" in call([calculator()], "calculator", '{"expression": "1/0"}').content


def test_a_schema_must_be_an_objects() -> None:
    with pytest.raises(ValueError, match='type "object"'):
        tool(str, parameters={"type": "string"})
