"""Tools: every failure becomes text for the model, none stops the run."""

import asyncio
import json
import threading
import time

import pytest

from rollout.arithmetic import calculator
from rollout.tools import Tool, call_tool

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(run, **changes):
    return Tool(**{"name": "f", "description": "d", "parameters": SCHEMA, "run": run, **changes})


def call(tools, name="f", arguments='{"n": 2}'):
    return asyncio.run(call_tool(tools, name, arguments))


def test_a_result_is_text_or_json():
    assert call([tool(lambda n: f"got {n}")]) == call([tool(lambda n: f"got {n}")])
    assert call([tool(lambda n: f"got {n}")]).content == "got 2"
    assert json.loads(call([tool(lambda n: {"a": [n]})]).content) == {"a": [2]}


def test_an_async_tool_runs_on_the_loop():
    async def run(n):
        await asyncio.sleep(0)
        return str(threading.current_thread() is threading.main_thread())

    assert call([tool(run)]).content == "True"


def raise_it(error):
    def run(n):
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
        ([tool(raise_it(TimeoutError("mine")))], "f", '{"n": 2}', "TimeoutError: mine"),
        ([tool(lambda n: object())], "f", '{"n": 2}', "TypeError"),
    ],
)
def test_whatever_goes_wrong_is_said(tools, name, arguments, message):
    result = call(tools, name, arguments)
    assert not result.ok
    assert result.content.startswith("Error: ")
    assert message in result.content


def test_a_slow_tool_is_not_awaited():
    release = threading.Event()

    async def play():
        began = time.monotonic()
        result = await call_tool([tool(lambda n: release.wait(20), timeout=0.05)], "f", '{"n": 1}')
        release.set()
        return result, time.monotonic() - began

    result, spent = asyncio.run(play())
    assert "no answer within 0.05 s" in result.content
    assert spent < 15  # it was not waited for; the bound is wide on purpose


def test_a_long_answer_is_cut():
    result = call([tool(lambda n: "x" * 100, max_characters=10)])
    assert result.content == "x" * 10 + " [cut after 10 characters]"


def test_the_calculator_as_a_tool():
    assert call([calculator()], "calculator", '{"expression": "37+58"}').content == "95"
    assert "division by zero" in call([calculator()], "calculator", '{"expression": "1/0"}').content


def test_a_schema_must_be_an_objects():
    with pytest.raises(ValueError, match='type "object"'):
        tool(str, parameters={"type": "string"})
