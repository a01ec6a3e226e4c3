"""A plain function stands for a tool wherever tools are given; what can't is refused with what to write."""

import asyncio
from typing import Any

import pytest
from transformers.utils import get_json_schema

from rollout import (
    Chat,
    Observation,
    Reply,
    Sampling,
    Score,
    StepResult,
    TaskRow,
    Tool,
    ToolCall,
    call_tools,
    run_group,
)
from rollout.environments.environment import End, EpisodeContext
from rollout.environments.task import Task
from rollout.testing import ScriptedEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.tools.tool import as_tools


def lookup(name: str, year: int = 2020) -> str:
    """
    Look a price up.

    Args:
        name: What costs it.
        year: When it did.
    """
    return f"{name} cost {year - 2000}"


class World:
    """An environment whose tools are plain functions."""

    async def open(self, context: EpisodeContext) -> Observation:
        return Observation([{"role": "user", "content": "x"}], tools=(lookup,))  # type: ignore[arg-type]

    async def step(self, reply: Reply) -> StepResult:
        return StepResult()

    async def finish(self, end: End) -> Score:
        return Score(0.5)

    async def close(self) -> None: ...


def test_an_episode_with_a_plain_function_is_played() -> None:
    chat = Chat(tiny_tokenizer())
    engine = ScriptedEngine(lambda prompt, turn: [chat.end_of_turn_id or 0])
    (episode,) = asyncio.run(run_group(World, engine, chat, Sampling(), size=1, row=TaskRow("a")))
    assert episode.error is None
    assert episode.reward == 0.5
    prompt = chat.opening([{"role": "user", "content": "x"}], as_tools([lookup])).ids
    assert engine.prompts == [prompt]


def test_its_schema_is_that_of_transformers() -> None:
    (tool,) = as_tools([lookup])
    ours, theirs = tool.schema["function"], get_json_schema(lookup)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    assert ours["parameters"]["properties"] == theirs["parameters"]["properties"]


def test_it_is_called_where_an_environment_calls_its_tools() -> None:
    (result,) = asyncio.run(call_tools([lookup], [ToolCall("lookup", '{"name": "tea"}')]))  # type: ignore[list-item]
    assert result.content == "tea cost 20"
    task = Task(({"role": "user", "content": "x"},), lambda reply, results: 1.0, tools=(lookup,))  # type: ignore[arg-type]
    assert [tool.name for tool in task.tools] == ["lookup"]


def untyped(name):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return name


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (untyped, "argument 'name' has no type; annotate it, such as name: str"),
        ({"type": "function"}, r"a tool is a dict: give a rollout\.Tool"),
        (3, "a tool is a int"),
    ],
)
def test_what_is_no_tool_is_refused_with_what_to_write(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Observation([], tools=(given,))
    with pytest.raises(ValueError, match=text):
        Task((), lambda reply, results: 1.0, tools=(given,))


def test_a_reward_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="the reward of a task is a float: give a function"):
        Task((), 1.0)  # type: ignore[arg-type]
    assert isinstance(as_tools([Tool("f", "d", {"type": "object"}, lookup)])[0], Tool)
