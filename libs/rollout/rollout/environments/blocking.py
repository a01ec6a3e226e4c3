"""Environments whose code blocks: called in threads of their own, so that sampling goes on."""

from collections.abc import Callable
from typing import Any

from rollout.errors import EpisodeFailed
from rollout.tools.workers import OverrunError, RefusedError, Workers

ENVIRONMENTS = Workers("environment")


async def call(key: str, timeout: float, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of environment `key` in a thread, for at most `timeout` seconds; raise what it raises.

    Raises:
        EpisodeFailed: no result in time, or too many earlier calls still run.
    """
    try:
        ended = await ENVIRONMENTS.run(key, timeout, function, *args, **options)
    except OverrunError:
        raise EpisodeFailed(f"{key} gave no answer within {timeout:g} s", retryable=True) from None
    except RefusedError as refused:
        raise EpisodeFailed(f"{key} is refused: {refused}", retryable=False) from None
    if ended.error is not None:
        raise ended.error
    return ended.value
