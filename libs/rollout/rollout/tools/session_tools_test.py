"""The tools of a session: what the model reads, in which order calls run, and how long what they make lasts."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from rollout.chat.messages import Reply
from rollout.environments.environment import EpisodeContext
from rollout.environments.task import Task
from rollout.errors import EpisodeFailed
from rollout.tools.session_tools import python_session_tool, shell_tool
from rollout.tools.tool import EpisodeTools, ToolCall, call_id, call_tools

LIMITS: dict[str, Any] = {"seconds": 20.0, "memory_mib": 256}


@pytest.fixture
def episode() -> Iterator[EpisodeTools]:
    tools = EpisodeTools([shell_tool(**LIMITS), python_session_tool(**LIMITS)])
    yield tools
    tools.close()


def said(episode: EpisodeTools, *calls: tuple[str, str]) -> list[str]:
    words = {"shell": "command", "python": "code"}
    turn = [ToolCall(name, json.dumps({words[name]: text}), call_id(n)) for n, (name, text) in enumerate(calls)]
    return [result.content for result in asyncio.run(call_tools(episode.tools, turn))]


def test_a_turns_calls_run_in_order_and_share_files(episode: EpisodeTools) -> None:
    calls = [
        ("shell", "sleep 0.3; echo 7 > seven; cd /usr; export N=3"),
        ("python", "x = int(open('seven').read()); x"),
    ]
    assert said(episode, *calls, ("shell", "pwd; echo $N; cat ~/seven")) == ["[no output]", "7\n", "/usr\n3\n7\n"]
    assert said(episode, ("python", "x + 1")) == ["8\n"]


def test_what_the_model_reads(episode: EpisodeTools) -> None:
    (failed,) = said(episode, ("shell", "echo a; exit 3"))
    assert failed == "a\n[exit status 3]"
    (killed,) = said(episode, ("shell", "kill -9 $$"))
    assert killed == "\n[ended by signal 9]"
    (ended,) = said(episode, ("python", "import os; print('b', flush=True); os._exit(4)"))
    assert ended == "b\n\n[Python ended by exit status 4]\n[Variables are lost, files are kept]"
    (raised,) = said(episode, ("python", "1 / 0"))
    assert raised.endswith("ZeroDivisionError: division by zero\n")


def test_long_outputs_keep_head_and_tail(episode: EpisodeTools) -> None:
    (text,) = said(episode, ("shell", "echo first; seq 100000; echo last"))
    assert text.startswith("first\n1\n2\n")
    assert text.endswith("99999\n100000\nlast\n")
    assert len(text) < 11_000


def test_episodes_have_sessions_of_their_own(episode: EpisodeTools) -> None:
    other = EpisodeTools([shell_tool(**LIMITS)])
    assert said(episode, ("shell", "echo mine > file; ls")) == ["file\n"]
    assert said(other, ("shell", "ls -A")) == ["[no output]"]
    other.close()
    with pytest.raises(EpisodeFailed, match="after its episode's end"):
        said(other, ("shell", "ls"))


def test_a_task_opens_a_session_for_its_episode_and_closes_it() -> None:
    task = Task(
        messages=({"role": "user", "content": "Hi"},), reward=lambda reply, results: 1.0, tools=(shell_tool(**LIMITS),)
    )

    async def turns() -> list[str]:
        contents = []
        for _ in range(2):
            environment = task()
            await environment.open(EpisodeContext("task"))
            for number in range(2):
                call = ToolCall("shell", '{"command": "echo >> f; wc -l < f"}', call_id(number))
                outcome = await environment.step(Reply("", "", tool_calls=(call,)))
                contents.append(outcome.messages[0]["content"])
            await environment.close()
        return contents

    assert asyncio.run(turns()) == ["1\n", "2\n"] * 2


def test_an_unbound_tool_says_what_binds_it() -> None:
    with pytest.raises(EpisodeFailed, match="EpisodeTools"):
        asyncio.run(call_tools([shell_tool(**LIMITS)], [ToolCall("shell", '{"command": "ls"}')]))
