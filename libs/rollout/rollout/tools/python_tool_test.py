"""Python as a tool: what the model reads, and what fails the episode."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Never

import pytest

from rollout.errors import EpisodeFailed
from rollout.tools.python_tool import python_tool
from rollout.tools.sandbox.sandbox import Limits, Sandbox, SandboxDiedError, SandboxRefusedError
from rollout.tools.tool import Tool, ToolCall, call_id, call_tool, call_tools


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    """The limit on wall time is one that a busy machine does not meet before a second of CPU time is used."""
    yield from limited(120)


@pytest.fixture(scope="module")
def brief() -> Iterator[Tool]:
    yield from limited(4)


def limited(wall_seconds: float) -> Iterator[Tool]:
    sandbox = Sandbox(Limits(wall_seconds=wall_seconds, cpu_seconds=1, output_bytes=2000))
    yield python_tool(sandbox)
    sandbox.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)", "42\n"),
        ("6 * 7", "42\n"),
        ("x = 1", "[no output]"),
        ("while True: pass", "\n[ended: it computed longer than 1 s]"),
        ("import os\nos.abort()", "\n[ended by signal 6]"),
    ],
)
def test_what_the_model_reads(tool: Tool, code: str, answer: str) -> None:
    result = asyncio.run(call_tool([tool], "python", json.dumps({"code": code})))
    assert (result.content, result.ok) == (answer, True)


def test_what_was_printed_before_the_end_by_wall_time(brief: Tool) -> None:
    code = "print(1, flush=True)\nimport time\ntime.sleep(60)"
    result = asyncio.run(call_tool([brief], "python", json.dumps({"code": code})))
    assert (result.content, result.ok) == ("1\n\n[ended: it ran longer than 4 s]", True)


def test_errors_and_floods_are_told(tool: Tool) -> None:
    result = asyncio.run(call_tool([tool], "python", json.dumps({"code": "1 / 0"})))
    assert result.content.endswith("ZeroDivisionError: division by zero\n")
    result = asyncio.run(call_tool([tool], "python", json.dumps({"code": "print('x' * 10_000)"})))
    assert result.content == "x" * 2000 + "\n[ended: it wrote more than 2000 bytes]"


def test_calls_of_a_turn_run_side_by_side(tool: Tool) -> None:
    calls = [ToolCall("python", json.dumps({"code": f"print({n})"}), call_id(n)) for n in range(6)]
    assert [r.content for r in asyncio.run(call_tools([tool], calls))] == [f"{n}\n" for n in range(6)]


class Dying(Sandbox):
    """One whose server is always lost."""

    def run(self, *arguments: Any) -> Never:
        raise SandboxDiedError("it is gone")


def test_a_lost_sandbox_fails_the_episode() -> None:
    with pytest.raises(EpisodeFailed, match="tool python: it is gone") as failed:
        asyncio.run(call_tool([python_tool(Dying())], "python", '{"code": "1"}'))
    assert failed.value.retryable


def test_where_the_kernel_refuses_the_tool_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxRefusedError, match="Python from a model is not run here"):
        python_tool(Sandbox(backend="bubblewrap"))
