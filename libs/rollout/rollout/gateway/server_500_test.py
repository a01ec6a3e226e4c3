"""The gateway over real HTTP with 500 sessions at once."""

import asyncio

import httpx
import openai

from rollout.gateway.server import SESSION_HEADER, TokenGateway
from rollout.testing.gateway import TOKEN, Script, ask, check, decode, serve, turn, user


def test_500_sessions_are_held_at_once() -> None:
    """All of them wait in the engine together, then each goes on from its own tokens."""
    count = 500
    engine = Script("one<|im_end|>")

    async def agent(gateway: TokenGateway, api: openai.AsyncOpenAI, number: int) -> None:
        session = {SESSION_HEADER: f"session-{number}"}
        question = user(f"question {number}")
        await ask(api, question, extra_headers=session)
        await ask(api, question, turn("one"), user("more"), extra_headers=session)

    async def body(gateway: TokenGateway) -> None:
        engine.gate.clear()
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
        http = httpx.AsyncClient(limits=limits, timeout=300)
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=TOKEN, max_retries=0, http_client=http) as api:
            agents = [asyncio.create_task(agent(gateway, api, number)) for number in range(count)]
            while engine.running < count:
                await asyncio.sleep(0.02)
            assert (gateway.open_sessions, gateway.in_flight, engine.most) == (count, count, count)
            engine.gate.set()
            await asyncio.gather(*agents)
        assert gateway.in_flight == 0
        for number in range(count):
            session = await gateway.close(f"session-{number}")
            (segment,) = session.segments
            check(segment)
            text = decode(segment.ids)
            assert f"question {number}<|im_end|>" in text
            assert text.count("one<|im_end|>") == session.turns == 2
        assert gateway.open_sessions == 0

    serve(engine, body)
