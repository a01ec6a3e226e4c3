"""How often each tool was called, failed and took too long, counted from the messages of a conversation.

A user's environment, or an agent behind the gateway, which runs the tools itself, need not count:

1. A call of an offered tool counts when the model has made it.
2. Its result is the next tool message with its id, or without ids the first that is for a tool of its name. It is an
   error where its text begins with "Error" (as `rollout.Tool`'s and verifiers' do), and a timeout where that text says
   "no answer within", "timed out" or "TimeoutError". A result that is repeated counts once.

An environment's own metrics of the same names take precedence.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_LATE = ("no answer within", "timed out", "timeouterror")


class ToolStats:
    """The counts of one conversation, or of a session's."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._open: dict[str, str] = {}  # the tool of each call without a result, by the call's id

    @property
    def metrics(self) -> dict[str, float]:
        """`tool/NAME/calls`, `tool/NAME/errors` and `tool/NAME/timeouts` of each tool that was called."""
        return {name: float(count) for name, count in self._counts.items()}

    def count_calls(self, calls: Iterable[tuple[str, str]], available: Iterable[str]) -> None:
        """Count the calls of a turn, each a tool's name and the call's id; calls of tools not offered are ignored."""
        known = set(available)
        for name, call_id in calls:
            if name in known:
                self._counts[f"tool/{name}/calls"] += 1
                for what in ("errors", "timeouts"):
                    self._counts[f"tool/{name}/{what}"] += 0
                self._open[call_id] = name

    def count_results(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Count the results among messages; others are ignored."""
        for message in messages if self._open else ():
            if message.get("role") != "tool" or (name := self._take(message)) is None:
                continue
            text = str(message.get("content")).lstrip()
            failed = text.startswith("Error")
            self._counts[f"tool/{name}/errors"] += failed
            self._counts[f"tool/{name}/timeouts"] += failed and any(word in text.lower() for word in _LATE)

    def _take(self, message: Mapping[str, Any]) -> str | None:
        """Close the open call whose result a message is, and return its tool; None where there is none."""
        if message.get("tool_call_id"):
            return self._open.pop(str(message["tool_call_id"]), None)
        name = message.get("name")
        call_id = next((key for key, tool in self._open.items() if name in (None, tool)), None)
        return None if call_id is None else self._open.pop(call_id)


def summed_metrics(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several conversations, summed by name."""
    summed: dict[str, float] = {}
    for one in metrics:
        for name, value in one.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed
