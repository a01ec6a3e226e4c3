"""An agent written with the openai client trains token-exact: a real model's tokens, held to stock transformers."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
import torch
from torch import nn

from rollout.chat.chat import Chat
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.gateway.result import SessionRecord
from rollout.gateway.server import SESSION_HEADER, TokenGateway
from rollout.native.engine import NativeEngine
from rollout.testing.gateway import ADD, TOKEN, TOKENIZER, encode
from rollout.testing.model import tiny_model

QUESTION = {"role": "user", "content": "3+4="}
CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def caller() -> nn.Module:
    """A tiny model that has learned one conversation by heart: it calls the tool, then says what came back."""
    chat = Chat(TOKENIZER)
    model: nn.Module = tiny_model(vocab=len(TOKENIZER))
    said = [{"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    follow = chat.after_turn([{"role": "tool", "content": "7", "name": "add", "tool_call_id": said[0]["id"]}])
    tools: list[Any] = [type("Offered", (), {"schema": ADD})]
    turns = [encode(CALL + "<|im_end|>"), encode("It is 7.<|im_end|>")]
    ids = chat.open([QUESTION], tools)
    mask = [False] * len(ids)
    for turn, given in zip(turns, (follow, []), strict=True):
        ids, mask = [*ids, *turn, *given], [*mask, *[True] * len(turn), *[False] * len(given)]
    row = torch.tensor([ids])
    labels = torch.where(torch.tensor([mask]), row, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(400):
        loss = model(input_ids=row, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    return model.eval()


def stock_log_probs(model: nn.Module, ids: Sequence[int], temperature: float) -> list[float]:
    """Teacher-forced log-probs of each token but the first, one sequence, no cache: what a trainer computes."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()


class Watched:
    """The engine, and what it really sampled."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.sampled: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *args: Any, **options: Any) -> Completion:
        completion = await self.engine.generate(prompt_ids, sampling, *args, **options)
        self.sampled.append((list(prompt_ids), completion))
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


async def streamed(api: openai.AsyncOpenAI, **asked: Any) -> tuple[dict[str, Any], str | None]:
    """What a stream adds up to: the message to send back, and the reason of the end."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reason = None
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        calls = [call.model_dump(exclude={"index"}) for call in choice.delta.tool_calls or ()]
        message["tool_calls"] = message.get("tool_calls", []) + calls
        reason = choice.finish_reason or reason
    return message, reason


async def agent(api: openai.AsyncOpenAI, seed: int) -> tuple[str, int]:
    """A loop as anybody writes it: call tools until an answer comes. Odd ones read streams."""
    messages, calls = [QUESTION], 0
    for _ in range(4):
        asked = {"model": "policy", "messages": messages, "tools": [ADD], "seed": seed, "max_tokens": 90}
        if seed % 2:
            message, reason = await streamed(api, **asked, temperature=0.8)
        else:
            answer = (await api.chat.completions.create(**asked, temperature=0.8)).choices[0]
            message, reason = answer.message.model_dump(), answer.finish_reason
        messages.append(message)
        if reason != "tool_calls":
            return message["content"], calls
        for call in message["tool_calls"]:
            calls += 1
            given = json.loads(call["function"]["arguments"])
            content = str(sum(value for value in given.values() if isinstance(value, int)))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    return "", calls


def test_an_agent_with_tools_trains_token_exact(caller: nn.Module) -> None:
    async def run() -> tuple[list[tuple[list[int], Completion]], list[tuple[str, int]], list[SessionRecord]]:
        engine = Watched(NativeEngine(caller, version=5))
        async with TokenGateway(engine, Chat(TOKENIZER), token=TOKEN) as gateway:
            clients = [
                openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key(f"agent {i}"), max_retries=0)
                for i in range(6)
            ]
            results = await asyncio.gather(*(agent(api, seed) for seed, api in enumerate(clients)))
            for api in clients:
                await api.close()
            return engine.sampled, results, [gateway.session(f"agent {i}") for i in range(6)]

    sampled, results, sessions = asyncio.run(run())
    for kind in (results[::2], results[1::2]):
        assert ("It is 7.", 1) in kind  # the tool was called, and its answer read
    segments = [segment for session in sessions for segment in session.segments]
    assert sum(session.turns for session in sessions) == len(sampled)
    for prompt, completion in sampled:  # each turn stands in a segment as it was sampled, right after its prompt
        whole = [*prompt, *completion.ids]
        # Two sessions may have sampled the same tokens, in batches of their own: equal but for float noise.
        homes = [s for s in segments if list(s.ids[: len(whole)]) == whole and s.loss_mask[len(prompt)]]
        assert any(s.log_probs[len(prompt) : len(whole)] == completion.log_probs for s in homes)
    assert sum(sum(s.loss_mask) for s in segments) == sum(len(c.ids) for _, c in sampled)
    for segment in segments:
        stock = stock_log_probs(caller, segment.ids, 0.8)
        for at in range(1, len(segment.ids)):
            if segment.loss_mask[at]:
                assert segment.log_probs[at] == pytest.approx(stock[at - 1], abs=2e-4)
                assert segment.policy_versions[at] == 5
            else:
                assert (segment.log_probs[at], segment.policy_versions[at]) == (0.0, -1)


def test_120_sessions_of_a_real_engine() -> None:
    """All wait at once for one native engine; each segment is what the model would have been scored with.

    500 sessions at once: server_500_test.
    """
    count = 120
    model = tiny_model(vocab=len(TOKENIZER), layers=2)

    async def talk(http: httpx.AsyncClient, number: int) -> None:
        session = {SESSION_HEADER: f"s{number}"}
        messages = [{"role": "user", "content": f"q{number}"}]
        for _ in range(2):
            asked = {"model": "policy", "messages": messages, "max_tokens": 4, "seed": number}
            response = await http.post("chat/completions", json=asked, headers=session)
            assert response.status_code == 200, response.text
            messages += [response.json()["choices"][0]["message"], {"role": "user", "content": "more"}]

    async def run() -> list[SessionRecord]:
        engine = NativeEngine(model, max_batch=128)
        async with TokenGateway(engine, Chat(TOKENIZER), token=TOKEN, sampling=Sampling()) as gateway:
            await engine.pause()
            limits = httpx.Limits(max_connections=count)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(
                base_url=gateway.base_url, headers=headers, timeout=300, limits=limits
            ) as http:
                agents = [asyncio.create_task(talk(http, number)) for number in range(count)]
                while gateway.in_flight < count:
                    await asyncio.sleep(0.02)
                assert gateway.open_sessions == count
                await engine.resume()
                await asyncio.gather(*agents)
            assert (gateway.open_sessions, gateway.in_flight) == (count, 0)
            return [gateway.session(f"s{number}") for number in range(count)]

    sessions = asyncio.run(asyncio.wait_for(run(), 500))
    assert all(len(session.segments) == 1 and session.turns == 2 for session in sessions)
    for session in sessions[::6]:
        (segment,) = session.segments
        stock = stock_log_probs(model, segment.ids, 1.0)
        for at in (at for at, sampled in enumerate(segment.loss_mask) if sampled):
            assert segment.log_probs[at] == pytest.approx(stock[at - 1], abs=2e-4)


def test_a_client_that_leaves_frees_its_place_in_the_engine() -> None:
    """Cancelled in the native engine while it decodes: no step is spent on the request after that."""
    model = tiny_model(vocab=len(TOKENIZER), layers=2)

    async def run() -> tuple[int, int, SessionRecord]:
        engine = NativeEngine(model)
        async with TokenGateway(engine, Chat(TOKENIZER), token=TOKEN) as gateway:
            headers = {"Authorization": f"Bearer {gateway.key('s')}"}
            async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as http:
                # a seed whose answer is long: its stop tokens are as likely as any other
                asked = {"model": "policy", "messages": [QUESTION], "max_tokens": 200, "seed": 3, "temperature": 3}
                going = asyncio.create_task(http.post("chat/completions", json=asked))
                while engine.decode_steps < 5:
                    await asyncio.sleep(0.001)
                going.cancel()
                while gateway.in_flight:
                    await asyncio.sleep(0.001)
                steps = engine.decode_steps
                answer = await http.post("chat/completions", json=asked | {"max_tokens": 4})
                assert answer.status_code == 200
                return steps, engine.decode_steps, await gateway.close("s")

    steps, after, session = asyncio.run(asyncio.wait_for(run(), 120))
    assert steps < 150
    assert after - steps <= 8  # the few of the second answer, and one under way
    assert (session.cancelled, session.turns, len(session.segments)) == (1, 1, 1)
