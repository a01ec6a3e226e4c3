"""The gateway over real HTTP with the real openai client: tokens, tools, streams, disconnects."""

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import openai
import pytest

from rollout.chat.chat import Chat
from rollout.chat.segment import Segment
from rollout.engine import Completion, OnTokens, Sampling
from rollout.gateway.result import SessionRecord
from rollout.gateway.server import TokenGateway
from rollout.gateway.session import SessionLimits
from rollout.testing.gateway import (
    ADD,
    CALL,
    QUESTION,
    TOKENIZER,
    TURNS,
    Script,
    ask,
    check,
    client,
    decode,
    encode,
    serve,
    turn,
    user,
)


def test_an_agent_with_tools_goes_on_from_its_own_tokens() -> None:
    engine = Script(CALL + "<|im_end|>", "It is 95.<|im_end|>", "Bye<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            messages = [QUESTION]
            answer = (await api.chat.completions.create(model="policy", messages=messages, tools=[ADD])).choices[0]
            assert answer.finish_reason == "tool_calls"
            (call,) = answer.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 37, "b": 58}
            messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "95"}]
            answer = (await api.chat.completions.create(model="policy", messages=messages, tools=[ADD])).choices[0]
            assert (answer.message.content, answer.finish_reason) == ("It is 95.", "stop")
            messages += [answer.message.model_dump(), {"role": "user", "content": "thanks"}]
            await api.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return gateway.session("s")

    session = serve(engine, agent)
    (segment,) = session.segments
    check(segment)
    sampled = encode(CALL + "<|im_end|>" + "It is 95.<|im_end|>" + "Bye<|im_end|>")
    assert [i for i, mask in zip(segment.ids, segment.loss_mask, strict=True) if mask] == sampled
    for prompt, text in zip(engine.prompts, engine.texts, strict=True):
        assert list(segment.ids[: len(prompt) + len(encode(text))]) == prompt + encode(text)
    assert "<tool_response>\n95\n</tool_response>" in decode(segment.ids)
    assert session.turns == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine_streams", [False, True])
def test_without_parallel_calls_a_turn_ends_with_its_first(stream: bool, engine_streams: bool) -> None:
    engine = Script(CALL + CALL.replace("37", "1") + "<|im_end|>", CALL + "<|im_end|>")
    engine.streams = engine_streams

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            for _ in range(2):
                asked: Any = {"model": "policy", "messages": [QUESTION], "tools": [ADD], "parallel_tool_calls": False}
                if stream:
                    chunks = [c async for c in await api.chat.completions.create(**asked, stream=True)]
                    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
                else:
                    calls = (await api.chat.completions.create(**asked)).choices[0].message.tool_calls
                assert [json.loads(call.function.arguments) for call in calls] == [{"a": 37, "b": 58}]
        return gateway.session("s")

    two, one = serve(engine, agent).segments
    for segment, text in ((two, CALL), (one, CALL + "<|im_end|>")):  # a single call keeps the end of its turn
        check(segment)
        assert [i for i, mask in zip(segment.ids, segment.loss_mask, strict=True) if mask] == encode(text)


def test_a_large_body_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, in_time, tokenise = threading.Event(), [], Chat.open  # answered: another session's request

    def slow(self: Chat, messages: Any, tools: Any = ()) -> list[int]:
        in_time.append(len(str(messages)) < 1000 or answered.wait(10))
        return tokenise(self, messages, tools)

    monkeypatch.setattr(Chat, "open", slow)

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api, client(gateway, "small") as other:

            async def said(api: openai.AsyncOpenAI, text: str) -> None:
                create = api.chat.completions.with_raw_response.create
                response = await create(model="policy", messages=[user(text)], user="me")
                assert response.headers["x-ignored"] == "user"

            large = asyncio.create_task(said(api, "abc def " * 40_000))
            await asyncio.sleep(0.05)
            await said(other, "hi")
            answered.set()
            await large

    with pytest.warns(RuntimeWarning, match="no effect on the policy: user"):
        serve(Script("<|im_end|>", "<|im_end|>"), agent)
    assert sorted(in_time) == [True, True]


@pytest.mark.parametrize("text", TURNS)
def test_whatever_the_turn_sending_it_back_goes_on_from_it(text: str) -> None:
    engine = Script(text, "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            first = (await api.chat.completions.create(model="policy", messages=[QUESTION], tools=[ADD])).choices[0]
            messages = [QUESTION, first.message.model_dump(exclude={"reasoning_content"})]
            calls = first.message.tool_calls or ()
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "95"} for call in calls]
            messages += [{"role": "user", "content": "and?"}]
            await api.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        return gateway.session("s")

    (segment,) = serve(engine, agent).segments
    check(segment)
    first = engine.prompts[0] + encode(text)
    assert engine.prompts[1][: len(first)] == first == list(segment.ids[: len(first)])


def test_what_does_not_extend_the_conversation_begins_a_new_segment() -> None:
    """Another system prompt, other tools, a compacted history; each segment is exact by itself."""
    engine = Script("one<|im_end|>", "two<|im_end|>", "three<|im_end|>", "four<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            await ask(api, QUESTION)
            await ask(api, {"role": "system", "content": "be brief"}, QUESTION)
            await ask(api, QUESTION, turn("one"), user("go on"), tools=[ADD])
            await ask(api, QUESTION, turn("edited"), user("go on"))
        return gateway.session("s").segments

    segments = serve(engine, agent)
    assert len(segments) == 4
    for segment, prompt, text in zip(segments, engine.prompts, engine.texts, strict=True):
        check(segment)
        assert list(segment.ids) == prompt + encode(text)
        assert sum(segment.loss_mask) == len(encode(text))


def test_a_branch_begins_with_the_recorded_tokens_and_trains_them_once() -> None:
    engine = Script("one<|im_end|>", "left<|im_end|>", "right<|im_end|>", "end<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            await ask(api, QUESTION)
            await ask(api, QUESTION, turn("one"), user("a"))
            await ask(api, QUESTION, turn("one"), user("b"))
            await ask(api, QUESTION, turn("one"), user("b"), turn("right"), user("c"))
        return gateway.session("s").segments

    trunk, branch = serve(engine, agent)
    check(trunk)
    check(branch)
    first = engine.prompts[0] + encode("one<|im_end|>")
    assert list(trunk.ids[: len(first)]) == list(branch.ids[: len(first)]) == first
    assert sum(branch.loss_mask) == len(encode("right<|im_end|>end<|im_end|>"))
    assert sum(trunk.loss_mask) == len(encode("one<|im_end|>left<|im_end|>"))


def test_requests_at_once_that_extend_one_conversation_do_not_mix() -> None:
    engine = Script("one<|im_end|>", "left<|im_end|>", "right<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            await ask(api, QUESTION)
            engine.gate.clear()
            both = [asyncio.create_task(ask(api, QUESTION, turn("one"), user(x))) for x in "ab"]
            while engine.running < 2:
                await asyncio.sleep(0.01)
            engine.gate.set()
            await asyncio.gather(*both)
        return gateway.session("s").segments

    for segment in serve(engine, agent):
        check(segment)
        assert decode(segment.ids).count("<|im_start|>assistant") == 2


def test_a_stop_text_ends_the_answer_and_the_record_where_it_is_complete() -> None:
    engine = Script("The sum is 95. END of it<|im_end|>", "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION, stop=["ND", "never"], logprobs=True)
            assert (answer.message.content, answer.finish_reason) == ("The sum is 95. E", "stop")
            assert len(answer.logprobs.content) == len(encode("The sum is 95. END"))
            await ask(api, QUESTION, answer.message, user("go on"))
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    check(segment)
    assert "The sum is 95. END<|im_end|>\n<|im_start|>user\ngo on" in decode(segment.ids)


def test_an_answer_at_its_limit_says_so_and_the_next_request_closes_it() -> None:
    engine = Script("abcdefgh<|im_end|>", "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION, max_tokens=3)
            assert (answer.message.content, answer.finish_reason) == ("abc", "length")
            await ask(api, QUESTION, answer.message, user("go on"), max_completion_tokens=5)
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    check(segment)
    assert "abc<|im_end|>\n<|im_start|>user\ngo on" in decode(segment.ids)
    assert [s.max_new_tokens for s in engine.samplings] == [3, 5]


def test_settings_reach_the_engine() -> None:
    engine = Script("x<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        gateway.open("seeded", sampling=Sampling(temperature=0.7, seed=5, max_new_tokens=9))
        async with client(gateway) as api, client(gateway, "seeded") as seeded:
            await ask(api, QUESTION, temperature=0.5, top_p=0.9, seed=7, max_tokens=4, extra_body={"top_k": 3})
            await ask(api, QUESTION, temperature=0)
            await ask(seeded, QUESTION)
            await ask(seeded, QUESTION)

    serve(engine, agent, sampling=Sampling(temperature=0.9))
    stop = Chat(TOKENIZER).stop_ids
    first, greedy, *seeded = engine.samplings
    assert first == Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=7, max_new_tokens=4, stop_token_ids=stop)
    assert greedy == Sampling(greedy=True, stop_token_ids=stop)
    assert all(s.temperature == 0.7 and s.max_new_tokens == 9 for s in seeded)
    assert len({s.seed for s in seeded}) == 2


def test_the_sessions_sampling_wins_where_the_trainer_says_so() -> None:
    engine = Script("x<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            await ask(api, QUESTION, temperature=0, top_p=0.5, max_tokens=4)

    serve(engine, agent, sampling=Sampling(temperature=0.9), own_sampling=True)
    assert engine.samplings == [Sampling(temperature=0.9, max_new_tokens=4, stop_token_ids=Chat(TOKENIZER).stop_ids)]


def test_token_ids_are_given_to_who_asks() -> None:
    """A stream's first chunk has the prompt's, each of its pieces the new ones."""
    engine = Script("x<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            asked = {"model": "policy", "messages": [QUESTION], "extra_body": {"return_token_ids": True}}
            whole = await api.chat.completions.create(**asked)
            chunks = [c async for c in await api.chat.completions.create(**asked, stream=True)]
        assert whole.prompt_token_ids == chunks[0].prompt_token_ids == engine.prompts[0]
        told = [token for chunk in chunks for token in chunk.choices[0].token_ids]
        assert whole.choices[0].token_ids == told == encode("x<|im_end|>")

    serve(engine, agent)


class Aborting(Script):
    """Breaks off each answer after two tokens, as an engine does whose weights are being replaced."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        assert on_tokens is None
        done = len(prompt_ids) - (len(self.prompts[0]) if self.prompts else len(prompt_ids))
        rest = encode(self.texts[0])[done : done + 2]
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.version += 1
        log_probs = tuple(-float(len(prompt_ids) + i) for i in range(len(rest)))
        reason: Literal["stop", "abort"] = "stop" if rest[-1:] == encode("<|im_end|>") else "abort"
        return Completion(tuple(rest), log_probs, reason, (self.version,) * len(rest))


def test_an_answer_that_new_weights_break_off_goes_on_from_its_own_tokens() -> None:
    engine = Aborting("abcde<|im_end|>", version=0)

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        gateway.open("s", sampling=Sampling(seed=1, max_new_tokens=10))
        async with client(gateway) as api:
            answer = await ask(api, QUESTION)
            assert (answer.message.content, answer.finish_reason) == ("abcde", "stop")
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    assert [v for v in segment.policy_versions if v >= 0] == [1, 1, 2, 2, 3, 3]
    assert [s.max_new_tokens for s in engine.samplings] == [10, 8, 6]
    assert len({s.seed for s in engine.samplings}) == 3


def test_an_engine_that_only_aborts_is_reported() -> None:
    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            with pytest.raises(openai.InternalServerError, match="broke off"):
                await ask(api, QUESTION)
            assert gateway.session("s").segments == ()

    engine = Aborting("")
    serve(engine, agent)
    assert len(engine.prompts) == 3


def test_limits_of_a_session() -> None:
    async def agent(gateway: TokenGateway) -> None:
        prompt = len(encode("<|im_start|>user\n37+58=<|im_end|>\n<|im_start|>assistant\n"))
        gateway.open("turns", limits=SessionLimits(max_turns=1))
        gateway.open("tokens", limits=SessionLimits(max_tokens=prompt + 2))
        gateway.open("none", limits=SessionLimits(max_tokens=prompt))
        gateway.open("late", limits=SessionLimits(deadline=0.0))
        with pytest.raises(ValueError, match="open already"):
            gateway.open("late")
        async with client(gateway, "turns") as api:
            await ask(api, QUESTION)
            with pytest.raises(openai.BadRequestError, match="1 turns") as caught:
                await ask(api, QUESTION)
            assert caught.value.code == "max_turns"
        async with client(gateway, "tokens") as api:
            assert (await ask(api, QUESTION)).message.content == "ab"
        for name, code in (("none", "context_length_exceeded"), ("late", "deadline")):
            async with client(gateway, name) as api:
                with pytest.raises(openai.BadRequestError) as caught:
                    await ask(api, QUESTION)
                assert caught.value.code == code
        with pytest.raises(ValueError, match="max_turns must be at least 1"):
            SessionLimits(max_turns=0)

    serve(Script("abcd<|im_end|>"), agent)


def test_a_closed_session_cancels_its_work_and_is_forgotten() -> None:
    engine = Script("x<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            await ask(api, QUESTION)
            engine.gate.clear()
            asked = asyncio.create_task(ask(api, QUESTION))
            while not engine.running:
                await asyncio.sleep(0.01)
            session = await gateway.close("s")
            with pytest.raises(openai.ConflictError, match="closed"):
                await asked
        assert (engine.cancelled, engine.running, gateway.open_sessions) == (1, 0, 0)
        assert [len(s.ids) for s in session.segments] == [len(engine.prompts[0]) + 2]
        with pytest.raises(KeyError):
            gateway.session("s")

    serve(engine, agent)


class Late(Script):
    """Past its deadline an answer holds nothing."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        assert on_tokens is None
        self.prompts.append(list(prompt_ids))
        return Completion((), (), "deadline", ())


def test_an_answer_without_a_token_is_told_and_leaves_no_segment() -> None:
    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION)
            assert (answer.message.content, answer.finish_reason) == ("", "length")
        assert gateway.limit_hit("s") == "deadline"
        assert (gateway.session("s").segments, gateway.session("s").turns) == ((), 1)

    serve(Late(""), agent)
