"""n choices: sampled side by side from one prompt, each recorded once, any of them gone on from."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from rollout.chat.segment import Segment
from rollout.engine import Completion, Sampling
from rollout.gateway.result import SessionRecord
from rollout.gateway.server import TokenGateway
from rollout.gateway.session import SessionLimits
from rollout.testing.gateway import ADD, CALL, QUESTION, Script, ask, check, client, encode, serve, turn, user

TEXTS = ("one<|im_end|>", "two!<|im_end|>", CALL + "<|im_end|>")


async def choices(api: openai.AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    return (await api.chat.completions.create(model="policy", messages=list(messages), **options)).choices


def trained(segment: Segment) -> list[int]:
    return [i for i, mask in zip(segment.ids, segment.loss_mask, strict=True) if mask]


@pytest.mark.parametrize("continued", range(3))
def test_each_choice_is_trained_once_and_any_can_be_gone_on_from(continued: int) -> None:
    engine = Script(*TEXTS, "end<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            found = await choices(api, QUESTION, n=3, tools=[ADD])
            assert [(c.index, c.finish_reason) for c in found] == [(0, "stop"), (1, "stop"), (2, "tool_calls")]
            assert [c.message.content for c in found] == ["one", "two!", None]
            chosen = found[continued].message
            said = [{"role": "tool", "tool_call_id": call.id, "content": "95"} for call in chosen.tool_calls or ()]
            await ask(api, QUESTION, chosen, *(said or [user("go on")]), tools=[ADD])
        return gateway.session("s")

    session = serve(engine, agent)
    assert session.turns == 4
    prompt = engine.prompts[0]
    for index, (segment, text) in enumerate(zip(session.segments, TEXTS, strict=True)):
        check(segment)
        whole = prompt + encode(text)
        assert list(segment.ids[: len(whole)]) == whole
        assert trained(segment) == encode(text + ("end<|im_end|>" if index == continued else ""))
    assert engine.prompts[3][: len(prompt + encode(TEXTS[continued]))] == prompt + encode(TEXTS[continued])


def test_choices_go_on_with_a_conversation_and_have_seeds_of_their_own() -> None:
    engine = Script("one<|im_end|>", "left<|im_end|>", "right<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        gateway.open("s", sampling=Sampling(seed=3))
        async with client(gateway) as api:
            await ask(api, QUESTION)
            answer = await api.chat.completions.create(
                model="policy", messages=[QUESTION, turn("one"), user("go on")], n=2
            )
            given, sampled = len(engine.prompts[1]), len(encode("left<|im_end|>" + "right<|im_end|>"))
            assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
                "prompt_tokens": given,
                "completion_tokens": sampled,
            }
        return gateway.session("s").segments

    trunk, other = serve(engine, agent)
    assert trained(trunk) == encode("one<|im_end|>left<|im_end|>")
    assert trained(other) == encode("right<|im_end|>")
    assert len({s.seed for s in engine.samplings}) == 3


def test_a_stream_of_choices_says_whose_each_delta_is() -> None:
    engine = Script("one<|im_end|>", "two!<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            asked = {"model": "policy", "messages": [QUESTION], "n": 2, "stream": True, "logprobs": True}
            text, ended = ["", ""], {}
            probs: list[list[float]] = [[], []]
            async for chunk in await api.chat.completions.create(**asked):
                (choice,) = chunk.choices
                text[choice.index] += choice.delta.content or ""
                probs[choice.index] += [p.logprob for p in choice.logprobs.content] if choice.logprobs else []
                if choice.finish_reason:
                    ended[choice.index] = choice.finish_reason
            assert (text, ended) == (["one", "two!"], {0: "stop", 1: "stop"})
        segments = gateway.session("s").segments
        for found, segment in zip(probs, segments, strict=True):
            assert found == [p for p, mask in zip(segment.log_probs, segment.loss_mask, strict=True) if mask]

    serve(engine, agent)


class SecondFails(Script):
    """Its second request breaks."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *args: Any, **options: Any) -> Completion:
        if len(self.prompts) == 1:
            self.prompts.append([])
            raise OSError("gone")
        return await super().generate(prompt_ids, sampling, *args, **options)


def test_where_one_choice_fails_the_others_are_cancelled_and_nothing_is_recorded() -> None:
    engine = SecondFails("one<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        engine.gate.clear()
        async with client(gateway) as api:
            with pytest.raises(openai.InternalServerError):
                await choices(api, QUESTION, n=3)
        return gateway.session("s")

    session = serve(engine, agent)
    assert (session.segments, session.turns, session.refused) == ((), 0, 1)
    assert (engine.cancelled, engine.running) == (2, 0)


def test_limits_count_choices() -> None:
    engine = Script("abcd<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        gateway.open("turns", limits=SessionLimits(max_turns=3))
        async with client(gateway, "turns") as api:
            await choices(api, QUESTION, n=2)
            with pytest.raises(openai.BadRequestError, match="1 of its 3 turns"):
                await choices(api, QUESTION, n=2)
            await choices(api, QUESTION)
        async with client(gateway) as api:
            with pytest.raises(openai.BadRequestError, match="one and the same"):
                await choices(api, QUESTION, n=2, temperature=0)

    serve(engine, agent)


def test_all_that_a_session_samples_stays_within_its_tokens() -> None:
    """The prompt and an answer fit max_tokens; all answers together do too, those at once and one after the other."""
    engine = Script("abcdefgh")
    prompt = len(encode("<|im_start|>user\n37+58=<|im_end|>\n<|im_start|>assistant\n"))

    async def agent(gateway: TokenGateway) -> None:
        gateway.open("s", limits=SessionLimits(max_tokens=prompt + 6))
        async with client(gateway) as api:
            found = await choices(api, QUESTION, n=2)
            assert [c.message.content for c in found] == ["abcdef", "abcdef"]
            sampled, code = 12, None
            while code is None:
                try:
                    found = await choices(api, QUESTION, n=2)
                    sampled += sum(len(c.message.content) for c in found)
                except openai.BadRequestError as error:
                    code = error.code
            assert (code, gateway.limit_hit("s")) == ("context_length_exceeded", "max_tokens")
            assert prompt + 6 - 2 < sampled <= prompt + 6

        both = await asyncio.gather(*(gateway_ask(gateway, name) for name in ("x", "y")))
        assert sum(map(len, both)) <= prompt + 6

    async def gateway_ask(gateway: TokenGateway, name: str) -> str:
        gateway.open(name, limits=SessionLimits(max_tokens=prompt + 6))
        async with client(gateway, name) as api:
            content: str = (await ask(api, QUESTION)).message.content
            return content

    serve(engine, agent)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_texts_of_the_sessions_sampling_end_a_turn(temperature: float) -> None:
    engine = Script("to the END and more<|im_end|>")
    contents = []

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION, temperature=temperature)
            contents.append((answer.message.content, answer.finish_reason))

    serve(engine, agent, sampling=Sampling(stop=("END",)))
    assert contents == [("to the ", "stop")]
    assert engine.samplings[0].stop == ()
