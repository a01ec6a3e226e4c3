"""The transport of a response: as one object, or as a stream whose deltas leave as tokens are sampled.

The connection is watched while the engine works. A delta never contradicts a later one. Without news, comments keep a
stream alive.
"""

import asyncio

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from rollout.gateway.answers import Answer, Wire
from rollout.gateway.chat_request import RequestError
from rollout.gateway.choice_task import ChoiceTask
from rollout.gateway.session import LiveSession

KEEP_ALIVE = 10.0  # seconds between the comments of a stream that waits
IGNORED_HEADER = "x-ignored"  # parameters of the request that had no effect


class ResponseStream(Response):
    """A response that waits for the work (`task` runs it), watches the connection, and sends one object or a stream."""

    def __init__(self, work: ChoiceTask, task: "asyncio.Task[Answer]", live: LiveSession, wire: Wire) -> None:
        self._work, self._task, self._live, self._wire = work, task, live, wire
        self._begun = False
        self._ignored = {IGNORED_HEADER: ", ".join(work.request.ignored)} if work.request.ignored else {}
        task.add_done_callback(lambda _: work.news.set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or cancel the work where the client leaves."""
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: self._work.news.set())
        try:
            while not (self._task.done() or gone.done()):
                try:
                    async with asyncio.timeout(KEEP_ALIVE if self._work.request.stream else None):
                        await self._work.news.wait()
                except TimeoutError:
                    await self._send_event(send, b": the engine is at work\n\n")
                await self._send_news(send)
            if self._task.done():
                await self._finish(scope, receive, send)
            else:
                self._live.cancelled += 1
        finally:
            gone.cancel()
            self._task.cancel()
            await asyncio.gather(self._task, gone, return_exceptions=True)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._task.cancelled():  # the session was closed
            error: Exception | None = RequestError(409, "the session was closed", code="session_closed")
        else:
            error = self._task.exception()  # type: ignore[assignment]
        if error is not None and not self._begun:
            self._live.refused += 1
            raise error
        if error is not None:
            refusal = error if isinstance(error, RequestError) else RequestError(500, "the engine failed")
            await self._send_event(send, self._wire.refusal(refusal))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if not isinstance(error, RequestError):
                raise error
            return
        answer = self._task.result()
        if not self._work.request.stream:
            await JSONResponse(self._wire.body(answer), headers=self._ignored)(scope, receive, send)
            return
        await self._send_news(send)
        for data in self._wire.end(answer):
            await self._send_event(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_news(self, send: Send) -> None:
        for chunk in self._work.take():
            for data in self._wire.chunk(chunk):
                await self._send_event(send, data)

    async def _send_event(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", **self._ignored}
            sent = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": sent})
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
