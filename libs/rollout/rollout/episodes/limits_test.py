"""max_tokens bounds an episode: each of its streams, and all that is sampled in it, whoever speaks."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.chat import Chat
from rollout.chat.conversation import TokensSpentError
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_episode
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
ASK = {"role": "user", "content": "x"}
PROMPT = len(CHAT.open([ASK]))


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Endless:
    """Puts the question anew after each answer, or has a sub-agent asked too, and never ends by itself."""

    instant = True
    compact, helpers = False, 0
    ends: list[str]
    caught: list[Exception]

    def __init__(self) -> None:
        type(self).ends, type(self).caught = [], []

    async def open(self, context: EpisodeContext) -> Observation:
        self.context = context
        return Observation([ASK])

    async def step(self, reply: Reply) -> StepResult:
        if self.helpers:
            converse = self.context.converse
            helpers = [converse([ASK], agent=f"helper {n}") for n in range(self.helpers)]
            said = await asyncio.gather(*(helper.reply() for helper in helpers), return_exceptions=True)
            self.caught += [error for error in said if isinstance(error, Exception)]
            if self.caught:
                raise self.caught[0]
        return StepResult((ASK,), done=False, context=() if self.compact else None)

    async def finish(self, end: End) -> Score:
        self.ends.append(end)
        return Score(0.5)

    async def close(self) -> None:
        pass


def play(answer: str, max_tokens: int, **attributes: Any) -> tuple[type[Endless], Episode]:
    made = cast(type[Endless], type("Made", (Endless,), attributes))
    engine = ScriptedEngine(lambda prompt, turn: [*encode(answer), CHAT.end_of_turn_id])
    sampling = Sampling(max_new_tokens=8)
    limits: dict[str, Any] = {"max_turns": 100, "max_tokens": max_tokens}
    return made, asyncio.run(asyncio.wait_for(run_episode(made, engine, CHAT, sampling, **limits), 60))


@settings(deadline=None)
@given(st.text("ab", max_size=10), st.integers(PROMPT + 1, PROMPT + 60), st.booleans(), st.integers(0, 3))
def test_no_stream_and_not_all_that_is_sampled_is_over_max_tokens(
    answer: str, max_tokens: int, compact: bool, helpers: int
) -> None:
    made, episode = play(answer, max_tokens, compact=compact, helpers=helpers)
    assert episode.error is None
    assert max(len(segment.ids) for segment in episode.segments) <= max_tokens
    assert episode.sampled <= max_tokens
    assert made.ends == [episode.end]
    assert episode.end in ("max_tokens", "length")


def test_a_compacted_context_does_not_renew_what_may_be_sampled() -> None:
    _, episode = play("abcd", PROMPT + 10, compact=True)
    assert (episode.end, episode.sampled) == ("max_tokens", PROMPT + 10)
    assert len(episode.segments) == -(-(PROMPT + 10) // len([*encode("abcd"), 0]))


def test_a_sub_agent_that_gets_no_token_ends_the_episode_where_the_environment_lets_it() -> None:
    made, episode = play("abcd", PROMPT + 4, helpers=6)
    assert (episode.end, episode.score) == ("max_tokens", Score(0.5))
    assert any(isinstance(error, TokensSpentError) for error in made.caught)
    assert episode.sampled <= PROMPT + 4


@pytest.mark.parametrize("instant", [True, False])
def test_so_it_does_from_a_thread(instant: bool) -> None:
    attributes = {"helpers": 6} | ({} if instant else {"instant": False})
    made, episode = play("abcd", PROMPT + 4, **attributes)
    assert (made.ends, episode.end) == (["max_tokens"], "max_tokens")
