"""Agents as episodes: scores, truncation, failures, retries, seeds, groups, sub-agents, thinking that is stripped."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.environments.environment import EpisodeContext, Score
from rollout.environments.sources import TaskRow
from rollout.episodes.batch import to_batch
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.errors import EpisodeFailed
from rollout.gateway.agents import AgentSlot, AgentTask, run_agent, run_agents
from rollout.gateway.server import TokenGateway
from rollout.testing.chat import TEMPLATE, tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def play(
    agent: Any, *texts: str, chat: Chat | None = None, group: int | None = None, **options: Any
) -> tuple[ScriptedEngine, Any]:
    """The engine and the episode (with `group` the episodes) of an agent whose policy says `texts` in turn."""
    engine = ScriptedEngine(lambda prompt, turn: encode(texts[turn % len(texts)]))

    async def run() -> Any:
        async with TokenGateway(engine, chat or Chat(TOKENIZER)) as gateway:
            played: Any
            if group is None:
                played = await run_agent(agent, gateway, **options)
            else:
                played = await run_agents(agent, gateway, size=group, **options)
            assert (gateway.open_sessions, gateway.in_flight) == (0, 0)
            return played

    return engine, asyncio.run(run())


async def say(slot: AgentSlot, messages: Sequence[Any], **options: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.api_key, max_retries=0) as api:
        answer = await api.chat.completions.create(model=slot.model, messages=messages, **options)
    return answer.choices[0].message


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def talker(slot: AgentSlot) -> float:
    """Asks twice, whatever is said."""
    messages: list[Any] = [user(f"task {slot.context.task_id}")]
    for _ in range(2):
        messages += [await say(slot, messages), user("go on")]
    return float("two" in messages[-2].content)


def test_an_agent_is_played_and_scored() -> None:
    engine, episode = play(talker, "one<|im_end|>", "two<|im_end|>", context=EpisodeContext("t", index=3))
    assert (episode.id, episode.end, episode.reward, episode.error) == ("t/3/0", "done", 1.0, None)
    (segment,) = episode.segments
    assert list(segment.ids) == [*engine.prompts[1], *encode("two<|im_end|>")]
    assert segment.sampled == len(encode("one<|im_end|>two<|im_end|>"))
    assert episode.metrics == {"turns": 2}
    assert [m["content"] for m in episode.messages] == ["task t", "one", "go on", "two"]
    assert episode.timings["total_s"] >= episode.timings["generate_s"] >= 0


def test_the_tools_of_an_agent_have_their_rates() -> None:
    """The gateway sees what the policy calls and what comes back, once each, however often the history is sent."""
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    call = "<tool_call>\n<function=find>\n</function>\n</tool_call>"

    async def agent(slot: AgentSlot) -> float:
        messages: list[Any] = [user("find it")]
        for answer in ("Error: find gave no answer within 3 s", "Error: no such page", "here", None):
            said = await say(slot, messages, tools=[tool])
            messages.append(said.model_dump(exclude_none=True))
            for made in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": made.id, "content": answer})
        return 1.0

    _, episode = play(agent, *[call + "<|im_end|>"] * 3, "It is here.<|im_end|>")
    rates = {"tool/find/calls": 3, "tool/find/errors": 2, "tool/find/timeouts": 1}
    assert episode.metrics == {"turns": 4} | rates


def test_agents_of_several_groups_may_share_a_client_that_is_bound_to_a_loop() -> None:
    http = httpx.AsyncClient()  # as LangChain and openai-agents keep one for a process

    async def agent(slot: AgentSlot) -> float:
        api = openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.api_key, max_retries=0, http_client=http)
        for _ in range(3):
            await api.chat.completions.create(model=slot.model, messages=[user("hi")])
        return 1.0

    for _ in range(2):
        _, episodes = play(agent, "one<|im_end|>", group=8, attempts=1)
        assert [e.error for e in episodes] == [None] * 8


def test_a_blocking_agent_is_played_too() -> None:
    def agent(slot: AgentSlot) -> Score:
        with openai.OpenAI(base_url=slot.base_url, api_key=slot.api_key, max_retries=0) as api:
            answer = api.chat.completions.create(model=slot.model, messages=[user("hi")])
        return Score(0.5, {"length": len(answer.choices[0].message.content)})

    _, episodes = play(agent, "four<|im_end|>", group=3)
    assert [e.score.reward_components for e in episodes] == [{"length": 4}] * 3


@pytest.mark.parametrize(
    ("limits", "end"),
    [({"max_turns": 1}, "max_turns"), ({"max_tokens": 60}, "max_tokens"), ({"deadline": 0.0}, "deadline")],
)
def test_a_limit_is_truncation_and_no_failure(limits: dict[str, Any], end: str) -> None:
    _, episode = play(talker, "one" + "x" * 30 + "<|im_end|>", cut_off_reward=-0.5, **limits)
    assert (episode.end, episode.error, episode.reward) == (end, None, -0.5)


def test_an_agent_that_sees_the_limit_may_still_score_itself() -> None:
    async def agent(slot: AgentSlot) -> float:
        with pytest.raises(openai.BadRequestError, match="has had its 1 turns"):
            await talker(slot)
        return 0.25

    _, episode = play(agent, "one<|im_end|>", max_turns=1)
    assert (episode.end, episode.reward) == ("max_turns", 0.25)


def test_a_deadline_ends_an_agent_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.gateway.agents.GRACE", 0.1)

    async def agent(slot: AgentSlot) -> None:
        await say(slot, [user("hi")])
        await asyncio.sleep(30)

    begun = time.monotonic()
    _, episode = play(agent, "one<|im_end|>", deadline=begun + 3)
    assert (episode.end, episode.error, episode.reward) == ("deadline", None, 0.0)
    assert len(episode.segments) == 1
    assert time.monotonic() - begun < 25


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ZeroDivisionError("oh"), "the agent raised ZeroDivisionError: oh"),
        (EpisodeFailed("the sandbox is gone", retryable=False), "the sandbox is gone"),
        (float("nan"), "reward is nan"),
        (None, "gave NoneType: it gives a Score or a number"),
    ],
)
def test_what_breaks_is_a_failure_and_no_zero(value: object, message: str) -> None:
    async def agent(slot: AgentSlot) -> object:
        await say(slot, [user("hi")])
        if isinstance(value, Exception):
            raise value
        return value

    _, episode = play(agent, "one<|im_end|>")
    assert (episode.end, episode.score) == ("failed", None)
    assert message in episode.error
    assert episode.segments[0].sampled == len(encode("one<|im_end|>"))  # what was played is kept for people


def test_a_group_retries_what_may_pass_and_is_scored_together() -> None:
    class Agent:
        def __init__(self) -> None:
            self.attempts: list[tuple[int, int]] = []

        async def __call__(self, slot: AgentSlot) -> float:
            self.attempts.append((slot.context.index, slot.context.attempt))
            await say(slot, [user("hi")])
            if slot.context.index == 1 and slot.context.attempt == 0:
                raise EpisodeFailed("lost", retryable=True)
            return 1.0

        def score_group(self, episodes: Sequence[Episode]) -> list[Score]:
            return [Score(float(place)) for place, _ in enumerate(episodes)]

    agent = Agent()
    _, episodes = play(agent, "one<|im_end|>", group=3, row=TaskRow("t"))
    assert sorted(agent.attempts) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [e.id for e in episodes] == ["t/0/0", "t/1/1", "t/2/0"]
    assert [e.reward for e in episodes] == [0.0, 1.0, 2.0]
    assert to_batch(episodes)["episode"].tolist() == [0, 1, 2]


def test_seeds_follow_from_the_task_the_index_and_the_turn() -> None:
    def seeds(task: str, seed: int | None) -> set[int | None]:
        engine, _ = play(talker, "x<|im_end|>", group=2, row=TaskRow(task), sampling=Sampling(seed=seed))
        return {sampling.seed for sampling in engine.samplings}

    assert len(seeds("a", 1)) == 4
    assert seeds("a", 1) == seeds("a", 1)
    assert not seeds("a", 1) & seeds("b", 1)
    assert seeds("a", None) == {None}


def test_an_agent_stands_where_an_environment_does() -> None:
    async def agent(slot: AgentSlot) -> float:
        await say(slot, [user("hi")], temperature=0)
        return 1.0

    engine = ScriptedEngine(lambda prompt, turn: encode("x<|im_end|>"))
    task = AgentTask(agent)
    sampling = Sampling(temperature=0.7, seed=1)
    episodes = asyncio.run(run_group(task, engine, Chat(TOKENIZER), sampling, size=2, row=TaskRow("t"), max_turns=1))
    assert [(e.id, e.reward, e.group) for e in episodes] == [("t/0/0", 1.0, 0), ("t/1/0", 1.0, 0)]
    assert {(s.temperature, s.greedy) for s in engine.samplings} == {(0.7, False)}
    with pytest.raises(ValueError, match="an agent drives itself"):
        task()


def test_a_sub_agent_is_a_segment_of_its_own() -> None:
    async def agent(slot: AgentSlot) -> float:
        messages = [user("hi")]
        messages.append(await say(slot, messages))
        await say(slot, [{"role": "system", "content": "you are a helper"}, user("sum up")])
        slot.join("other-framework", "helper")
        headers = {"X-Session-ID": "other-framework"}
        async with openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.gateway.token, max_retries=0) as api:
            await api.chat.completions.create(model=slot.model, messages=[user("other")], extra_headers=headers)
        await say(slot, [*messages, user("on")])
        return 1.0

    _, episode = play(agent, "one<|im_end|>", "two<|im_end|>", "three<|im_end|>", "four<|im_end|>")
    assert [segment.agent for segment in episode.segments] == ["", "", "helper"]
    assert sum(s.sampled for s in episode.segments) == len(encode("onetwothreefour" + "<|im_end|>" * 4))
    assert episode.metrics["turns"] == 4


STRIPPING = TEMPLATE.replace(
    "{{ message.content }}",
    "{%- if message.role == 'assistant' and message.reasoning_content and "
    "not messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list -%}\n"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif -%}{{ message.content }}",
)


@pytest.mark.parametrize("returns_reasoning", [True, False])
def test_a_template_that_strips_thinking_begins_a_segment_that_is_exact(returns_reasoning: bool) -> None:
    """What the model saw is what is trained: the second turn follows the conversation without the first thinking."""
    tokenizer = tiny_tokenizer(STRIPPING)

    async def agent(slot: AgentSlot) -> float:
        messages = [user("hi")]
        for _ in range(2):
            answer = await say(slot, messages)
            assert answer.reasoning_content == "Hm."
            kept = answer.model_dump(exclude_none=True)
            if not returns_reasoning:
                kept.pop("reasoning_content")
            messages += [kept, user("go on")]
        return 1.0

    engine, episode = play(agent, "<think>\nHm.\n</think>\n\nyes<|im_end|>", chat=Chat(tokenizer))
    first, second = episode.segments
    assert "Hm." not in TOKENIZER.decode(engine.prompts[1])
    assert list(second.ids[: len(engine.prompts[1])]) == engine.prompts[1]
    assert first.sampled == second.sampled == len(encode("<think>\nHm.\n</think>\n\nyes<|im_end|>"))
