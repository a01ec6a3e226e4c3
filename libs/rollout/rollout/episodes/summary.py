"""Summaries of episodes: what every rank of a run knows of an episode whose rows lie on one of them.

A summary has all that rewards, groups, filters, plans and metrics read, and its size does not grow with the tokens. The
rows themselves, and the conversation for people, are its holder's (`rollout.episodes.rows`).
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias

from torch import Tensor

from rollout.chat.segment import NOT_SAMPLED
from rollout.environments.environment import End, Score
from rollout.episodes.episode import Episode, ScoredSegments
from rollout.episodes.media_codec import DTYPES
from rollout.episodes.rows import rest_of, row_columns
from seqpack.comm.row_exchange import Column, columns_of, flatten_row, row_bytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class SegmentSummary:
    """A token stream without its tokens: `spans` and `nll` as `Segment` has them, `columns` of its row."""

    spans: tuple[tuple[int, int], ...]
    nll: float
    columns: tuple[Column, ...]
    agent: str = ""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(count for _, count in self.spans)

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(count for version, count in self.spans if version != NOT_SAMPLED)

    @property
    def nbytes(self) -> int:
        """The bytes of its row."""
        return row_bytes(self.columns)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The policy version of each token."""
        return tuple(version for version, count in self.spans for version in repeat(version, count))


@dataclass(frozen=True)
class EpisodeSummary(ScoredSegments):
    """An episode as other ranks know it; fields as `Episode` has them. `holder`: the rank that has it; `rest`: the
    bytes of what is neither here nor in a row; `held`, `rows`: the episode and its rows, on that rank alone."""

    id: str
    task_id: str
    attempt: int
    segments: tuple[SegmentSummary, ...]
    score: Score | None
    end: End
    error: str | None
    metrics: Mapping[str, float]
    group: int
    holder: int
    rest: int
    held: Episode | None = field(default=None, repr=False, compare=False)
    rows: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The bytes of its rows and of the rest."""
        return self.rest + sum(segment.nbytes for segment in self.segments)


AnyEpisode: TypeAlias = Episode | EpisodeSummary
"""An episode, whole or by its summary: both have the fields of a summary up to `group`."""


def summarize(episode: Episode, holder: int) -> EpisodeSummary:
    """Return the summary of an episode that this rank holds; ValueError for messages that JSON cannot write."""
    tensors = [row_columns(segment) for segment in episode.segments]
    segments = tuple(
        SegmentSummary(segment.spans, segment.nll, columns_of(columns), segment.agent)
        for segment, columns in zip(episode.segments, tensors, strict=True)
    )
    return EpisodeSummary(
        episode.id,
        episode.task_id,
        episode.attempt,
        segments,
        episode.score,
        episode.end,
        episode.error,
        episode.metrics,
        episode.group,
        holder,
        len(rest_of(episode)),
        episode,
        tuple(map(flatten_row, tensors)),
    )


def encode_summaries(summaries: Sequence[EpisodeSummary]) -> bytes:
    """Return summaries as bytes: JSON, compressed. They lose what the holder has."""
    return zlib.compress(json.dumps([_plain(one) for one in summaries], separators=(",", ":")).encode(), 1)


def decode_summaries(data: bytes) -> list[EpisodeSummary]:
    """Return the summaries that `encode_summaries` wrote."""
    return [_summary(*fields) for fields in json.loads(zlib.decompress(data))]


def _plain(one: EpisodeSummary) -> list[Any]:
    segments = [
        [s.spans, s.nll, [[c.name, _NAMES[c.dtype], c.shape] for c in s.columns], s.agent] for s in one.segments
    ]
    score = one.score and [_number(one.score.reward), _numbers(one.score.reward_components), one.score.turn_rewards]
    metrics, last = _numbers(one.metrics), [one.group, one.holder, one.rest]
    return [one.id, one.task_id, one.attempt, segments, score, one.end, one.error, metrics, *last]


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: float) -> float:
    """Return a number as JSON can write it; an environment may give numpy's."""
    return value if isinstance(value, int) else float(value)


def _summary(
    id_: str, task_id: str, attempt: int, segments: list[Any], score: list[Any] | None, end: End, *rest: Any
) -> EpisodeSummary:
    read = tuple(
        SegmentSummary(
            tuple((version, count) for version, count in spans),
            nll,
            tuple(Column(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in columns),
            agent,
        )
        for spans, nll, columns, agent in segments
    )
    return EpisodeSummary(id_, task_id, attempt, read, None if score is None else Score(*score), end, *rest)
