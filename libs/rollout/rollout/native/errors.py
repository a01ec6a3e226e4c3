"""Errors of one thread or callback that are another's to raise."""

from collections.abc import Callable
from types import TracebackType


class HandOver:
    """Hand an exception of the block to a function instead of raising it."""

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
