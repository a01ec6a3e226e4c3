"""What runs in an environment process: the environments of many episodes, each in a thread of its own.

`python -m rollout.environments.processes.worker FD` serves a run over the connection FD until it closes.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout.chat.messages import Message, Reply
from rollout.environments.checked import checked, where
from rollout.environments.environment import Environment, EpisodeContext, Observation, Score, StepResult
from rollout.environments.processes.messages import (
    pack_messages,
    pack_result,
    rebuild,
    unpack_messages,
    unpack_reply,
    unpack_tools,
)
from rollout.environments.thread_environment import host
from rollout.errors import EpisodeFailed, error_text
from rollout.tools.tool import Tool, as_tools
from rollout.workers.channel import Channel
from rollout.workers.heartbeat import HEARTBEAT, dump_stack_on_signal

KINDS = {"open": Observation, "step": StepResult, "finish": Score}


class Worker:
    """The environments of this process, by the number of their episode."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._environments: dict[int, Environment] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def serve(self) -> None:
        """Answer calls side by side, and beat, for ever."""
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()
        while True:
            self._channel.send({"beat": time.process_time()})
            await asyncio.sleep(HEARTBEAT)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._take, *self._channel.receive())
        except (EOFError, OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)  # the run is gone; so goes what environments have started

    def _take(self, head: dict[str, Any], payload: bytes) -> None:
        if "answer" in head:
            self._asked.pop(head["answer"]).set_result(head)
        elif "cancel" in head:
            if task := self._running.get(head["cancel"]):
                task.cancel()
        else:
            task = self._running[head["id"]] = asyncio.ensure_future(self._answer(head, payload))
            task.add_done_callback(lambda _: self._running.pop(head["id"]))

    async def _answer(self, head: dict[str, Any], payload: bytes) -> None:
        what = head["call"]
        try:
            result = await self._call(what, head, payload)
        except EpisodeFailed as failed:
            result = {"failed": failed.reason, "retryable": failed.retryable}
        except asyncio.CancelledError:
            result = {"failed": f"{what}() was cancelled", "retryable": True}
        except Exception as error:  # noqa: BLE001  a user's code: it fails its episode
            result = {"failed": f"{what}() raised {error_text(error)}", "retryable": True}
        closed = self._environments.pop(head["episode"], None) if what == "close" else None
        hung = getattr(closed, "hung", False)
        text = json.dumps(result).encode()  # ASCII: a message of an error may hold anything
        self._channel.send({"id": head["id"], "hung": hung}, text)

    async def _call(self, what: str, head: dict[str, Any], payload: bytes) -> dict[str, Any]:
        number = head["episode"]
        if what == "open":
            environment = self._environments[number] = await host(rebuild(json.loads(payload)))
            context = rebuild(head["context"])
            inside = EpisodeContext(**context, converse=RemoteConverse(self, number))  # type: ignore[arg-type]
            value: object = await environment.open(inside)
        elif number not in self._environments:  # open() was cancelled before there was one
            if what == "close":
                return {}
            raise EpisodeFailed(f"{what}() of an environment that was never opened", retryable=True)
        elif what == "close":
            await self._environments[number].close()
            return {}
        else:
            environment = self._environments[number]
            given = unpack_reply(head["reply"]) if what == "step" else head["end"]
            value = await getattr(environment, what)(given)
        try:
            return pack_result(checked(value, KINDS[what], environment, what))
        except TypeError as error:
            raise EpisodeFailed(f"{where(environment, what)}: {what}() returned {error}", retryable=False) from None

    async def ask(self, **head: Any) -> dict[str, Any]:
        """Send the run a request of an environment, and return its answer."""
        number = max(self._asked, default=0) + 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._channel.send({"ask": number, **head})
        result = await answer
        if "failed" in result:
            raise EpisodeFailed(result["failed"], result["retryable"])
        return result


class RemoteConverse:
    """`EpisodeContext.converse` for an environment in this process."""

    def __init__(self, worker: Worker, episode: int) -> None:
        self._worker, self._episode = worker, episode

    async def __call__(self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "sub") -> Any:
        """Begin a conversation with the policy beside the episode's own."""
        listed = [[t.name, t.description, dict(t.parameters), t.timeout, t.max_characters] for t in as_tools(tools)]
        head = {"what": "converse", "messages": pack_messages(messages), "tools": listed, "agent": agent}
        return RemoteConversation(self._worker, await self._worker.ask(episode=self._episode, **head))


class RemoteConversation:
    """A `Conversation` that the run plays; its attributes are those after the last call."""

    def __init__(self, worker: Worker, reply: dict[str, Any]) -> None:
        self._worker = worker
        self._note(reply)

    def _note(self, reply: dict[str, Any]) -> None:
        self._place = {"episode": reply["episode"], "conversation": reply["conversation"]}
        self.messages = list(unpack_messages(reply["messages"]))
        self.tools = unpack_tools(reply["tools"])
        self.__dict__.update(reply["state"])

    async def _ask(self, what: str, **head: Any) -> dict[str, Any]:
        reply = await self._worker.ask(what=what, **self._place, **head)
        if what != "fork":
            self._note(reply)
        return reply

    async def reply(self) -> Reply:
        """Sample one turn."""
        return unpack_reply((await self._ask("reply"))["value"])

    async def add_messages(self, messages: Sequence[Message]) -> bool:
        """Add the messages of others."""
        return bool((await self._ask("add_messages", given=pack_messages(messages)))["value"])

    async def go_on_from(self, messages: Sequence[Message]) -> bool:
        """Start a new stream from other messages."""
        return bool((await self._ask("go_on_from", given=pack_messages(messages)))["value"])

    async def fork(self, agent: str) -> "RemoteConversation":
        """Return a branch of the conversation."""
        return RemoteConversation(self._worker, await self._ask("fork", agent=agent))


def main(descriptor: int) -> None:
    """Serve the run at the other end of a connection."""
    dump_stack_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's
    if Path("/proc/self/oom_score_adj").exists():
        Path("/proc/self/oom_score_adj").write_text("1000")  # memory that runs out ends this process, not the sampler
    asyncio.run(Worker(Channel(Connection(descriptor))).serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
