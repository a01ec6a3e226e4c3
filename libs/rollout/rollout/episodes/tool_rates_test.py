"""The rates of tools of an environment that does not count them itself, its sub-agents' among them."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Never

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.runner import run_episode
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.tool import Tool, call_tools

TOKENIZER = tiny_tokenizer()
QUESTION = ({"role": "user", "content": "37+58="},)
NOTHING = {"type": "object", "properties": {}}


def call(*names: str) -> str:
    return "\n".join(f"<tool_call>\n<function={name}>\n</function>\n</tool_call>" for name in names)


def fails() -> Never:
    raise LookupError("no such page")


async def hangs() -> None:
    await asyncio.sleep(3600)


TOOLS = (
    Tool("read", "Reads.", NOTHING, lambda: "a page"),
    Tool("find", "Finds.", NOTHING, fails),
    Tool("wait", "Waits.", NOTHING, hangs, timeout=0.05),
)


class World:
    """Runs the tools and says nothing of how often."""

    metrics: Mapping[str, float] = MappingProxyType({})

    async def open(self, context: EpisodeContext) -> Observation:
        self.context = context
        return Observation(QUESTION, TOOLS)

    async def step(self, reply: Reply) -> StepResult:
        answers = await call_tools(TOOLS, reply.tool_calls)
        return StepResult(tuple(a.to_message() for a in answers), done=not answers, metrics=self.metrics)

    async def finish(self, end: End) -> Score:
        return Score(1.0)

    async def close(self) -> None:
        pass


def rates(world: EnvironmentFactory, *turns: str, **options: Any) -> dict[str, tuple[float, ...]]:
    engine = ScriptedEngine(
        lambda prompt, turn: TOKENIZER(turns[turn] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    )
    options = {"max_turns": 4} | options
    episode = asyncio.run(run_episode(world, engine, Chat(TOKENIZER), Sampling(max_new_tokens=400), **options))
    assert episode.error is None
    found: dict[str, dict[str, float]] = {}
    for name, value in episode.metrics.items():
        if name.startswith("tool/"):
            found.setdefault(name.split("/")[1], {})[name.split("/")[2]] = value
    return {tool: tuple(values[what] for what in ("calls", "errors", "timeouts")) for tool, values in found.items()}


def test_the_tools_of_an_environment_have_their_rates() -> None:
    found = rates(World, call("read", "find"), call("find", "wait", "unknown"), "done")
    assert found == {"read": (1, 0, 0), "find": (2, 2, 0), "wait": (1, 1, 1)}


def test_the_answers_of_the_last_turn_count_too() -> None:
    assert rates(World, call("find"), max_turns=1) == {"find": (1, 1, 0)}


def test_an_environment_that_knows_better_is_believed() -> None:
    class Knowing(World):
        metrics = MappingProxyType(
            {"tool/find/errors": 0.0, "tool/own/calls": 7.0, "tool/own/errors": 1.0, "tool/own/timeouts": 0.0}
        )

    assert rates(Knowing, call("find"), "done") == {"find": (1, 0, 0), "own": (7, 1, 0)}


def test_a_sub_agents_tools_are_among_them() -> None:
    class Delegating(World):
        async def step(self, reply: Reply) -> StepResult:
            helper = self.context.converse(QUESTION, TOOLS)
            asked = await helper.reply()
            helper.add_messages([answer.to_message() for answer in await call_tools(TOOLS, asked.tool_calls)])
            branch = helper.fork("again")
            again = await branch.reply()
            branch.add_messages([answer.to_message() for answer in await call_tools(TOOLS, again.tool_calls)])
            return StepResult(done=True)

    assert rates(Delegating, "go", call("find", "read"), call("find")) == {"find": (2, 2, 0), "read": (1, 0, 0)}


def test_a_history_that_is_said_again_is_not_counted_again() -> None:
    class Compacting(World):
        async def step(self, reply: Reply) -> StepResult:
            outcome = await super().step(reply)
            return StepResult(outcome.messages, outcome.done, context=(*QUESTION, {"role": "user", "content": "go on"}))

    assert rates(Compacting, call("find"), call("find"), "done") == {"find": (2, 2, 0)}
