"""The sampling process's side: it answers calls until the pipe closes, and then ends, whatever still runs."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from typing import Any

from rollout.engine import RolloutEngine
from rollout.errors import NotFiniteError
from rollout.workers.broadcast_receiver import GroupBuckets
from rollout.workers.bucket_messages import TakenBuckets, manifest_from
from rollout.workers.channel import Channel, Message
from rollout.workers.collective import BrokenGroup
from rollout.workers.heartbeat import HEARTBEAT, dump_stack_on_signal

Handler = Callable[[dict[str, Any]], Awaitable[bytes | dict[str, Any] | None]]
"""Function of a call's arguments that returns a payload, JSON values, or nothing."""
ERRORS: dict[str, type[Exception]] = {
    "NotFiniteError": NotFiniteError,
    "ValueError": ValueError,
    "BrokenGroup": BrokenGroup,
}


def weight_handlers(engine: RolloutEngine) -> dict[str, Handler]:
    """Return handlers for the receiver's side of `rollout.sync`, for an engine in this process."""
    taken, grouped = TakenBuckets(), GroupBuckets()

    async def join(call: dict[str, Any]) -> None:
        await grouped.join(call)

    async def prepare(call: dict[str, Any]) -> None:
        await engine.prepare(manifest_from(call))

    async def receive(call: dict[str, Any]) -> dict[str, Any]:
        bucket = await grouped.take(call) if grouped.is_broadcast(call) else taken.take(call)
        return {"missing": await engine.receive(bucket)}

    async def exchange(call: dict[str, Any]) -> dict[str, Any]:
        return {"missing": await grouped.exchange(call, engine)}

    async def commit(call: dict[str, Any]) -> None:
        await engine.commit(int(call["version"]))

    async def abort(call: dict[str, Any]) -> None:
        del call
        await engine.abort()

    async def pause(call: dict[str, Any]) -> None:
        await engine.pause(call["mode"])

    async def resume(call: dict[str, Any]) -> None:
        del call
        await engine.resume()

    async def stay(call: dict[str, Any]) -> None:
        del call
        await asyncio.Event().wait()  # who asks learns of this process's end

    return {
        "stay": stay,
        "join": join,
        "prepare": prepare,
        "receive": receive,
        "exchange": exchange,
        "commit": commit,
        "abort": abort,
        "pause": pause,
        "resume": resume,
    }


async def answer_call(handlers: Mapping[str, Handler], call: dict[str, Any]) -> Message:
    """Run a call and return its result; where something was raised, the head says what."""
    result = (await asyncio.gather(handlers[call["call"]](call), return_exceptions=True))[0]
    if isinstance(result, BaseException):
        kind = next((name for name, kind in ERRORS.items() if isinstance(result, kind)), "RuntimeError")
        text = str(result) if kind != "RuntimeError" else f"{type(result).__name__}: {result}"
        return {"error": text, "kind": kind}, b""
    return ({}, result) if isinstance(result, bytes) else ({"answer": result}, b"")


def settle_answer(future: "Future[Message]", head: dict[str, Any], payload: bytes) -> None:
    """Set the caller's result, or raise there what was raised here."""
    if "error" in head:
        settle_error(future, ERRORS.get(head["kind"], RuntimeError)(head["error"]))
        return
    with contextlib.suppress(InvalidStateError):
        future.set_result((head, payload))


def settle_error(future: "Future[Message]", error: BaseException) -> None:
    """Raise an error in a waiting call; one that was cancelled, at any moment by any thread, gets nothing."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def serve(connection: "Connection[Any, Any]", handlers: Mapping[str, Handler]) -> None:
    """Answer calls side by side until the other end closes; then the process ends."""
    asyncio.run(_serve(Channel(connection), handlers))
    os._exit(0)


async def _serve(channel: Channel, handlers: Mapping[str, Handler]) -> None:
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(call: dict[str, Any]) -> None:
        head, payload = await answer_call(handlers, call)
        try:
            channel.send({"id": call["id"], **head}, payload)
        except OSError:
            closed.set()

    def begin(call: dict[str, Any]) -> None:
        task = loop.create_task(answer(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(begin, channel.receive()[0])
        except (EOFError, OSError):
            os._exit(0)  # the run is gone: its samples are not needed

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:  # in a thread of its own: a loop that is busy is alive
                time.sleep(HEARTBEAT)
                channel.send({"beat": time.process_time()})

    dump_stack_on_signal()
    threading.Thread(target=read, daemon=True).start()
    channel.send({"id": -1})
    threading.Thread(target=beat, daemon=True).start()
    await closed.wait()
