"""The protocol of a run's samplers: one process (`WorkerProcess`), or a pool of them (`RayPool`)."""

from concurrent.futures import Future
from typing import Any, Protocol

from rollout.sync.transfer import Receiver
from rollout.workers.channel import Message


class Workers(Receiver, Protocol):
    """Samplers: calls and their results, weights, and the end of both. Once dead they stay so: start others."""

    ready: "Future[Message]"
    """Done when all samplers can be called; raises why they can't."""
    why: BaseException | None
    """The cause of death."""

    through_host: bool
    """Whether weights pass through host memory."""

    @property
    def alive(self) -> bool:
        """Whether all samplers can still be called."""
        ...

    def call(self, name: str, **arguments: Any) -> "Future[Message]":
        """Send a call. The future gets the result's head and payload, what was raised there, or WorkerDied."""
        ...

    def call_all(self, name: str, **arguments: Any) -> "list[Future[Message]]":
        """Send a call to every sampler, each with a result of its own."""
        ...

    def close(self) -> None:
        """End the samplers; what they still sample is lost."""
        ...
