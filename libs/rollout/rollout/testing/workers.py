"""For tests: rollout engines in processes of their own behind pipes, which can be made to fail or die at any call."""

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from rollout.engine import RolloutEngine

Fault = tuple[str, int, str]
"""(method, its n-th call from 0, "die before" | "die after" | "raise" | "hang")."""


def serve(connection: Connection, make: Callable[[], RolloutEngine], fault: Fault | None) -> None:
    """Answer calls until the pipe closes; at the fault's call, fail as it says."""
    engine = make()
    counts: dict[str, int] = {}
    connection.send(("ok", None))

    async def loop() -> None:
        while True:
            try:
                name, arguments = await asyncio.to_thread(connection.recv)
            except EOFError:
                return
            counts[name] = counts.get(name, -1) + 1
            struck = fault is not None and fault[:2] == (name, counts[name])
            what = fault[2] if fault is not None and struck else ""
            if what == "die before":
                os._exit(1)
            if what == "hang":
                await asyncio.sleep(3600)
            try:
                if what == "raise":
                    raise ValueError(f"{name} was made to fail")
                member = getattr(engine, name)
                answer = await member(*arguments) if callable(member) else member
            except ValueError as error:
                connection.send(("error", str(error)))
                continue
            if what == "die after":
                os._exit(1)
            connection.send(("ok", answer))

    asyncio.run(loop())


class Worker:
    """This side of a pipe to a rollout engine, one call at a time."""

    def __init__(self, make: Callable[[], RolloutEngine], fault: Fault | None = None) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once for all workers
        context.set_forkserver_preload(["rollout.native.engine", "rollout.testing.model", "rollout.testing.workers"])
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, make, fault), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until the engine is made."""
        self._connection.recv()

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call a method and return its result. Raise EOFError where the worker died, ValueError where it refused."""

        def ask() -> tuple[str, Any]:
            self._connection.send((name, arguments))
            result: tuple[str, Any] = self._connection.recv()
            return result

        kind, answer = await asyncio.to_thread(ask)
        if kind == "error":
            raise ValueError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self._connection.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("prepare", "receive", "commit", "abort", "pause", "resume", "generate"):
            raise AttributeError(name)

        async def method(*arguments: Any) -> Any:
            return await self.call(name, *arguments)

        return method
