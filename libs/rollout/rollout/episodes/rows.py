"""A token stream as the tensors that travel between ranks, and an episode from those of its streams.

A row has what a summary lacks: tokens, log-probs, routed experts and media. Loss mask and policy versions follow from
the summary's spans, positions from the length.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.chat.images import without_images
from rollout.chat.segment import NOT_SAMPLED, Segment
from rollout.episodes.episode import Episode
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from seqpack.comm.row_exchange import ALIGNED, unflatten_row

if TYPE_CHECKING:  # it reads rows
    from rollout.episodes.summary import EpisodeSummary, SegmentSummary

IDS, LOG_PROBS = "input_ids", "rollout_log_probs"
MEDIA, LISTED = "media ", "list "
"""What stands before the key of media: a tensor, or a list of whole numbers."""


def row_columns(segment: Segment) -> dict[str, Tensor]:
    """Return the tensors of a stream: i32 tokens, log-probs in float32 or, where that is not exact, float64, and what
    it has of routed experts and media."""
    log_probs = torch.tensor(segment.log_probs, dtype=torch.float64)
    narrow = log_probs.float()
    tensors = {
        IDS: torch.tensor(segment.ids, dtype=torch.int32),
        LOG_PROBS: narrow if torch.equal(narrow.double(), log_probs) else log_probs,
    }
    if segment.routed_experts is not None:
        tensors[ROUTED_EXPERTS] = segment.routed_experts.tensor()
    for key, value in (segment.media or {}).items():
        listed = not isinstance(value, Tensor)
        tensors[f"{LISTED if listed else MEDIA}{key}"] = torch.tensor(value, dtype=torch.int64) if listed else value
    return tensors


def media_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the media of a row by their keys."""
    prefixes = (MEDIA, LISTED)
    return {n.removeprefix(p): tensor for n, tensor in tensors.items() for p in prefixes if n.startswith(p)}


def rest_of(episode: Episode) -> bytes:
    """Return what is in neither rows nor summary as JSON: the conversation without its pictures, and seconds.

    Raises:
        ValueError: JSON cannot write a message.
    """
    rest = {"messages": [dict(m) for m in without_images(episode.messages)], "timings": dict(episode.timings)}
    try:
        data = json.dumps(rest, separators=(",", ":")).encode()
    except TypeError as error:
        raise ValueError(f"episode {episode.id} has a message that JSON cannot write: {error}") from error
    return data + b" " * (-len(data) % ALIGNED)


def flatten_episode(summary: "EpisodeSummary") -> Tensor:
    """Return all of an episode that other ranks lack, uint8[`EpisodeSummary.nbytes`]; of its holder."""
    assert summary.held is not None, f"episode {summary.id} lies on rank {summary.holder}"
    return torch.cat([*summary.rows, torch.frombuffer(bytearray(rest_of(summary.held)), dtype=torch.uint8)])


def read_episode(summary: "EpisodeSummary", flat: Tensor) -> Episode:
    """Return the episode of a summary from the bytes of `flatten_episode`."""
    *rows, rest = flat.split([*(segment.nbytes for segment in summary.segments), summary.rest])
    read = json.loads(rest.numpy().tobytes())
    return Episode(
        summary.id,
        summary.task_id,
        summary.attempt,
        tuple(read_segment(s, unflatten_row(row, s.columns)) for s, row in zip(summary.segments, rows, strict=True)),
        summary.score,
        summary.end,
        read["timings"],
        summary.error,
        tuple(read["messages"]),
        summary.metrics,
        summary.group,
    )


def read_segment(summary: "SegmentSummary", tensors: Mapping[str, Tensor]) -> Segment:
    """Return the token stream of a summary and its row."""
    experts, media = tensors.get(ROUTED_EXPERTS), media_of(tensors)
    shown: dict[str, Any] = {
        key: value.tolist() if f"{LISTED}{key}" in tensors else value.clone() for key, value in media.items()
    }
    return Segment(
        tuple(tensors[IDS].tolist()),
        tuple(on for version, count in summary.spans for on in repeat(version != NOT_SAMPLED, count)),
        tuple(tensors[LOG_PROBS].tolist()),
        summary.policy_versions,
        shown or None,
        summary.agent,
        None if experts is None else RoutedExperts.of(experts),
    )


def tokens_from_spans(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the policy version of each token, i32[tokens]."""
    versions, counts = zip(*spans, strict=True)
    return torch.repeat_interleave(torch.tensor(versions, dtype=torch.int32), torch.tensor(counts))
