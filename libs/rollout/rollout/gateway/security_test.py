"""Who is not let in, and what is not taken."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Never

import httpx
import pytest

import rollout
from rollout.chat.chat import Chat
from rollout.gateway import server
from rollout.gateway.server import SESSION_HEADER, TokenGateway
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

CHAT = Chat(tiny_tokenizer())
TOKEN = "a-token-of-the-test"
JSON = {"Content-Type": "application/json"}
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Ends(ScriptedEngine):
    """Answers with the end of the turn."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, turn: [CHAT.end_of_turn_id])


engine = Ends


def requests(body: Callable[[httpx.AsyncClient, TokenGateway], Awaitable[None]], **options: Any) -> None:
    """Run `body(http client, gateway)`."""

    async def run() -> None:
        async with TokenGateway(engine(), CHAT, token=TOKEN, **options) as gateway:
            headers = {"Authorization": f"Bearer {TOKEN}", SESSION_HEADER: "s"}
            async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as http:
                await body(http, gateway)

    asyncio.run(run())


def is_error(response: httpx.Response, status: int, code: str | None = None) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code


def test_without_the_key_nothing_is_answered() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        seal = gateway.key("s").rpartition(".")[2]
        wrong = [
            "",
            "Bearer",
            f"Bearer {TOKEN}x",
            f"Bearer {TOKEN[:-1]}",
            f"Basic {TOKEN}",
            f"Bearer t.{seal}",
            f"Bearer .{seal}",
        ]
        wrong += [f"Bearer {TOKEN}.{seal}", f"Bearer s.{TOKEN}", "Bearer \xe9.x", f"Bearer {'s' * 300}.{seal}"]
        for value in wrong:
            for method, path in (("POST", "chat/completions"), ("GET", "models")):
                headers = {"Authorization": value.encode("latin-1")}
                request = http.build_request(method, path, json=BODY if method == "POST" else None, headers=headers)
                is_error(await http.send(request), 401, "invalid_api_key")
        assert gateway.open_sessions == 0

    requests(body)


def test_a_sessions_key_opens_that_session_alone() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        key = {"Authorization": f"Bearer {gateway.key('a.b')}"}
        is_error(await http.post("chat/completions", json=BODY, headers=key), 401)  # X-Session-ID says s
        del http.headers[SESSION_HEADER]
        assert (await http.post("chat/completions", json=BODY, headers=key)).status_code == 200
        assert gateway.session("a.b").turns == 1
        is_error(await http.post("chat/completions", json=BODY), 400, "no_session")
        is_error(await http.post("chat/completions", json=BODY, headers={SESSION_HEADER: "\x7f"}), 400)
        with pytest.raises(ValueError, match="printable"):
            gateway.key("s\n")

    requests(body)


def test_a_closed_session_stays_closed() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        assert (await http.post("chat/completions", json=BODY)).status_code == 200
        await gateway.close("s")
        is_error(await http.post("chat/completions", json=BODY), 409, "session_closed")
        with pytest.raises(ValueError, match="closed already"):
            gateway.open("s")
        assert gateway.open_sessions == 0

    requests(body)


def test_models() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        assert [m["id"] for m in (await http.get("models")).json()["data"]] == ["tiny"]
        assert (await http.get("models/tiny")).json()["object"] == "model"
        is_error(await http.get("models/other"), 404, "model_not_found")

    requests(body, model="tiny")


def test_json_of_bounded_size_alone() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        big = json.dumps(BODY | {"messages": [{"role": "user", "content": "x" * 2000}]}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            yield big[:500]
            yield big[500:]

        is_error(await http.post("chat/completions", content=big, headers=JSON), 413)
        is_error(await http.post("chat/completions", content=pieces(), headers=JSON), 413)
        is_error(await http.post("chat/completions", content=b"\x80\x04K*.", headers=JSON), 400)
        for kind in ("application/octet-stream", "application/x-www-form-urlencoded", "text/plain"):
            is_error(await http.post("chat/completions", content=b"{}", headers={"Content-Type": kind}), 415)
        is_error(await http.get("chat/completions"), 405)
        is_error(await http.get("elsewhere"), 404)
        is_error(await http.post("chat/completions", json=BODY | {"best_of": 2}), 400, "unsupported_parameter")
        assert gateway.open_sessions == 0

    requests(body, max_body_bytes=1000)


def test_a_body_that_does_not_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends the half of a body and then nothing gets an answer, and others meanwhile theirs."""
    monkeypatch.setattr(server, "BODY_TIMEOUT", 0.2)

    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        url = httpx.URL(gateway.base_url)
        head = (
            f"POST {url.path.rstrip('/')}/chat/completions HTTP/1.1",
            f"Host: {url.host}",
            "Content-Type: application/json",
        )
        lines = (*head, f"Authorization: Bearer {TOKEN}", f"{SESSION_HEADER}: s", "Content-Length: 100", "", '{"model"')
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write("\r\n".join(lines).encode())
        assert (await http.post("chat/completions", json=BODY)).status_code == 200
        said = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        assert said.startswith(b"HTTP/1.1 408 ")
        writer.close()

    requests(body)


def test_no_more_sessions_than_allowed() -> None:
    async def body(http: httpx.AsyncClient, gateway: TokenGateway) -> None:
        assert (await http.post("chat/completions", json=BODY)).status_code == 200
        other = {SESSION_HEADER: "t"}
        is_error(await http.post("chat/completions", json=BODY, headers=other), 429, "too_many_sessions")
        await gateway.close("s")
        assert (await http.post("chat/completions", json=BODY, headers=other)).status_code == 200

    requests(body, max_sessions=1)


class Broken(Ends):
    """An engine whose answers fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, *args: Any, **options: Any) -> Never:
        raise self.error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), [(ValueError("the prompt is too long"), 400), (OSError("secret"), 500)])
def test_an_engine_that_fails_is_an_error_in_openais_shape(error: Exception, status: int, stream: bool) -> None:
    async def run() -> None:
        async with TokenGateway(Broken(error), CHAT, token=TOKEN) as gateway:
            headers = {"Authorization": f"Bearer {gateway.key('s')}"}
            async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as http:
                response = await http.post("chat/completions", json=BODY | {"stream": stream})
                is_error(response, status)
                assert ("too long" in response.text, "secret" in response.text) == (status == 400, False)
                assert gateway.session("s").segments == ()

    asyncio.run(run())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_other_hosts_than_loopback_are_refused_unless_told(host: str) -> None:
    with pytest.raises(ValueError, match="allow_remote=True"):
        TokenGateway(engine(), CHAT, host=host)
    TokenGateway(engine(), CHAT, host=host, allow_remote=True)


@pytest.mark.parametrize("token", ["", "short", "with-a-dot.in-the-token", "\xe9" * 20])
def test_poor_tokens_are_refused(token: str) -> None:
    with pytest.raises(ValueError, match="at least 16 ASCII"):
        TokenGateway(engine(), CHAT, token=token)
    assert TokenGateway(engine(), CHAT).token != TokenGateway(engine(), CHAT).token


def test_the_port_is_bound_to_loopback_and_freed() -> None:
    async def run() -> int:
        async with TokenGateway(engine(), CHAT, token=TOKEN) as gateway:
            port = int(gateway.base_url.split(":")[2].split("/")[0])
            with pytest.raises(OSError, match=r"in use"):
                await TokenGateway(engine(), CHAT, port=port).start()
            with pytest.raises(ValueError, match="running already"):
                await gateway.start()
        return port

    port = asyncio.run(run())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_server_names_its_extra_and_rollout_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    for name in ("rollout.gateway.server", "rollout.gateway.agents"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "TokenGateway" in dir(rollout)
    for name in ("TokenGateway", "AgentTask"):
        with pytest.raises(ImportError, match=r"pip install 'tessera-rollout\[gateway\]'"):
            getattr(rollout, name)
