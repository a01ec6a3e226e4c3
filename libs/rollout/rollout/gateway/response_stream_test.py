"""Streams and connections over real HTTP with the real openai client: deltas, waits, errors, clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Never

import httpx
import openai
import pytest

from rollout.chat.segment import Segment
from rollout.gateway.result import SessionRecord
from rollout.gateway.server import TokenGateway
from rollout.testing.gateway import ADD, QUESTION, TURNS, Script, ask, check, client, encode, serve, turn, user


@pytest.mark.parametrize("text", TURNS)
@pytest.mark.parametrize("tools", [[ADD], openai.omit])
@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_adds_up_to_the_whole_answer_and_is_recorded_alike(text: str, tools: Any, streams: bool) -> None:
    engine = Script(text)
    engine.streams = streams  # an engine that tells nothing on the way

    async def ask(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            asked = {"model": "policy", "messages": [QUESTION], "tools": tools, "logprobs": True}
            whole = (await api.chat.completions.create(**asked)).choices[0]
            text, reasoning, reason = "", "", None
            calls: dict[int, list[str]] = {}
            probs: list[Any] = []
            usage: Any = None
            async with client(gateway, "t") as other:
                stream = await other.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": True}
                )
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        delta = choice.delta
                        text += delta.content or ""
                        reasoning += getattr(delta, "reasoning_content", None) or ""
                        for call in delta.tool_calls or ():
                            name, arguments = calls.setdefault((call.index), ["", ""])
                            calls[call.index] = [name + (call.function.name or ""), arguments + call.function.arguments]
                        probs += choice.logprobs.content if choice.logprobs else []
                        reason = choice.finish_reason or reason
        assert text == (whole.message.content or "")
        assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
        assert list(calls.values()) == [[c.function.name, c.function.arguments] for c in whole.message.tool_calls or ()]
        assert (reason, probs) == (whole.finish_reason, whole.logprobs.content)
        (a,), (b,) = gateway.session("s").segments, gateway.session("t").segments
        assert a == b
        assert [p.logprob for p in probs] == [p for p, mask in zip(a.log_probs, a.loss_mask, strict=True) if mask]
        assert (usage.prompt_tokens, usage.completion_tokens) == (a.loss_mask.index(True), sum(a.loss_mask))

    serve(engine, ask)


async def event_lines(http: httpx.AsyncClient, gateway: TokenGateway, **asked: Any) -> AsyncIterator[str]:
    """The lines of a stream, as they come."""
    headers = {"Authorization": f"Bearer {gateway.key('s')}"}
    body = {"model": "policy", "messages": [QUESTION], "stream": True, **asked}
    async with http.stream("POST", f"{gateway.base_url}/chat/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line:
                yield line


def said(line: str) -> str:
    """The text of a chunk."""
    content: str = json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return content


def test_a_delta_leaves_before_the_next_token_is_sampled() -> None:
    """The engine samples a token when the one before it has been read."""
    text = "one by one"
    engine = Script(text + "<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        engine.paces = asyncio.Semaphore(1)
        heard = ""
        async with httpx.AsyncClient(timeout=60) as http:
            async for line in event_lines(http, gateway):
                if line == "data: [DONE]":
                    break
                delta = said(line)
                heard += delta
                if delta:
                    assert not gateway.session("s").segments  # the turn is not over
                    engine.paces.release()
                    if not text.startswith(heard + " ") or heard == text:
                        continue
                    engine.paces.release()  # white space waits for what follows it
        assert heard == text

    serve(engine, agent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_engines_work(stream: bool) -> None:
    engine = Script("It is 95. And so on, and so on.<|im_end|>", "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            asked = {"model": "policy", "messages": [QUESTION], "stop": ["nd s"], "stream": stream}
            answer = await api.chat.completions.create(**asked)
            chunks = [chunk async for chunk in answer] if stream else []
            content = "".join(c.choices[0].delta.content or "" for c in chunks) or answer.choices[0].message.content
            assert content == "It is 95. A"
            assert (chunks[-1] if stream else answer).choices[0].finish_reason == "stop"
            await ask(api, QUESTION, turn(content), user("go on"))
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    check(segment)
    assert len(engine.ended) == 1
    assert sum(segment.loss_mask) == len(encode("It is 95. And s")) + len(encode("x<|im_end|>"))


def test_a_client_that_leaves_in_the_middle_of_a_stream_leaves_no_trace() -> None:
    engine = Script("one two three<|im_end|>", "two<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        engine.paces = asyncio.Semaphore(3)
        async with httpx.AsyncClient(timeout=60) as http:
            async for line in event_lines(http, gateway):
                if said(line):
                    break
        while engine.running or gateway.in_flight:
            await asyncio.sleep(0.01)
        engine.paces = None
        async with client(gateway) as api:
            await ask(api, QUESTION)
        return gateway.session("s")

    session = serve(engine, agent)
    assert (engine.cancelled, session.cancelled, session.turns) == (1, 1, 1)
    (segment,) = session.segments
    check(segment)
    assert engine.prompts[0] == engine.prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_in_the_engine_and_leaves_no_trace(stream: bool) -> None:
    engine = Script("one<|im_end|>", "lost<|im_end|>", "two<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            await ask(api, QUESTION)
            engine.gate.clear()
            asked = asyncio.create_task(ask(api, QUESTION, turn("one"), user("a"), stream=stream))
            while not engine.running:
                await asyncio.sleep(0.01)
            assert gateway.in_flight == 1
            asked.cancel()
            while engine.running or gateway.in_flight:
                await asyncio.sleep(0.01)
            engine.gate.set()
            await ask(api, QUESTION, turn("one"), user("a"))
        return gateway.session("s")

    session = serve(engine, agent)
    assert (engine.cancelled, session.cancelled, session.turns) == (1, 1, 2)
    (segment,) = session.segments
    check(segment)
    assert engine.prompts[1] == engine.prompts[2]


def test_a_stream_that_waits_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.gateway.response_stream.KEEP_ALIVE", 0.05)
    engine = Script("one<|im_end|>")

    async def agent(gateway: TokenGateway) -> None:
        engine.gate.clear()
        body = {"model": "policy", "messages": [QUESTION], "stream": True}
        headers = {"Authorization": f"Bearer {gateway.key('s')}"}
        async with (
            httpx.AsyncClient(timeout=60) as http,
            http.stream("POST", f"{gateway.base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": the engine is at work") == 3:
                    engine.gate.set()
        assert response.status_code == 200
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in data) == "one"
        assert lines[-2:] == ["data: [DONE]", ""]

    serve(engine, agent)


class Breaking(Script):
    """Fails once the gate is open."""

    error: Exception

    async def generate(self, *arguments: Any, **options: Any) -> Never:
        await super().generate(*arguments, **options)
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("too long"), "too long"), (OSError("secret"), "engine failed")]
)
def test_an_error_in_a_begun_stream_is_an_event_of_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    monkeypatch.setattr("rollout.gateway.response_stream.KEEP_ALIVE", 0.05)
    engine = Breaking("x")
    engine.error = error

    async def agent(gateway: TokenGateway) -> None:
        engine.gate.clear()
        async with client(gateway) as api:
            stream = await api.chat.completions.create(model="policy", messages=[QUESTION], stream=True)
            engine.gate.set()
            with pytest.raises(openai.APIError, match=said):
                async for _ in stream:
                    pass
        assert gateway.session("s").segments == ()

    serve(engine, agent)
