"""Tools of MCP servers: programs that speak the Model Context Protocol over their standard input and output.

A server is started at the first call in a process, and again where it has ended; all episodes of the process share it,
and so what it keeps between calls. A server that ends fails the episode, to be tried again. Its connection lives on an
event loop in a thread of its own.
"""

import asyncio
import functools
import os
import shlex
import tempfile
import threading
from concurrent.futures import Future
from typing import Any

from rollout.errors import EpisodeFailed
from rollout.extras import missing_extra_message
from rollout.tools.tool import Tool

try:
    from mcp import ClientSession, MCPError, StdioServerParameters, stdio_client
except ImportError as error:
    raise ImportError(missing_extra_message("tools of MCP servers need mcp", "mcp")) from error

START_SECONDS = 60.0
PING_SECONDS = 5.0


class ToolError(RuntimeError):
    """What a server calls an error of its tool: the model reads it."""


class Server:
    """A running server. ValueError where it does not start; the text has its last words."""

    def __init__(self, command: str) -> None:
        words = shlex.split(command)
        if not words:
            raise ValueError("an MCP server needs a command, as in mcp:'python server.py'")
        self._parameters = StdioServerParameters(command=words[0], args=words[1:], env=dict(os.environ))
        self._begun: Future[ClientSession] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve()), name="mcp", daemon=True).start()
        try:
            self._session = self._begun.result(START_SECONDS)
        except Exception as error:
            raise ValueError(f"the MCP server {command!r} did not start: {error}") from error

    async def _serve(self) -> None:
        with tempfile.TemporaryFile("w+") as said:
            try:
                streams = stdio_client(self._parameters, errlog=said)
                async with streams as (read, write), ClientSession(read, write) as session:
                    await session.initialize()
                    self._loop = asyncio.get_running_loop()
                    self._begun.set_result(session)
                    await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001  whatever the transport raises: the server is of no use then
                if not self._begun.done():
                    said.seek(0)
                    self._begun.set_exception(RuntimeError(f"{error} {said.read()[-500:]}".strip()))

    def tools(self, command: str, timeout: float) -> tuple[Tool, ...]:
        """Return all tools that the server lists."""
        listed = self._wait(self._session.list_tools()).tools
        return tuple(
            Tool(
                t.name, t.description or "", t.input_schema, functools.partial(_call, command, t.name, timeout), timeout
            )
            for t in listed
        )

    def call(self, name: str, arguments: dict[str, Any], timeout: float) -> str:
        """Call a tool. Raise ToolError for an error of the tool, and MCPError for one of the protocol."""
        result = self._wait(self._session.call_tool(name, arguments, read_timeout_seconds=timeout))
        others = {part.type for part in result.content} - {"text"}
        if others:
            raise ToolError(f"the result holds {', '.join(sorted(others))}, which a model here can't read")
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text)
        return text

    def answers(self) -> bool:
        """Return whether the server is there."""
        try:
            self._wait(asyncio.wait_for(self._session.send_ping(), PING_SECONDS))
        except Exception:  # noqa: BLE001  whatever a lost connection raises
            return False
        return True

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


_SERVERS: dict[str, Server] = {}
_STARTING = threading.Lock()


def mcp_tools(command: str, timeout: float = 30.0) -> tuple[Tool, ...]:
    """Return the tools of the server that a command line starts.

    Raises:
        ValueError: the command does not start a server.
    """
    return _server(command).tools(command, timeout)


def _server(command: str) -> Server:
    with _STARTING:
        if command not in _SERVERS:
            _SERVERS[command] = Server(command)
        return _SERVERS[command]


def _call(command: str, name: str, timeout: float, **arguments: Any) -> str:
    """Call a tool from the process that runs it, which may be an environment's own."""
    server = _server(command)
    try:
        return server.call(name, arguments, timeout + PING_SECONDS)  # later than the tool's own limit
    except ToolError:
        raise
    except Exception as error:  # what a lost connection raises depends on when it is lost
        if isinstance(error, MCPError) and server.answers():
            raise ToolError(str(error)) from error
        with _STARTING:
            if _SERVERS.get(command) is server:
                del _SERVERS[command]
        raise EpisodeFailed(f"the MCP server {command!r} ended in a call of {name}: {error}", retryable=True) from error
