"""A server of completions for tests: any rollout engine behind /v1/completions, which takes and returns ids."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rollout.engine import RolloutEngine, Sampling

MODEL = "policy"


class CompletionServer:
    """A server for `engine` on loopback, in a thread with an event loop of its own, while its context is open.

    `key`: the key that it asks for. `change` may alter every event before it is sent; where it returns None, the stream
    ends.
    """

    def __init__(self, engine: RolloutEngine, max_length: int | None = 256, key: str | None = None) -> None:
        self.engine, self.max_length, self.key = engine, max_length, key
        self.bodies: list[dict[str, Any]] = []
        self.gone = 0
        """Streams that their clients left."""
        self.change: Any = lambda event: event
        self.url = ""
        """Its address, once it is open."""

    @contextlib.contextmanager
    def open(self) -> Iterator[str]:
        """Serve inside the block, and yield the base URL."""
        bound = socket.create_server(("127.0.0.1", 0))
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        app = Starlette(routes=routes)
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
        thread.start()
        try:
            self.url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
            yield self.url
        finally:
            server.should_exit = True
            thread.join(20)

    def _allowed(self, request: Request) -> bool:
        return self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"

    async def _models(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        return JSONResponse({"data": [{"id": MODEL, "max_model_len": self.max_length}]})

    async def _completions(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        body = await request.json()
        self.bodies.append(body)
        events = self._events(body)
        try:
            first = await anext(events)
        except ValueError as error:
            return JSONResponse({"error": {"message": str(error), "type": "BadRequestError"}}, status_code=400)
        if not body["stream"]:
            whole = first
            async for event in events:
                whole = _joined(whole, event)
            if (k := body.get("prompt_logprobs")) is not None:
                whole["choices"][0]["prompt_logprobs"] = await self._prompt_rows(body["prompt"], k)
            return JSONResponse(self.change(whole))
        return StreamingResponse(self._lines(first, events), media_type="text/event-stream")

    async def _lines(self, first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        done = False
        try:
            yield _line(self.change(first))
            async for event in events:
                if (changed := self.change(event)) is None:
                    break
                yield _line(changed)
            yield "data: [DONE]\n\n"
            done = True
        finally:
            self.gone += not done

    async def _prompt_rows(self, ids: list[int], k: int) -> list[dict[str, dict[str, float]] | None]:
        """Return vLLM's rows: the k likeliest tokens at each place and its own, by id; none at the first."""
        scores = await self.engine.score(ids, k)
        places = zip(scores.top_tokens.t().tolist(), scores.top_log_probs.t().tolist(), strict=True)
        rows = [dict(zip(*both, strict=True)) for both in places]
        own = zip(rows, ids, scores.log_probs.tolist(), strict=True)
        return [None, *({str(t): {"logprob": x} for t, x in (row | {i: p}).items()} for row, i, p in [*own][1:])]

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield an event a token, the last one with the stop reason."""
        new_tokens: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()
        task = asyncio.ensure_future(
            self.engine.generate(body["prompt"], sampling_of(body), on_tokens=lambda *new: new_tokens.put_nowait(new))
        )
        task.add_done_callback(lambda _: new_tokens.put_nowait((None, None)))
        last: tuple[Any, Any] = ([], [])
        try:
            while (new := await new_tokens.get())[0] is not None:
                if last[0]:
                    yield _event(last[0], last[1], None)
                last = new
            done = await task
            yield _event(last[0], last[1], done.stop_reason)
        finally:
            task.cancel()


def sampling_of(body: dict[str, Any]) -> Sampling:
    """Return the sampling settings of a request."""
    limit, stops = body["max_tokens"], tuple(body["stop_token_ids"])
    penalties = {name: body[name] for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")}
    if body["temperature"] == 0:
        return Sampling(greedy=True, max_new_tokens=limit, stop_token_ids=stops, **penalties)
    drawn = {name: body[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    return Sampling(max_new_tokens=limit, stop_token_ids=stops, seed=body.get("seed"), **drawn, **penalties)


def _event(ids: Any, log_probs: Any, reason: str | None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "x" * len(ids),
        "token_ids": list(ids),
        "logprobs": {"token_logprobs": list(log_probs), "tokens": [f"token_id:{i}" for i in ids]},
        "finish_reason": reason,
    }
    return {"object": "text_completion", "model": MODEL, "choices": [choice]}


def _joined(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    (a,), (b,) = one["choices"], two["choices"]
    ids = a["token_ids"] + b["token_ids"]
    return _event(ids, a["logprobs"]["token_logprobs"] + b["logprobs"]["token_logprobs"], b["finish_reason"])


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"
