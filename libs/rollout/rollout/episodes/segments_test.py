"""Episodes of several token streams: a template that forgets thinking, compaction, sub-agents and branches.

Held to a stock transformers module on every stream: what is trained is what was sampled, after the very tokens that
the model saw, and every sampled token is trained once.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from chat_tools.conformance.real_templates import family_of, real_tokenizer
from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.batch import to_batch
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_episode, run_group
from rollout.native.engine import NativeEngine
from rollout.testing.forced import ForcedEngine, stock_log_probs
from rollout.testing.model import tiny_model
from rollout.tools.arithmetic import calculator
from rollout.tools.tool import call_tools

TOKENIZER = real_tokenizer("qwen3")
STOPS = family_of("qwen3").stops
MODEL = tiny_model(len(TOKENIZER), layers=2)
SAMPLING = Sampling(max_new_tokens=200, seed=1)


def chat() -> Chat:
    return Chat(TOKENIZER, stop_tokens=STOPS, tool_format="hermes")


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def forced(*turns: str) -> ForcedEngine:
    return ForcedEngine(MODEL, lambda prompt, turn: encode(turns[turn] + "<|im_end|>"), version=3)


def play(environment: EnvironmentFactory, engine: RolloutEngine, **options: Any) -> Episode:
    return asyncio.run(run_episode(environment, engine, chat(), SAMPLING, **options))


def assert_exact(
    episodes: Sequence[Episode],
    prompts: Sequence[Sequence[int]] | None = None,
    completions: Sequence[Completion] | None = None,
    model: nn.Module = MODEL,
) -> None:
    """Against the stock module, stream by stream; and against what the engine was asked and answered, where known."""
    for segment in (s for e in episodes for s in e.segments):
        expected = stock_log_probs(model, segment.ids)
        mask = torch.tensor(segment.loss_mask)
        found = torch.tensor(segment.log_probs, dtype=torch.float64)
        assert mask.any()
        assert (found - expected)[mask].abs().max() < 1e-5
        assert not found[~mask].any()
    if prompts is None or completions is None:
        return
    runs = []  # every run of sampled tokens with all that stood before it
    for segment in (s for e in episodes for s in e.segments):
        at = 0
        while at < len(segment.ids):
            end = at
            while end < len(segment.ids) and segment.loss_mask[end]:
                end += 1
            if end > at:
                runs.append((segment.ids[:at], segment.ids[at:end]))
            at = max(end, at + 1)
    asked = [(tuple(p), c.ids) for p, c in zip(prompts, completions, strict=True)]
    assert sorted(runs) == sorted(asked)


def texts(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(s.ids) for s in episode.segments]


class Quiz:
    """A question with a calculator, then another one: by then the template has forgotten the thinking."""

    def __init__(self) -> None:
        self.asked = 0

    async def open(self, context: EpisodeContext) -> Observation:
        return Observation((user("37+58?"),), (calculator(),))

    async def step(self, reply: Reply) -> StepResult:
        if reply.tool_calls:
            results = await call_tools((calculator(),), reply.tool_calls)
            return StepResult(tuple(r.to_message() for r in results), done=False)
        self.asked += 1
        return StepResult((user("and 1+1?"),), done=self.asked == 2)

    async def finish(self, end: End) -> Score:
        return Score(1.0)

    async def close(self) -> None:
        pass


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37+58"}}\n</tool_call>'
TURNS = (
    "<think>\nI need the tool\n</think>\n\n" + CALL,
    "<think>\nit says so\n</think>\n\nis 95",
    "<think>\neasy\n</think>\n\nis 2",
)


def test_a_template_that_forgets_thinking_begins_a_stream_when_the_user_speaks() -> None:
    engine = forced(*TURNS)
    episode = play(Quiz, engine)
    assert episode.end == "done"
    assert [s.sampled for s in episode.segments] == [
        sum(len(encode(t + "<|im_end|>")) for t in TURNS[:2]),
        len(encode(TURNS[2] + "<|im_end|>")),
    ]
    first, second = texts(episode)
    assert [words in first for words in ("I need the tool", "it says so", "is 95")] == [True] * 3
    assert [words in second for words in ("I need the tool", "it says so", "is 95")] == [False, False, True]
    # The second stream begins as transformers itself writes the conversation so far.
    stock = TOKENIZER.apply_chat_template(
        [dict(m) for m in episode.messages[:-1]],
        tools=[calculator().schema],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
    )
    assert engine.prompts[2] == list(stock)
    assert_exact([episode], engine.prompts, engine.completions)


def test_every_row_of_an_episode_has_its_reward_and_group() -> None:
    engine = forced(*TURNS)
    batch = to_batch([play(Quiz, engine, group=5), play(Quiz, forced(*TURNS), group=5)])
    assert batch["episode"].tolist() == [0, 0, 1, 1]
    assert batch["group"].tolist() == [5] * 4
    assert batch["reward"].tolist() == [1.0] * 4


class Compacting(Quiz):
    """Replaces all that was said by a summary after the first answer."""

    async def open(self, context: EpisodeContext) -> Observation:
        return Observation((user("remember 7 and then 8"),))

    async def step(self, reply: Reply) -> StepResult:
        self.asked += 1
        summary = (user("summary: 7, 8"), {"role": "assistant", "content": "I know"})
        return StepResult((user("what was first?"),), done=self.asked == 2, context=summary)


def test_a_replaced_context_is_a_stream_of_its_own() -> None:
    engine = forced("<think>\nlong\n</think>\n\nyes", "seven")
    episode = play(Compacting, engine)
    first, second = texts(episode)
    assert ["remember" in text for text in (first, second)] == [True, False]
    assert "summary: 7, 8" in second
    assert second.endswith("seven<|im_end|>")
    assert [m["content"] for m in episode.messages] == ["summary: 7, 8", "I know", "what was first?", "seven"]
    assert_exact([episode], engine.prompts, engine.completions)


class Team(Quiz):
    """Asks a sub-agent twice and a branch of it once, through the same engine."""

    async def open(self, context: EpisodeContext) -> Observation:
        self.context = context
        return Observation((user("lead the team"),))

    async def step(self, reply: Reply) -> StepResult:
        helper = self.context.converse((user("you help. 2+2?"),), agent="helper")
        first = await helper.reply()
        assert helper.add_messages((user(f"are you sure of {first.content}?"),))
        other = helper.fork("doubter")
        second, third = await helper.reply(), await other.reply()
        with pytest.raises(ValueError, match="name the agent"):
            self.context.converse((user("?"),), agent="")
        self.score = float(second.content == third.content)
        return StepResult()

    async def finish(self, end: End) -> Score:
        return Score(self.score)


def test_sub_agents_and_branches_are_recorded_and_trained() -> None:
    engine = forced("ask them", "four", "yes four", "no five")
    episode = play(Team, engine)
    assert [s.agent for s in episode.segments] == ["", "helper", "helper", "doubter"]
    assert episode.score == Score(0.0)
    assert episode.sampled == sum(len(c.ids) for c in engine.completions)
    assert [m["content"] for m in episode.messages] == ["lead the team", "ask them"]
    assert_exact([episode], engine.prompts, engine.completions)


class Remembering(Team):
    """A branch in the middle of a stream that goes on: llama's template keeps all."""

    async def step(self, reply: Reply) -> StepResult:
        helper = self.context.converse((user("2+2?"),), agent="helper")
        await helper.reply()
        other = helper.fork("doubter")
        helper.add_messages((user("sure?"),))
        other.add_messages((user("really?"),))
        await asyncio.gather(helper.reply(), other.reply())
        self.score = 1.0
        return StepResult()


def test_a_branchs_beginning_is_given_token_by_token_and_trained_once() -> None:
    tokenizer = real_tokenizer("qwen3_8")
    model = tiny_model(len(tokenizer), layers=2)
    engine = ForcedEngine(
        model, lambda prompt, turn: tokenizer(f"say {turn}<|im_end|>", add_special_tokens=False)["input_ids"]
    )
    talk = Chat(tokenizer, stop_tokens=family_of("qwen3_8").stops)
    episode = asyncio.run(run_episode(Remembering, engine, talk, SAMPLING))
    main, helper, doubter = episode.segments
    shared = len(engine.prompts[1]) + len(engine.completions[1].ids)
    assert helper.ids[:shared] == doubter.ids[:shared]
    assert [any(s.loss_mask[:shared]) for s in (helper, doubter)] == [True, False]
    assert main.agent == ""
    runs = [s.sampled for s in episode.segments]
    assert sum(runs) == sum(len(c.ids) for c in engine.completions)
    assert_exact([episode], model=model)


@pytest.mark.parametrize("environment", [Quiz, Compacting, Team])
def test_what_a_real_engine_samples_is_exact_in_every_stream(environment: EnvironmentFactory) -> None:
    """The native engine with weights of chance; half the vocabulary ends a turn, so that turns end."""
    engine = NativeEngine(MODEL, max_length=4096)
    sampling = Sampling(max_new_tokens=40, seed=7, stop_token_ids=tuple(range(0, len(TOKENIZER), 2)))
    episodes = asyncio.run(run_group(environment, engine, chat(), sampling, size=4, max_turns=3))
    assert not any(e.error for e in episodes), [e.error for e in episodes]
    assert sum(len(e.segments) for e in episodes) > 4
    assert_exact(episodes)
    again = asyncio.run(run_group(environment, engine, chat(), sampling, size=4, max_turns=3))
    assert [[s.ids for s in e.segments] for e in again] == [[s.ids for s in e.segments] for e in episodes]


REAL = {
    "glm4moe": ("is 95<|user|>", "glm-4.5"),
    "gptoss": ("<|channel|>final<|message|>is 95<|return|>", "harmony"),
    "gemma4": ("is 95<turn|>", "gemma"),
}


@pytest.mark.parametrize("name", REAL)
def test_templates_whose_stop_token_is_not_their_own_play(name: str) -> None:
    """They were refused: GLM samples the next role's token, gpt-oss <|return|> where history has <|end|>."""
    tokenizer = real_tokenizer(name)
    model = tiny_model(len(tokenizer), layers=2)
    engine = ForcedEngine(model, lambda prompt, turn: tokenizer(REAL[name][0], add_special_tokens=False)["input_ids"])
    talk = Chat(tokenizer, stop_tokens=family_of(name).stops, tool_format=REAL[name][1])

    class Twice(Compacting):
        async def step(self, reply: Reply) -> StepResult:
            self.asked += 1
            return StepResult((user("again?"),), done=self.asked == 3)

    episode = asyncio.run(run_episode(Twice, engine, talk, SAMPLING))
    assert (episode.end, episode.metrics["turns"]) == ("done", 3), episode.error
    assert_exact([episode], engine.prompts, engine.completions, model)
    last = tokenizer.decode(engine.prompts[-1])
    assert last.count("again?") == 2
    assert last.count("<|user|>" if name == "glm4moe" else "again?") <= 3  # no role is opened twice
