"""The record of an episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.chat.messages import Message
from rollout.chat.segment import Segment
from rollout.environments.environment import End, Score


class ScoredSegments:
    """Token streams with a score, or the reason why there is none: an episode, or its summary."""

    id: str
    segments: tuple[Any, ...]
    score: Score | None
    error: str | None

    @property
    def reward(self) -> float:
        """Reward of the episode. Raises ValueError where it failed."""
        if self.score is None:
            raise ValueError(f"episode {self.id} failed and has no reward: {self.error}")
        return self.score.reward

    @property
    def sampled(self) -> int:
        """Number of tokens sampled in the episode."""
        return sum(segment.sampled for segment in self.segments)


@dataclass(frozen=True)
class Episode(ScoredSegments):
    """One episode, played or failed.

    `id` is the task's id, the number in its group and the attempt. `segments` are its exact token streams, sub-agents'
    after its own. A failed episode has no score, and the reason in `error`; it is never a reward of zero. `messages` is
    the conversation for people, `metrics` what the environment counted, with `turns`; `timings` are seconds:
    "generate_s", "environment_s", "total_s". Episodes of one `group` are compared with one another.
    """

    id: str
    task_id: str
    attempt: int
    segments: tuple[Segment, ...]
    score: Score | None
    end: End
    timings: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    messages: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    group: int = 0

    def __post_init__(self) -> None:
        if (self.score is None) == (self.error is None) or (self.end == "failed") != (self.error is not None):
            raise ValueError(
                f"episode {self.id}: it has a score, or it failed with an error; got score={self.score}, "
                f"end={self.end!r}, error={self.error!r}"
            )


class HasError(Protocol):
    """Anything that may have failed: an episode, or its summary."""

    @property
    def error(self) -> str | None:
        """The reason of the failure; None without one."""
        ...


def failures(episodes: Sequence[HasError]) -> dict[str, int]:
    """Count failed episodes by reason, the most frequent first."""
    counts: dict[str, int] = {}
    for episode in episodes:
        if episode.error is not None:
            counts[episode.error] = counts.get(episode.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
