"""The record of a session, as data."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.chat.messages import Message
from rollout.chat.segment import Segment
from rollout.gateway.session import LiveSession


@dataclass(frozen=True)
class SessionRecord:
    """The segments of a session, in the order in which they began, and the counts of its requests.

    `turns` got a response, `cancelled` ones lost their client, `refused` ones failed after they had begun. `messages`
    is the longest conversation, for people; `generate_s` the seconds that requests spent in the engine, summed; `tools`
    says how often each tool was called, failed and took too long (`rollout.tools.tool_stats`).
    """

    id: str
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    turns: int
    cancelled: int
    refused: int
    generate_s: float
    tools: Mapping[str, float]

    @classmethod
    def of(cls, live: LiveSession) -> "SessionRecord":
        """Copy the record of an open session so far."""
        recorder = live.recorder
        counts = (recorder.turns, live.cancelled, live.refused)
        return cls(live.id, recorder.segments, recorder.messages, *counts, live.generate_s, recorder.tally.metrics)
