"""Errors of rollouts: an episode that cannot be scored, a policy that diverged, and errors passed between threads."""

from collections.abc import Callable
from traceback import TracebackException
from types import TracebackType


def error_text(error: BaseException) -> str:
    """Return the class of an error and its text, also where its own `__str__` raises."""
    return f"{type(error).__name__}: {TracebackException(type(error), error, None, compact=True)}"


class EpisodeFailed(Exception):  # noqa: N818  it names the event, as CancelledError's kin do
    """Failure of an episode: its environment, a tool's backend or its reward is down. It is never a reward of zero.

    `retryable` says whether the same task may be played again (a worker was lost, a limit was hit) or would fail again
    (a reward that isn't a number).
    """

    def __init__(self, reason: str, retryable: bool) -> None:
        reason = reason.encode(errors="backslashreplace").decode()  # it is printed, and stands in files
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable

    def __reduce__(self) -> tuple[type["EpisodeFailed"], tuple[str, bool]]:  # pickles with all fields
        return type(self), (self.reason, self.retryable)


class ServerError(RuntimeError):
    """A server that broke off, or failed by itself: the same request may succeed later."""


class NotFiniteError(ValueError):
    """NaN or infinity in the model's logits, or in weights that are synced."""


class GrammarError(ValueError):
    """A grammar of structured outputs that is too complex to go on with."""


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
