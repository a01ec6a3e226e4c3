"""What a run asks of whoever samples for it: one process (`WorkerProcess`), or a pool of them (`RayPool`)."""

from concurrent.futures import Future
from typing import Any, Protocol

from rollout.sync.transfer import Receiver
from rollout.workers.channel import Message


class Workers(Receiver, Protocol):
    """Calls and their answers, weights, and the end of both. Once it is dead it stays so: start another."""

    ready: "Future[Message]"
    """Done when all of it can be asked; raises why it can't."""
    why: BaseException | None
    """What became of it, once it is dead."""

    through_host: bool
    """Whether weights pass through host memory on their way to it."""

    @property
    def alive(self) -> bool:
        """Whether all of it can still be asked."""
        ...

    def call(self, name: str, **arguments: Any) -> "Future[Message]":
        """Ask for something. The future gets the answer's head and payload, or what was raised there, or WorkerDied."""
        ...

    def call_all(self, name: str, **arguments: Any) -> "list[Future[Message]]":
        """Ask every sampler of it, each for an answer of its own."""
        ...

    def close(self) -> None:
        """End it; what it still samples is lost."""
        ...
