"""Tools of an MCP server of the real package: schemas, results, errors, a server that ends, one that never was."""

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.environments.processes.messages import describe, rebuild
from rollout.environments.task import Task
from rollout.episodes.runner import run_group
from rollout.errors import EpisodeFailed
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.gateway import CALL, encode
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.mcp_tools import mcp_tools
from rollout.tools.tool import Tool, ToolResult, call_tool

SERVER = '''
import os
from mcp.server import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def leave(how: str) -> str:
    """Leave, one way or another."""
    if how == "at once":
        os._exit(3)
    raise ValueError(how)


server.run()
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        yield shlex.join([sys.executable, str(path)])


def call(tools: tuple[Tool, ...], name: str, arguments: str) -> ToolResult:
    return asyncio.run(call_tool(tools, name, arguments))


def test_a_policy_calls_the_tools_of_a_server(command: str) -> None:
    tools = mcp_tools(command)
    assert (tools[0].name, tools[0].description) == ("add", "Add two numbers.")
    assert tools[0].parameters["required"] == ["a", "b"]
    chat = Chat(tiny_tokenizer())
    engine = ScriptedEngine(lambda prompt, turn: encode([CALL, "It is 95."][turn % 2] + "<|im_end|>"))
    task = Task(
        ({"role": "user", "content": "37+58="},),
        tools=tools,
        reward=lambda reply, results: float([r.content for r in results] == ["95"] and "95" in reply.content),
    )
    episodes = asyncio.run(run_group(task, engine, chat, Sampling(max_new_tokens=200), size=1, max_turns=2))
    assert [(e.reward, e.error) for e in episodes] == [(1.0, None)]


def test_errors_are_read_by_the_model_and_a_server_that_ends_fails_the_episode(command: str) -> None:
    tools = mcp_tools(command)
    told = call(tools, "leave", '{"how": "politely"}')
    assert not told.ok
    assert "politely" in told.content
    assert "Error" in call(tools, "add", '{"a": 1, "b": "x"}').content
    with pytest.raises(EpisodeFailed, match=r"ended in a call of leave") as failed:
        call(tools, "leave", '{"how": "at once"}')
    assert failed.value.retryable
    assert call(tools, "add", '{"a": 1, "b": 2}').content == "3"  # a new one


def test_tools_of_a_server_cross_into_environment_processes(command: str) -> None:
    (add, _) = mcp_tools(command)
    assert rebuild(describe(add)).run(a=1, b=2) == "3"


@pytest.mark.parametrize("wrong", ["", "/no/such/program", f"{sys.executable} -c 'raise SystemExit(\"no server\")'"])
def test_a_command_without_a_server_is_a_value_error(wrong: str) -> None:
    with pytest.raises(ValueError, match="MCP server"):
        mcp_tools(wrong)
