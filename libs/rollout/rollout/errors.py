"""Errors of rollouts: an episode that cannot be scored, a policy that diverged, and errors passed between threads."""

from collections.abc import Callable
from types import TracebackType


class EpisodeFailed(Exception):  # noqa: N818  it names the event, as CancelledError's kin do
    """Failure of an episode: its environment, a tool's backend or its reward is down. It is never a reward of zero.

    `retryable` says whether the same task may be played again (a worker was lost, a limit was hit) or would fail again
    (a reward that isn't a number).
    """

    def __init__(self, reason: str, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable

    def __reduce__(self) -> tuple[type["EpisodeFailed"], tuple[str, bool]]:  # pickles with all fields
        return type(self), (self.reason, self.retryable)


class NotFiniteError(ValueError):
    """NaN or infinity in the model's logits, or in weights that are synced."""


class ForwardErrors:
    """A block whose exception is passed to a function instead of being raised, so that another thread raises it."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            self._failed(error)
        return True
