"""TokenGateway: agents sample from a rollout engine by OpenAI's chat completions or Responses; tokens are recorded.

Strategy
1. A request names its session by the session's key (`gateway.key(id)`), or by X-Session-ID beside the master token.
2. The session's recorder finds the tokens that the messages continue (recorder.py); the engine samples after them.
3. While the engine works, the connection is watched (response_stream.py) and a stream's deltas leave as tokens are
   sampled (choice_task.py). Where the client leaves, the engine's work is cancelled and the session stays as it was.
   Otherwise the turn is recorded, then the rest of it sent.

Security: loopback by default; a token, compared in constant time; a session's key opens that session alone;
JSON only, of bounded size; nothing is evaluated or unpickled.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from rollout.extras import missing_extra_message

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(missing_extra_message("the gateway needs starlette and uvicorn", "gateway")) from error

from rollout.chat.chat import Chat
from rollout.chat.messages import Message
from rollout.chat.token_budget import TokenBudget
from rollout.engine import RolloutEngine, Sampling
from rollout.environments.environment import End
from rollout.gateway.answers import Answer, ChatWire
from rollout.gateway.chat_request import ChatRequest, RequestError, read_json, read_request, refuse
from rollout.gateway.choice_task import ChoiceTask
from rollout.gateway.recorder import Recorder
from rollout.gateway.response_stream import ResponseStream
from rollout.gateway.responses_answer import ResponsesWire
from rollout.gateway.responses_request import ResponsesRequest, read_responses_request
from rollout.gateway.result import SessionRecord
from rollout.gateway.session import LiveSession, SessionLimits

SESSION_HEADER = "X-Session-ID"
MIN_TOKEN = 16  # characters of the master token
MAX_SESSION_ID = 200  # characters
IDLE_TIMEOUT = 120  # seconds that a connection may idle: longer than clients keep theirs, so that they close first
BODY_TIMEOUT = 60.0  # seconds in which a body must have come
LARGE_BODY = 1 << 16  # bytes of a body that is read and tokenised in a thread, so that other sessions go on


class TokenGateway:
    """An OpenAI-compatible server over `engine`, in the running event loop: `async with TokenGateway(...) as gateway`.

    `gateway.base_url` and `gateway.key(session_id)` are what a client needs. `sampling` holds the defaults of a
    request; with `own_sampling` a session's temperature, top_p, top_k, seed and structured outputs win over what an
    agent asks for, so that a trainer sees one distribution. `model` is the name that requests give, `token` (None: a
    fresh one) opens all sessions.

    Raises ValueError for a host that is not this machine's own, unless `allow_remote`, and for a short token.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        chat: Chat,
        *,
        sampling: Sampling | None = None,
        own_sampling: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        model: str = "policy",
        allow_remote: bool = False,
        max_sessions: int = 4096,
        max_body_bytes: int = 8 << 20,
    ) -> None:
        if not allow_remote and not _is_loopback(host):
            raise ValueError(f"host {host!r} can be reached from outside; say allow_remote=True if that is meant")
        self.token = secrets.token_urlsafe(32) if token is None else token
        if len(self.token) < MIN_TOKEN or not self.token.isascii() or "." in self.token:
            raise ValueError(f"a token has at least {MIN_TOKEN} ASCII characters and no dot; None makes a good one")
        if max_sessions < 1 or max_body_bytes < 1:
            raise ValueError("max_sessions and max_body_bytes must be at least 1")
        self.engine = engine
        self.chat = chat
        self.model = model
        self._sampling = sampling or Sampling()
        self._own_sampling = own_sampling
        self._host, self._port = host, port
        self._max_sessions, self._max_body = max_sessions, max_body_bytes
        self._sessions: dict[str, LiveSession] = {}
        self._works: dict[str, set[asyncio.Task[Answer]]] = {}
        self._closed: set[str] = set()  # their keys open no new session
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the port and serve. Raise OSError where the port is taken."""
        if self._serving is not None:
            raise ValueError("the gateway is running already")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        bound = socket.create_server((self._host, self._port), family=family, backlog=2048)
        self._port = bound.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            lifespan="off",
            ws="none",
            http="h11",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_TIMEOUT,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="token gateway")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the gateway's server ended before it began")
            await asyncio.sleep(0.005)

    async def aclose(self) -> None:
        """Cancel all requests, refuse further ones, free the port. Records stay readable."""
        for session in list(self._sessions):
            await self._stop(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    async def __aenter__(self) -> "TokenGateway":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # -- sessions --------------------------------------------------------------------------------------------------

    @property
    def base_url(self) -> str:
        """The `base_url` for an OpenAI client."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    @property
    def open_sessions(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    @property
    def in_flight(self) -> int:
        """Number of requests that the engine works on."""
        return sum(map(len, self._works.values()))

    def key(self, session_id: str) -> str:
        """Return the API key of this session alone. The call itself opens no session."""
        if not 0 < len(session_id) <= MAX_SESSION_ID or not session_id.isascii() or not session_id.isprintable():
            raise ValueError(f"a session id has 1 to {MAX_SESSION_ID} printable ASCII characters, got {session_id!r}")
        seal = hmac.new(self.token.encode(), session_id.encode(), hashlib.sha256).hexdigest()
        return f"{session_id}.{seal}"

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling | None = None,
        limits: SessionLimits | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        """Open a session with its own settings; the first request of an unknown session opens one with the gateway's.
        A session that was closed stays closed.

        `budget` is shared with other sessions of one episode (None: `limits.max_tokens` of its own).

        Raises ValueError for an id that is taken or not printable, and where `max_sessions` are open.
        """
        self.key(session_id)
        if session_id in self._sessions or session_id in self._closed:
            state = "open" if session_id in self._sessions else "closed"
            raise ValueError(f"the session {session_id!r} is {state} already: give another id")
        if len(self._sessions) >= self._max_sessions:
            raise ValueError(f"{self._max_sessions} sessions are open, which is max_sessions: close some")
        limits = limits or SessionLimits()
        budget = budget or TokenBudget(limits.max_tokens)
        self._sessions[session_id] = LiveSession(
            session_id, sampling or self._sampling, limits, Recorder(self.chat), budget, self._own_sampling
        )
        self._works[session_id] = set()

    def session(self, session_id: str) -> SessionRecord:
        """Return the record of an open session so far. Raise KeyError for one that is not open."""
        return SessionRecord.of(self._sessions[session_id])

    def limit_hit(self, session_id: str) -> End | None:
        """Return the limit that refused a request or cut a completion off, if any. Raise KeyError if not open."""
        return self._sessions[session_id].limit_hit

    async def close(self, session_id: str) -> SessionRecord:
        """Cancel a session's requests, delete it and return its record. Raise KeyError for one that is not open."""
        live = self._sessions[session_id]
        self._closed.add(session_id)
        await self._stop(session_id)
        self._sessions.pop(session_id, None)
        self._works.pop(session_id, None)
        return SessionRecord.of(live)

    async def _stop(self, session_id: str) -> None:
        self._sessions[session_id].closed = True
        works = list(self._works[session_id])
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    # -- requests --------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model}", self._models, methods=["GET"]),
        ]
        handlers = {RequestError: _refused, HTTPException: _http_error, ClientDisconnect: _left, 500: _failed}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _models(self, request: Request) -> Response:
        self._authorised(request)
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "rollout"}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [entry]})
        if request.path_params["model"] != self.model:
            raise RequestError(404, f"there is no model {request.path_params['model']!r}", "model", "model_not_found")
        return JSONResponse(entry)

    async def _completions(self, request: Request) -> Response:
        session_id, body = await self._asked(request)
        read = partial(self._read, body)
        chat_request = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
        number = uuid.uuid4().hex
        live, work, task = await self._begin(session_id, chat_request, number, len(body) > LARGE_BODY)
        return ResponseStream(work, task, live, ChatWire(chat_request, self.chat))

    async def _responses(self, request: Request) -> Response:
        session_id, body = await self._asked(request)
        stored = self._sessions[session_id].responses if session_id in self._sessions else {}
        read = partial(self._read_responses, body, stored)
        asked = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
        number = uuid.uuid4().hex
        live, work, task = await self._begin(session_id, asked.chat, number, len(body) > LARGE_BODY)

        def store(done: "asyncio.Task[Answer]") -> None:
            if asked.is_stored and not done.cancelled() and done.exception() is None:
                live.responses[f"resp_{number}"] = (*asked.messages, done.result().choices[0].message)

        task.add_done_callback(store)
        return ResponseStream(work, task, live, ResponsesWire(asked, number, work.head.created))

    async def _asked(self, request: Request) -> tuple[str, bytes]:
        """Return the session and the body of a request."""
        session_id = self._authorised(request)
        if session_id is None:
            refuse(f"name the session: by its own key, or by the header {SESSION_HEADER}", code="no_session")
        return session_id, await self._body(request)

    async def _begin(
        self, session_id: str, chat_request: ChatRequest, number: str, large: bool
    ) -> "tuple[LiveSession, ChoiceTask, asyncio.Task[Answer]]":
        """Start the work of a request; its session opens with the first one."""
        chat_request = chat_request.without_structured() if self._own_sampling else chat_request
        if chat_request.ignored:
            names = ", ".join(chat_request.ignored)
            warnings.warn(f"agents send what has no effect on the policy: {names}", RuntimeWarning, stacklevel=2)
        if session_id in self._closed:
            raise RequestError(409, f"the session {session_id!r} is closed", code="session_closed")
        if session_id not in self._sessions:
            try:
                self.open(session_id)
            except ValueError as error:
                raise RequestError(429, str(error), code="too_many_sessions") from error
        live = self._sessions[session_id]
        async with live.beginning:
            begin = partial(live.begin, chat_request, self.chat)
            turn, samplings = await asyncio.to_thread(begin) if large else begin()
            live.running[number] = (turn, chat_request.n)
        if live.closed:
            live.recorder.abandon(live.running.pop(number)[0])
            raise RequestError(409, "the session was closed", code="session_closed")
        work = ChoiceTask(self.engine, self.chat, live, turn, chat_request, number)
        task = asyncio.create_task(work.run(samplings))
        self._works[session_id].add(task)
        task.add_done_callback(partial(self._ended, live, number))
        return live, work, task

    def _read(self, body: bytes) -> ChatRequest:
        return read_request(read_json(body), self.model)

    def _read_responses(self, body: bytes, stored: Mapping[str, Sequence[Message]]) -> ResponsesRequest:
        return read_responses_request(read_json(body), self.model, stored)

    def _ended(self, live: LiveSession, number: str, work: "asyncio.Task[Answer]") -> None:
        """Release the turn of a request that ended; without a record the session is as it was before."""
        live.recorder.abandon(live.running.pop(number)[0])
        self._works.get(live.id, set()).discard(work)

    def _authorised(self, request: Request) -> str | None:
        """Return the session of a request's key; None for the master token. Raise RequestError (401) otherwise."""
        session_id: str
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        named: str | None = request.headers.get(SESSION_HEADER)
        session_id, dot, _ = key.rpartition(".")
        try:
            expected = self.key(session_id) if dot else self.token
        except ValueError:
            expected = self.token
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), expected.encode()):
            raise RequestError(401, "the API key is not valid here", code="invalid_api_key")
        if not dot:
            if named is not None:
                try:
                    self.key(named)
                except ValueError as error:
                    refuse(str(error), SESSION_HEADER)
            return named
        if named not in (None, session_id):
            raise RequestError(401, f"{SESSION_HEADER} names another session than the key", code="invalid_api_key")
        return session_id

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(415, f"the body must be application/json, got {kind or 'nothing'!r}")
        too_large = RequestError(413, f"the body is over {self._max_body} bytes", code="body_too_large")
        if int(request.headers.get("content-length", 0)) > self._max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body:
                        raise too_large
        except TimeoutError as error:
            raise RequestError(408, f"the body did not come within {BODY_TIMEOUT:g} s") from error
        return bytes(body)


class _Server(uvicorn.Server):
    """A server inside a running event loop: signals stay with the owner of the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Skip signal handlers."""
        yield


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(RequestError(error.status_code, error.detail).body(), status_code=error.status_code)


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


async def _failed(_: Request, __: Exception) -> Response:
    return JSONResponse(RequestError(500, "the gateway or its engine failed; its log says how").body(), status_code=500)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
